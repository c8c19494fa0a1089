"""Compare log-probs that tokens were sampled with to those of the policy that learns from them."""

import math

import torch
from torch import Tensor


def sampling_gaps(sampled: Tensor, current: Tensor, nucleus: float = 1.0) -> Tensor:
    """Measure how far `current` log-probs (t,) are from those `sampled` with, in nats, at least 0; nan stays nan."""
    # Over a nucleus of at least this probability a log-prob is up to -log(nucleus) above the one over the vocabulary.
    above = sampled - current
    return torch.maximum(-above, above + math.log(nucleus)).clamp(min=0)


def open_choice(sampled: Tensor) -> Tensor:
    """Estimate how probably each token (t,) could have been another, from its log-prob, plus 1e-3."""
    # Logits that are off by x move a token's log-prob by about x (1 - p): near-certain tokens hide any error.
    return 1 - sampled.exp() + 1e-3
