"""Draw tokens from logits, every draw keyed, the nucleus found among the likeliest tokens.

A keyed draw depends neither on the other rows of the batch nor on earlier draws: a run repeats exactly from its
seed. A token is drawn by inverse CDF, in the order of the vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CANDIDATES = 256  # likeliest tokens that are looked at first; a nucleus is rarely larger


def keyed_uniforms(keys: Sequence[Sequence[int]], length: int) -> Tensor:
    """Draw (B, length) float64 in [0, 1): row b holds the draws of `keys[b]`, whatever the other rows are."""
    return torch.from_numpy(np.stack([np.random.default_rng(list(key)).random(length) for key in keys]))


class Draws(NamedTuple):
    """One token of each of B rows."""

    tokens: Tensor  # (B, 1) int64; any for a row with a nan
    logprobs: Tensor  # (B, 1) fp32, nats, before the nucleus; 0 if greedy, nan where the scores are not finite
    narrow: Tensor  # (B, 1) bool: the nucleus is among the `CANDIDATES` likeliest tokens


def draw(
    scores: Tensor, uniforms: Tensor | None, temperature: float, top_p: float, candidates: int | None = None
) -> Draws:
    """Draw one token of each row of scores (B, V) by uniforms (B, 1), or take the likeliest.

    A nucleus is looked for among so many `candidates`, and the draw is wrong where it has more tokens. Without their
    number it is found wherever it is, for which the host waits for the device.
    """
    largest = scores.amax(-1, keepdim=True)
    narrow, unknown = torch.ones_like(largest, dtype=torch.bool), ~largest.isfinite()
    if uniforms is None:
        return Draws(scores.argmax(-1, keepdim=True), torch.zeros_like(largest).masked_fill(unknown, torch.nan), narrow)
    scaled = scores.float() / temperature
    weights = (scaled - scaled.amax(-1, keepdim=True).double()).exp_()
    if top_p < 1:
        share = top_p * weights.sum(-1, keepdim=True)
        tokens, narrow = _nucleus(scaled, weights, share, uniforms, candidates)
    else:
        tokens = _inverse_cdf(weights, uniforms)
    tokens = tokens.clamp(max=scores.shape[1] - 1)  # beyond it are only sums that are nan
    logprobs = torch.log_softmax(scaled, -1).gather(1, tokens)  # rounded as those of a training forward are
    return Draws(tokens, logprobs.masked_fill(unknown, torch.nan), narrow)


def _nucleus(
    scaled: Tensor, weights: Tensor, share: Tensor, uniforms: Tensor, candidates: int | None
) -> tuple[Tensor, Tensor]:
    """Draw tokens (B, 1), each of the likeliest that make up `share` (B, 1) of weights (B, V), and give `narrow`.

    Among equally likely tokens the last of the vocabulary come first.
    """
    size = scaled.shape[1]
    tokens = scaled.topk(min(candidates or CANDIDATES, size)).indices  # of float32, at half the cost
    first = weights.gather(1, tokens[:, :CANDIDATES])
    narrow = (first * (first > first[:, -1:])).sum(-1, keepdim=True) >= share  # and cut in no tie
    tokens = tokens.sort(-1, descending=True).values
    by_token = weights.gather(1, tokens)
    values, order = by_token.sort(dim=-1, descending=True, stable=True)
    inside = torch.zeros_like(narrow.expand_as(order)).scatter(1, order, values.cumsum(-1) - values < share)
    place = _inverse_cdf((by_token * inside).flip(-1), uniforms).clamp(max=tokens.shape[1] - 1)
    drawn = tokens.flip(-1).gather(1, place)
    if candidates is None and size > CANDIDATES and not narrow.all():
        rows = (~narrow).nonzero()[:, 0]
        drawn[rows] = _nucleus(scaled[rows], weights[rows], share[rows], uniforms[rows], size)[0]
    return drawn, narrow | (size <= CANDIDATES)


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Places (B, 1) in rows of weights (B, N) that uniforms (B, 1) fall on, never one of weight 0."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    place = torch.searchsorted(cumulative, uniforms * total, right=True)
    return torch.minimum(place, torch.searchsorted(cumulative, total))
