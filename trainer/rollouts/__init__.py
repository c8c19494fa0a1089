"""Sample completions of prompts.

An engine that samples (transformers' `generate` today, a server or another process later) is a module here with one
function that takes prompts with their keys and gives `Rollouts`; no other part of the trainer knows which one it was.
"""

from trainer.rollouts.sampling import Rollouts, generate

__all__ = ["Rollouts", "generate"]
