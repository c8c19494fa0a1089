"""Sample completions of prompts.

An engine takes prompts with their keys and gives `Rollouts` (`engine.py`); a run has one, chosen by `rollout_engine`,
and samples and evaluates with it. Nothing outside this package knows which.
"""

from torch import nn
from transformers import PreTrainedTokenizerBase

from trainer.precision import Precision
from trainer.rollouts.engine import Engine, Rollouts
from trainer.rollouts.in_process import TransformersEngine, generate
from trainer.rollouts.settings import RolloutSettings

__all__ = ["Engine", "RolloutSettings", "Rollouts", "TransformersEngine", "engine_for", "generate"]

ENGINES = {"transformers": TransformersEngine}


def engine_for(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, settings: RolloutSettings, precision: Precision
) -> Engine:
    """Set up the engine that `rollout_engine` names, for a policy and its tokenizer; it multiplies as `precision` does.

    Raises:
        ValueError: the settings ask for what the engine or the model cannot do; the message names the setting.
    """
    dtype = precision.products if precision.is_mixed else None
    return ENGINES[settings.rollout_engine](model, tokenizer, settings, dtype=dtype)
