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
    weights = (scaled.double() - scaled.amax(-1, keepdim=True)).exp_()
    if top_p < 1:
        weights, narrow = _nucleus(weights, top_p, candidates)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    place = torch.searchsorted(cumulative, uniforms * total, right=True)
    place = torch.minimum(place, torch.searchsorted(cumulative, total))  # never a token of weight 0
    tokens = place.clamp(max=scores.shape[1] - 1)  # beyond it are only sums that are nan
    return Draws(tokens, torch.log_softmax(scaled, -1).gather(1, tokens).masked_fill(unknown, torch.nan), narrow)


def _nucleus(weights: Tensor, top_p: float, candidates: int | None) -> tuple[Tensor, Tensor]:
    """Give weights (B, V) with 0 for each token than which likelier ones make up `top_p`, and whether it is `narrow`.

    Among equally likely tokens the last of the vocabulary come first.
    """
    share = top_p * weights.sum(-1, keepdim=True)
    values, tokens = weights.topk(min(candidates or CANDIDATES, weights.shape[1]))
    first = values[:, :CANDIDATES]
    narrow = (first * (first > first[:, -1:])).sum(-1, keepdim=True) >= share  # and cut in no tie
    tokens, order = tokens.sort(-1, descending=True)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    inside = values.cumsum(-1) - values < share
    kept = torch.zeros_like(weights).scatter_(1, tokens.gather(1, order), values * inside)
    if candidates is None and weights.shape[1] > CANDIDATES and not narrow.all():
        rows = (~narrow).nonzero()[:, 0]
        kept[rows] = _nucleus(weights[rows], top_p, weights.shape[1])[0]
    return kept, narrow | (weights.shape[1] <= CANDIDATES)
