"""Compare log-probs that tokens were sampled with to those of the policy that learns from them."""

from torch import Tensor


def sampling_gaps(sampled: Tensor, current: Tensor) -> Tensor:
    """Measure how far `current` log-probs (t,) are from those `sampled` with, in nats; nan stays nan."""
    return (sampled - current).abs()


def open_choice(sampled: Tensor) -> Tensor:
    """Estimate how probably each token (t,) could have been another, from its log-prob, plus 1e-3."""
    # Logits that are off by x move a token's log-prob by about x (1 - p): near-certain tokens hide any error.
    return 1 - sampled.exp() + 1e-3
