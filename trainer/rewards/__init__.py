"""Reward completions and turn rewards into advantages."""

from .calls import Reward, compute_rewards, group_advantages, load_reward, load_rewards, rewards_by
from .numbers import exact_match

__all__ = [
    "Reward", "compute_rewards", "exact_match", "group_advantages", "load_reward", "load_rewards", "rewards_by",
]  # fmt: skip
