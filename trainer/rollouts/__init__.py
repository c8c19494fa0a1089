"""Sample completions of prompts.

An engine takes prompts with their keys and returns `Rollouts` (`engine.py`); a run samples and evaluates with the one
that `rollout_engine` names.
"""

from .engine import Engine, Rollouts, end_ids
from .environments import PlayedEngine, load_environment
from .in_process import TransformersEngine
from .vllm import VllmEngine, await_server

__all__ = [
    "Engine", "PlayedEngine", "Rollouts", "TransformersEngine", "VllmEngine", "await_server", "end_ids",
    "load_environment",
]  # fmt: skip
