"""Reward completions and turn rewards into advantages."""

from trainer.rewards.advantages import group_advantages
from trainer.rewards.calls import Reward, compute_rewards, load_answer_format, load_reward, load_rewards, rewards_by
from trainer.rewards.numbers import exact_match

__all__ = [
    "Reward", "compute_rewards", "exact_match", "group_advantages", "load_answer_format", "load_reward", "load_rewards",
    "rewards_by",
]  # fmt: skip
