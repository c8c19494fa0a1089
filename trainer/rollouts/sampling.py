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
from cfa_kernels.ops.block_sums import WIDTH, block_sums

CANDIDATES = 256  # likeliest tokens that are looked at first; a nucleus is rarely larger
_WIDER = 16  # times so many tokens are looked at where it is


def keyed_uniforms(keys: Sequence[Sequence[int]], length: int) -> Tensor:
    """Draw (B, length) float64 in [0, 1): row b holds the draws of `keys[b]`, whatever the other rows are."""
    return torch.from_numpy(np.stack([np.random.default_rng(list(key)).random(length) for key in keys]))


class TokenDraw(NamedTuple):
    """One token of each of B rows."""

    tokens: Tensor  # (B, 1) int64; any for a row with a nan
    logprobs: Tensor  # (B, 1) fp32, nats, over the nucleus; 0 if greedy, nan where the scores are not finite
    held: Tensor  # (B, 1) bool: the nucleus is among so many candidates, of no use without their number
    kept: Tensor | None = None  # (B, 2, C) int32: ids of the nucleus among others of -1, and bits of fp32 log-probs


def draw(
    scores: Tensor, uniforms: Tensor | None, temperature: float, top_p: float, candidates: int | None = None
) -> TokenDraw:
    """Draw one token of each row of scores (B, V) by uniforms (B, 1), or take the likeliest.

    A nucleus is looked for among so many `candidates`, and the draw is wrong where it has more tokens. Without their
    number it is found wherever it is, for which the host waits for the device.
    """
    if uniforms is None:
        largest = scores.amax(-1, keepdim=True)
        nothing = torch.zeros_like(largest, dtype=torch.float32).masked_fill(~largest.isfinite(), torch.nan)
        return TokenDraw(scores.argmax(-1, keepdim=True), nothing, torch.ones_like(largest, dtype=torch.bool))
    maxima, sums = block_sums(scores, temperature)
    rows = _Rows(scores, maxima, maxima.amax(-1, keepdim=True), sums, uniforms)
    rows = rows._replace(by_block=sums * rows.weights(maxima, temperature))
    if top_p < 1:
        size = min(candidates or CANDIDATES, scores.shape[1])
        return _from_nucleus(rows, temperature, top_p, size, widens=candidates is None)
    cumulative = rows.by_block.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    block = _place(cumulative, uniforms * total)
    rest = uniforms * total - (cumulative - rows.by_block).gather(1, block)
    tokens, likely = rows.of_blocks(block)
    place = _place(rows.weights(likely, temperature).cumsum(-1), rest)
    logprobs = (rows.below(likely.gather(1, place), temperature).double() - total.log()).float()
    return TokenDraw(tokens.gather(1, place), logprobs, torch.ones_like(block, dtype=torch.bool))


class _Rows(NamedTuple):
    """Scores of B rows, summed up by blocks of `WIDTH`."""

    scores: Tensor  # (B, V)
    maxima: Tensor  # (B, n) of the blocks
    largest: Tensor  # (B, 1)
    by_block: Tensor  # (B, n) float64, weights of the blocks
    uniforms: Tensor  # (B, 1) float64

    def below(self, scores: Tensor, temperature: float) -> Tensor:
        """Scores (B, N) over the temperature, from the largest one on, fp32."""
        return scores.float() / temperature - self.largest.float() / temperature

    def weights(self, scores: Tensor, temperature: float) -> Tensor:
        """Probabilities in float64 of tokens with scores (B, N), over that of the likeliest."""
        return (scores.float() / temperature).double().sub_(self.largest.float() / temperature).exp_()

    def of_blocks(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and scores (B, N * WIDTH) of the tokens of blocks (B, N), -inf beyond the vocabulary."""
        last = self.scores.shape[1] - 1
        ids = (blocks[:, :, None] * WIDTH + torch.arange(WIDTH, device=blocks.device)).flatten(1)
        inside = ids.clamp(max=last)
        return inside, self.scores.gather(1, inside).masked_fill(ids > last, -torch.inf)


def _from_nucleus(rows: _Rows, temperature: float, top_p: float, size: int, *, widens: bool) -> TokenDraw:
    """Draw from the likeliest tokens that make up `top_p` of all weights.

    They are looked for among so many likeliest ones; if it `widens`, among more where these do not hold them. Among
    equally likely tokens the last of the vocabulary come first.
    """
    vocabulary, ids, near = rows.scores.shape[1], None, rows.scores
    if 2 * size * WIDTH <= vocabulary:  # they are in the blocks with the largest maxima
        blocks = rows.maxima.topk(size, sorted=False).indices
        ids, near = rows.of_blocks(blocks)
        exact = rows.weights(near, temperature).unflatten(1, (-1, WIDTH)).sum(-1)
        total = rows.by_block.scatter(1, blocks, exact).sum(-1, keepdim=True)
    else:
        total = rows.weights(near, temperature).sum(-1, keepdim=True)
    best, share = near.topk(size, sorted=False).indices, top_p * total
    tokens, order = (best if ids is None else ids.gather(1, best)).sort(-1, descending=True)
    likely = near.gather(1, best.gather(1, order))
    by_token = rows.weights(likely, temperature)
    values, order = by_token.sort(dim=-1, descending=True, stable=True)
    inside = torch.zeros_like(by_token, dtype=torch.bool).scatter(1, order, values.cumsum(-1) - values < share)
    cumulative = (by_token * inside).flip(-1).cumsum(-1)
    place = _place(cumulative, rows.uniforms * cumulative[:, -1:])
    logprobs = rows.below(likely, temperature).masked_fill(~inside | total.isnan(), -torch.inf)
    logprobs = logprobs - logprobs.logsumexp(-1, keepdim=True)  # nan where scores are not finite
    kept = torch.stack([torch.where(inside, tokens, -1).int(), logprobs.view(torch.int32)], 1)
    drawn, logprobs = (part.flip(-1).gather(1, place) for part in (tokens, logprobs))
    held = _holds(share, values, vocabulary)
    if widens and not held.all():
        few = (~held).nonzero()[:, 0]
        part = _Rows(*(column[few] for column in rows))
        more = _from_nucleus(part, temperature, top_p, min(_WIDER * size, vocabulary), widens=True)
        assert more.kept is not None
        kept = torch.nn.functional.pad(kept, (0, more.kept.shape[2] - size), value=-1)
        drawn[few], logprobs[few], kept[few] = more.tokens, more.logprobs, more.kept
    return TokenDraw(drawn, logprobs, held, kept)


def _holds(share: Tensor, values: Tensor, vocabulary: int) -> Tensor:
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


def _place(cumulative: Tensor, aim: Tensor) -> Tensor:
    """Places (B, 1) in rows of cumulative weights (B, N) that numbers (B, 1) fall on, never one of weight 0."""
    place = torch.searchsorted(cumulative, aim, right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(place, last).clamp_(max=cumulative.shape[1] - 1)  # beyond it are only sums that are nan
