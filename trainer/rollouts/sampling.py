"""Draw tokens from logits, every draw keyed, the nucleus found among the likeliest tokens.

A keyed draw depends neither on the other rows of the batch nor on earlier draws: a run repeats exactly from its
seed. A token is drawn by inverse CDF, in the order of the vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cfa_kernels import KeptTokens

CANDIDATES = 256  # likeliest tokens that are looked at first; a nucleus is rarely larger


def keyed_uniforms(keys: Sequence[Sequence[int]], length: int) -> Tensor:
    """Draw (B, length) float64 in [0, 1): row b holds the draws of `keys[b]`, whatever the other rows are."""
    return torch.from_numpy(np.stack([np.random.default_rng(list(key)).random(length) for key in keys]))


class TokenDraw(NamedTuple):
    """One token of each of B rows."""

    tokens: Tensor  # (B, 1) int64; any for a row with a nan
    logprobs: Tensor  # (B, 1) fp32, nats, over the nucleus; 0 if greedy, nan where the scores are not finite
    narrow: Tensor  # (B, 1) bool: the nucleus is among the `CANDIDATES` likeliest tokens
    kept: Tensor | None = None  # (B, 2, C) int32: ids of the nucleus among others of -1, and bits of fp32 log-probs


def draw(
    scores: Tensor, uniforms: Tensor | None, temperature: float, top_p: float, candidates: int | None = None
) -> TokenDraw:
    """Draw one token of each row of scores (B, V) by uniforms (B, 1), or take the likeliest.

    A nucleus is looked for among so many `candidates`, and the draw is wrong where it has more tokens. Without their
    number it is found wherever it is, for which the host waits for the device.
    """
    largest = scores.amax(-1, keepdim=True)
    narrow, unknown = torch.ones_like(largest, dtype=torch.bool), ~largest.isfinite()
    if uniforms is None:
        nothing = torch.zeros_like(largest).masked_fill(unknown, torch.nan)
        return TokenDraw(scores.argmax(-1, keepdim=True), nothing, narrow)
    scaled = scores.float() / temperature
    weights = (scaled - scaled.amax(-1, keepdim=True).double()).exp_()
    kept = None
    if top_p < 1:
        share = top_p * weights.sum(-1, keepdim=True)
        tokens, narrow, kept = _nucleus(scaled, weights, share, uniforms, candidates)
    else:
        tokens = _inverse_cdf(weights, uniforms)
    tokens = tokens.clamp(max=scores.shape[1] - 1)  # beyond it are only sums that are nan
    if kept is None:
        logprobs = torch.log_softmax(scaled, -1).gather(1, tokens)  # rounded as those of a training forward are
    else:
        below = scaled - scaled.amax(-1, keepdim=True)
        inside = below.gather(1, kept.clamp(min=0)).masked_fill(kept < 0, -torch.inf)
        total = inside.logsumexp(-1, keepdim=True)
        logprobs = below.gather(1, tokens) - total
        kept = torch.stack([kept.int(), (inside - total).view(torch.int32)], 1)
    return TokenDraw(tokens, logprobs.masked_fill(unknown, torch.nan), narrow, kept)


def _nucleus(
    scaled: Tensor, weights: Tensor, share: Tensor, uniforms: Tensor, candidates: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw tokens (B, 1), each of the likeliest that make up `share` (B, 1) of weights (B, V); give `narrow`, `kept`.

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
    drawn, kept = tokens.flip(-1).gather(1, place), torch.where(inside, tokens, -1)
    if candidates is None and size > CANDIDATES and not narrow.all():
        rows = (~narrow).nonzero()[:, 0]
        kept = torch.nn.functional.pad(kept, (0, size - kept.shape[1]), value=-1)
        drawn[rows], _, kept[rows] = _nucleus(scaled[rows], weights[rows], share[rows], uniforms[rows], size)
    return drawn, narrow | (size <= CANDIDATES), kept


class KeptRecord:
    """Ids that draws kept, and their log-probs, collected on the host while completions are made."""

    def __init__(self) -> None:
        self._ids, self._counts, self._places = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
        self._logprobs = list[np.ndarray]()

    def add(self, rows: np.ndarray, kept: np.ndarray, first: int) -> None:
        """Add `TokenDraw.kept` (R, t, 2, C) of t tokens, from number `first` on, of the completions `rows` (R,)."""
        inside = kept[:, :, 0] >= 0
        ids, bits = (kept[:, :, i][inside].astype(np.int32) for i in range(2))
        self._ids.append(ids)
        self._logprobs.append(bits.view(np.float32))
        self._counts.append(inside.sum(-1).ravel())
        tokens = first + np.arange(kept.shape[1])
        self._places.append(np.stack(np.broadcast_arrays(rows[:, None], tokens)).reshape(2, -1))

    def rows(self, count: int, length: int) -> list[KeptTokens] | None:
        """Give the ids of each of so many completions and tokens, none where none were added; None for nothing."""
        if not self._places:
            return None
        row, token = np.concatenate(self._places, 1)
        own = (row < count).nonzero()[0]
        index = np.zeros((count, length), np.int64)  # number 0 has no ids
        index[row[own], token[own]] = own + 1
        columns = ([np.zeros(1, np.int64), *self._counts], self._ids, self._logprobs)
        every = KeptTokens.of_counts(*(torch.from_numpy(np.concatenate(parts)) for parts in columns))
        return [every.take(line) for line in torch.from_numpy(index)]


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Places (B, 1) in rows of weights (B, N) that uniforms (B, 1) fall on, never one of weight 0."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    place = torch.searchsorted(cumulative, uniforms * total, right=True)
    return torch.minimum(place, torch.searchsorted(cumulative, total))
