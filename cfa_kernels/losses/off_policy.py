"""Compare log-probs that tokens were sampled with to those of the policy that learns from them: gaps and ratios."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def sampling_gaps(sampled: Tensor, found: Tensor, nucleus: float = 1.0) -> Tensor:
    """Measure how far log-probs are from those sampled with, less what normalising over a nucleus explains.

    Over a nucleus of a probability of at least `nucleus`, a token's log-prob is up to -log(nucleus) above the one over
    the whole vocabulary, and never below it.

    Args:
        sampled, found: (t,), nats.
        nucleus: in (0, 1]; 1 where `sampled` is over the whole vocabulary.

    Returns:
        (t,), nats, at least 0; nan where a log-prob is.
    """
    above = sampled - found
    return torch.maximum(-above, above + math.log(nucleus)).clamp(min=0)


def open_choice(sampled: Tensor) -> Tensor:
    """Give how probably each token (t,) could have come out otherwise, and a little more, from its log-prob.

    Logits that are off by x move a token's log-prob by some x (1 - p): near-certain tokens hide any error. The
    little keeps those of probability 1 from dividing rounding by nothing.
    """
    return 1 - sampled.exp() + 1e-3


def truncated_ratios(found: Sequence[Tensor], sampled: Sequence[Tensor], most: float) -> list[Tensor]:
    """Compute the factors of truncated importance sampling: exp(found - sampled), at most `most`; of rows (t,), nats.

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; TRL's
    `token_truncate`. They are at least 0, so weights of a loss can hold them whatever the sign of the advantage.
    """
    return [(ours - theirs).exp().clamp(max=most) for ours, theirs in zip(found, sampled, strict=True)]
