"""Turn rewards into advantages: each completion against the others of its problem."""

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, num_generations: int, scale_rewards: str = "group") -> Tensor:
    """Compute (reward - group mean) / (std + 1e-4) of (B,) rewards, groups side by side; (B,) fp32.

    `scale_rewards` names the standard deviation: the group's, the batch's, or none (no division). A group whose
    rewards are all equal has advantage exactly 0, so that nothing spends work on it.
    """
    groups = rewards.float().view(-1, num_generations)  # (groups, G)
    centred = groups - groups.mean(1, keepdim=True)
    if scale_rewards != "none":
        deviation = groups.std(1, keepdim=True) if scale_rewards == "group" else rewards.float().std()
        centred = centred / (deviation + 1e-4)  # TRL's, so that advantages agree with its own
    # Rounding of the mean may leave 1e-8 where all rewards are equal, which the division would blow up.
    mixed = groups.amax(1, keepdim=True) > groups.amin(1, keepdim=True)
    return torch.where(mixed, centred, torch.zeros_like(centred)).flatten()
