"""Sample completions of prompts.

An engine takes prompts with their keys and returns `Rollouts` (`engine.py`); a run has one, chosen by `rollout_engine`,
and samples and evaluates with it. Nothing outside this package knows which.
"""

from torch import nn
from transformers import PreTrainedTokenizerBase

from trainer.precision import Precision
from trainer.rollouts.engine import Engine, NonFiniteLogits, Rollouts
from trainer.rollouts.in_process import TransformersEngine, generate
from trainer.rollouts.settings import RolloutSettings
from trainer.rollouts.vllm import VllmEngine, await_server

__all__ = [
    "Engine", "NonFiniteLogits", "RolloutSettings", "Rollouts", "TransformersEngine", "VllmEngine", "await_engine",
    "engine_for", "generate",
]  # fmt: skip


def await_engine(settings: RolloutSettings) -> None:
    """Wait for the server that samples, if one does; `ConnectionError` where it does not answer in time."""
    if settings.rollout_engine == "vllm":
        await_server(settings.vllm_server_base_url.rstrip("/"))


def engine_for(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, settings: RolloutSettings, precision: Precision,
    max_gap: float,
) -> Engine:  # fmt: skip
    """Set up the engine that `rollout_engine` names, for a policy; it multiplies as `precision` does.

    `max_gap` is the distance between its log-probs and the policy's that rounding explains, nats.

    Raises:
        ValueError: the settings ask for what the engine or the model cannot do; the message names the setting.
        ImportError, ConnectionError, NotImplementedError: a server cannot be used; the message says why.
    """
    if settings.rollout_engine == "vllm":
        return VllmEngine(model, tokenizer, settings, max_gap)
    return TransformersEngine(model, tokenizer, settings, dtype=precision.products if precision.is_mixed else None)
