"""Reward completions and turn rewards into advantages."""

from trainer.rewards.functions import (
    Reward,
    compute_rewards,
    exact_match,
    group_advantages,
    load_answer_format,
    load_reward,
    load_rewards,
    rewards_by,
)

__all__ = [
    "Reward",
    "compute_rewards",
    "exact_match",
    "group_advantages",
    "load_answer_format",
    "load_reward",
    "load_rewards",
    "rewards_by",
]
