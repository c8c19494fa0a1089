"""Draw tokens from logits, every draw keyed, the nucleus found among the likeliest tokens.

A keyed draw does not depend on what else is in the batch nor on what was drawn before: a run repeats exactly from its
seed. A token is drawn by inverse CDF, in the order of the vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor

CANDIDATES = 256  # likeliest tokens that are looked at first; a nucleus is rarely larger
_BLOCK = 256  # tokens whose probabilities are summed up before the one that a draw falls on is looked for
_BINS, _BINS_PER_NAT = 4096, 128  # of scores, from the best one down
_UNITS = 2.0**52  # of probability: sums of integers do not depend on their order
_IN_CACHE = 2**17  # scores that a CPU looks at together
_EXACT = {"cpu": torch.float64}  # of probabilities over the whole vocabulary: others keep float32 and sum in float64


class FiniteScores(LogitsProcessor):
    """Notes at each position which rows the model gave scores that are numbers, and passes scores on as they are.

    Sampling and the choice of the best token go on over a nan in silence: each picks some token or other.
    """

    def __init__(self) -> None:
        self.finite: list[Tensor] = []  # (B,) bool per position

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) in and out. -inf is a token that cannot come; a largest score of nan or +-inf is an error."""
        self.finite.append(scores.amax(-1).isfinite())
        return scores


class KeyedSampler(LogitsProcessor):
    """Turns each row of scores into the one token that its own uniform draw picks, by inverse CDF.

    With this as the last logits processor, greedy decoding samples. `uniforms` is (B, T) float64 in [0, 1).
    """

    def __init__(self, uniforms: Tensor, temperature: float, top_p: float) -> None:
        self.logprobs: list[Tensor] = []
        self._uniforms = uniforms
        self._temperature = temperature
        self._top_p = top_p

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) in; 0 at the drawn token and -inf elsewhere out."""
        position = len(self.logprobs)
        token, logprobs = picked(scores, self._uniforms[:, position : position + 1], self._temperature, self._top_p)
        self.logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf, dtype=torch.float32).scatter_(1, token, 0.0)


def picked(scores: Tensor, uniforms: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """Draw from scores (B, V) by `uniforms` (B, 1): tokens (B, 1), and log-probs (B,) before the nucleus, in fp32."""
    scores = scores.float() if temperature == 1 else scores.float() / temperature
    logprobs = torch.log_softmax(scores, -1)
    token = drawn(scores, logprobs, uniforms, top_p)
    return token, logprobs.gather(1, token).squeeze(1)


def drawn(scores: Tensor, logprobs: Tensor, uniforms: Tensor, top_p: float) -> Tensor:
    """Draw one token of each row by inverse CDF from its nucleus: the likeliest tokens that make up `top_p`.

    A token is in it if those likelier than it weigh less than `top_p`; of equally likely ones the last of the
    vocabulary come first.

    Args:
        scores: (B, V) fp32, over the temperature.
        logprobs: (B, V) fp32, their log-softmax.
        uniforms: (B, 1) float64 in [0, 1).
        top_p: in (0, 1].

    Returns:
        (B, 1) int64; some token or other for a row whose scores are not numbers.
    """
    if top_p >= 1:
        return _of_all(scores, uniforms)
    size = scores.shape[1]
    values, tokens = scores.topk(min(CANDIDATES, size))
    # Log of the sum of all weights: a row's best token shows it.
    normalizer = values[:, :1].double() - logprobs.gather(1, tokens[:, :1]).double()
    found = _cut(values, tokens, normalizer, top_p)
    token = _of_candidates(found, uniforms)
    if values.shape[1] < size and not found.whole.all():  # the one wait for the device
        rows = (~found.whole).nonzero().flatten()
        for some in rows.split(max(_IN_CACHE // size, 1)) if scores.device.type == "cpu" else [rows]:
            token[some] = _of_large_nucleus(scores[some], normalizer[some], uniforms[some], top_p)
    return token


class _Cut(NamedTuple):
    """The k likeliest tokens of each row, and which of them are in the nucleus."""

    values: Tensor  # (B, k) fp32 scores, falling, of equal ones the last of the vocabulary first
    tokens: Tensor  # (B, k) int64
    kept: Tensor  # (B, k) bool: the first few
    whole: Tensor  # (B,) bool: the nucleus ends among them


def _cut(values: Tensor, tokens: Tensor, normalizer: Tensor, top_p: float) -> _Cut:
    """Find out which of the k likeliest tokens (B, k) are kept."""
    tokens, order = tokens.sort(-1, descending=True)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    tokens = tokens.gather(1, order)
    mass = (values.double() - normalizer).exp()
    kept = mass.cumsum(-1) - mass < top_p
    last = values.gather(1, (kept.sum(-1, keepdim=True) - 1).clamp(min=0))
    return _Cut(values, tokens, kept, (last > values[:, -1:]).squeeze(1))


def _of_candidates(cut: _Cut, uniforms: Tensor) -> Tensor:
    tokens, order = cut.tokens.sort(-1)
    weights = (cut.values.double() - cut.values[:, :1].double()).exp() * cut.kept
    cumulative = weights.gather(1, order).cumsum(-1)
    return tokens.gather(1, _first_beyond(cumulative, uniforms * cumulative[:, -1:]))


def _of_large_nucleus(scores: Tensor, normalizer: Tensor, uniforms: Tensor, top_p: float) -> Tensor:
    """Draw from nuclei of more tokens than `CANDIDATES`: scores are counted into bins, and sorted in one bin only."""
    mass = scores.double().sub_(normalizer).exp_().mul_(_UNITS)
    bins = (scores.amax(-1, keepdim=True) - scores).mul_(_BINS_PER_NAT).nan_to_num_().clamp_(max=_BINS - 1).long()
    held = bins.new_zeros(len(scores), _BINS).scatter_add_(1, bins, mass.long()).double()
    upto = held.cumsum(-1)
    limit = top_p * upto[:, -1:]
    edge = torch.searchsorted(upto, limit).clamp(max=_BINS - 1)
    inside = bins == edge
    values = scores.masked_fill(~inside, -torch.inf).topk(max(int(inside.sum(-1).max()), 1)).values
    own = (values.double() - normalizer).exp() * _UNITS
    count = ((upto - held).gather(1, edge) + own.cumsum(-1) - own < limit).sum(-1, keepdim=True).clamp(min=1)
    last = values.gather(1, count - 1)
    kept, tied = scores >= last, scores == last
    spare = (kept & inside).sum(-1, keepdim=True) - count  # of the tied ones, the first of the vocabulary
    if spare.any():
        kept &= ~tied | (tied.cumsum(-1) > spare)
    return _of_weights(mass.mul_(kept), uniforms)


def _of_all(scores: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from all tokens whose score is not -inf."""
    weights = scores.to(_EXACT.get(scores.device.type, torch.float32))
    return _of_weights((weights - weights.amax(-1, keepdim=True)).exp_(), uniforms)


def _of_weights(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from weights (B, V): first a block of the vocabulary, then a token in it."""
    size = weights.shape[1]
    even = size // _BLOCK * _BLOCK
    blocks = [weights[:, :even].unflatten(1, (-1, _BLOCK)).sum(-1, dtype=torch.float64)]  # (B, V / block)
    if even < size:
        blocks.append(weights[:, even:].sum(-1, keepdim=True, dtype=torch.float64))
    upto = torch.cat(blocks, -1).cumsum(-1)
    draw = uniforms * upto[:, -1:]
    block = _first_beyond(upto, draw)
    inside = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)  # (B, block)
    own = weights.gather(1, inside.clamp(max=size - 1)).double() * (inside < size)
    before = torch.where(block > 0, upto.gather(1, (block - 1).clamp(min=0)), 0.0)
    return inside.gather(1, _first_beyond(before + own.cumsum(-1), draw)).clamp(max=size - 1)


def _first_beyond(cumulative: Tensor, threshold: Tensor) -> Tensor:
    """Find where cumulative weights (B, n) first pass a threshold (B, 1) below the last: never one of weight 0."""
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    found = torch.minimum(torch.searchsorted(cumulative, threshold, right=True), last)
    return found.clamp(max=cumulative.shape[1] - 1)  # beyond it are only sums that are nan
