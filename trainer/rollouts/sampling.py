"""Draw tokens from logits, every draw keyed, the nucleus found among the likeliest tokens.

A keyed draw depends neither on the other rows of the batch nor on earlier draws: a run repeats exactly from its
seed. A token is drawn by inverse CDF, in the order of the vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cfa_kernels import KeptTokens

CANDIDATES = 256  # likeliest tokens that are looked at first; a nucleus is rarely larger
_WIDER = 16  # times so many tokens are looked at where it is
_CACHED = 1 << 17  # weights in float64 that a CPU's cache holds


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
    weights = functools.partial(_weights, temperature=temperature)
    if top_p < 1:
        share = top_p * _by_parts(lambda *part: weights(*part).sum(-1, keepdim=True), scores, largest)
        size = min(candidates or CANDIDATES, scores.shape[1])
        row = scores, largest, share, uniforms
        tokens, logprobs, narrow, kept = _nucleus(*row, temperature, size, widens=candidates is None)
        return TokenDraw(tokens, logprobs.masked_fill(unknown, torch.nan), narrow, kept)
    tokens = _by_parts(lambda *part: _inverse_cdf(weights(*part[:2]), part[2]), scores, largest, uniforms)
    tokens = tokens.clamp_(max=scores.shape[1] - 1)  # beyond it are only sums that are nan
    logprobs = _by_parts(  # rounded as those of a training forward are
        lambda part, tokens: torch.log_softmax(part.float() / temperature, -1).gather(1, tokens), scores, tokens
    )
    return TokenDraw(tokens, logprobs.masked_fill(unknown, torch.nan), narrow)


def _by_parts(function: Callable[..., Tensor], scores: Tensor, *columns: Tensor) -> Tensor:
    """Give what a function of rows of scores (B, V) and of columns (B, 1) gives, in parts that a CPU's cache holds."""
    rows = max(1, _CACHED // scores.shape[1]) if scores.device.type == "cpu" else len(scores)
    parts = zip(*(whole.split(rows) for whole in (scores, *columns)), strict=True)
    return torch.cat([function(*part) for part in parts])


def _weights(scores: Tensor, largest: Tensor, temperature: float) -> Tensor:
    """Probabilities in float64 of tokens with such scores, over that of a token with the `largest` (B, 1)."""
    return (scores.float() / temperature - (largest.float() / temperature).double()).exp_()


def _nucleus(
    scores: Tensor, largest: Tensor, share: Tensor, uniforms: Tensor, temperature: float, size: int, *, widens: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw, as `TokenDraw` says, from the likeliest tokens that make up `share` (B, 1) of weights (B, V).

    They are looked for among so many likeliest ones; if it `widens`, among more where these do not hold them. Among
    equally likely tokens the last of the vocabulary come first.
    """
    vocabulary = scores.shape[1]
    tokens = scores.topk(size).indices.sort(-1, descending=True).values
    likely = scores.gather(1, tokens)
    by_token = _weights(likely, largest, temperature)
    values, order = by_token.sort(dim=-1, descending=True, stable=True)
    inside = torch.zeros_like(by_token, dtype=torch.bool).scatter(1, order, values.cumsum(-1) - values < share)
    place = _inverse_cdf((by_token * inside).flip(-1), uniforms).clamp(max=size - 1)
    below = likely.float() / temperature - largest.float() / temperature
    within = below.masked_fill(~inside, -torch.inf)
    total = within.logsumexp(-1, keepdim=True)
    drawn, logprobs = (part.flip(-1).gather(1, place) for part in (tokens, below - total))
    kept = torch.stack([torch.where(inside, tokens, -1).int(), (within - total).view(torch.int32)], 1)
    if widens and not (whole := _reaches(share, values, vocabulary)).all():
        rows = (~whole).nonzero()[:, 0]
        part = scores[rows], largest[rows], share[rows], uniforms[rows]
        more = _nucleus(*part, temperature, min(_WIDER * size, vocabulary), widens=True)
        kept = torch.nn.functional.pad(kept, (0, more[3].shape[2] - size), value=-1)
        drawn[rows], logprobs[rows], _, kept[rows] = more
    return drawn, logprobs, _reaches(share, values[:, :CANDIDATES], vocabulary), kept


def _reaches(share: Tensor, values: Tensor, vocabulary: int) -> Tensor:
    """Whether the largest weights (B, C) in falling order hold a nucleus, which they cut in no tie, (B, 1)."""
    above = values * (values > values[:, -1:])
    return (above.sum(-1, keepdim=True) >= share) | (values.shape[1] == vocabulary)


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
