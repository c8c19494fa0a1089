"""Sample completions of prompts.

An engine takes prompts with their keys and returns `Rollouts` (`engine.py`); a run samples and evaluates with the one
that `rollout_engine` names.
"""

from trainer.rollouts.engine import Engine, Rollouts
from trainer.rollouts.in_process import TransformersEngine, generate
from trainer.rollouts.vllm import VllmEngine, await_server

__all__ = ["Engine", "Rollouts", "TransformersEngine", "VllmEngine", "await_server", "generate"]
