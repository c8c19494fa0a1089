"""Draw tokens from logits, every draw keyed, the nucleus found among the likeliest tokens.

A keyed draw depends neither on the other rows of the batch nor on earlier draws: a run repeats exactly from its
seed. A token is drawn by inverse CDF, in the order of the vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

CANDIDATES = 256  # likeliest tokens that are looked at first; a nucleus is rarely larger


def keyed_uniforms(keys: Sequence[Sequence[int]], length: int) -> Tensor:
    """Draw (B, length) float64 in [0, 1): row b holds the draws of `keys[b]`, whatever the other rows are."""
    return torch.from_numpy(np.stack([np.random.default_rng(list(key)).random(length) for key in keys]))


class KeyedSampler(LogitsProcessor):
    """Turns each row of scores into the one token that its own uniform draw picks.

    With this as the last logits processor, greedy decoding samples. `uniforms` is (B, T) float64 in [0, 1); without
    them scores pass as they are.

    Attributes:
        finite: (B,) bool of each position: the scores are numbers; over a nan sampling goes on in silence.
        logprobs: (B,) fp32 of each position, of the drawn token, before the nucleus.
    """

    def __init__(self, uniforms: Tensor | None, temperature: float, top_p: float) -> None:
        self.finite: list[Tensor] = []
        self.logprobs: list[Tensor] = []
        self._uniforms, self._temperature, self._top_p = uniforms, temperature, top_p

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) in; 0 at the drawn token and -inf elsewhere out. -inf is a token that cannot come."""
        self.finite.append(scores.amax(-1).isfinite())
        if self._uniforms is None:
            return scores
        scaled = scores.float() if self._temperature == 1 else scores.float() / self._temperature
        logprobs, position = torch.log_softmax(scaled, -1), len(self.logprobs)
        token = _draw(scaled, logprobs, self._uniforms[:, position : position + 1], self._top_p)
        self.logprobs.append(logprobs.gather(1, token).squeeze(1))
        return torch.full_like(scores, -torch.inf, dtype=torch.float32).scatter_(1, token, 0.0)


def _draw(scores: Tensor, logprobs: Tensor, uniforms: Tensor, top_p: float) -> Tensor:
    """Draw one token of each row from its nucleus: the likeliest tokens that make up `top_p`.

    A token is in it if those likelier than it weigh less than `top_p`; of equally likely ones the last of the
    vocabulary come first. Scores and their log-softmax are (B, V) fp32, uniforms (B, 1). Gives (B, 1) int64; any token
    for a row whose scores are not numbers.
    """
    if top_p >= 1:
        weights = scores.double()
        return _first_beyond((weights - weights.amax(-1, keepdim=True)).exp_().cumsum(-1), uniforms)
    # Log of the sum of all weights: a row's best token shows it.
    best, place = scores.max(-1, keepdim=True)
    normalizer = best.double() - logprobs.gather(1, place).double()
    token, whole = _draw_likeliest(scores, normalizer, uniforms, top_p, min(CANDIDATES, scores.shape[1]))
    if not whole.all():  # the one wait for the device
        rows = (~whole).nonzero().flatten()
        token[rows] = _draw_likeliest(scores[rows], normalizer[rows], uniforms[rows], top_p, scores.shape[1])[0]
    return token


def _draw_likeliest(
    scores: Tensor, normalizer: Tensor, uniforms: Tensor, top_p: float, count: int
) -> tuple[Tensor, Tensor]:
    """Draw from the part of the nucleus that is among the `count` likeliest tokens, and say where that is all of it."""
    values, tokens = scores.topk(count)
    tokens, order = tokens.sort(-1, descending=True)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    tokens = tokens.gather(1, order)  # of equally likely ones the last of the vocabulary first
    mass = (values.double() - normalizer).exp()
    everything = mass.sum(-1, keepdim=True) if count == scores.shape[1] else 1.0  # exact where all is seen
    inside = mass.cumsum(-1) - mass < top_p * everything
    last = values.gather(1, (inside.sum(-1, keepdim=True) - 1).clamp(min=0))
    whole = (last > values[:, -1:]).squeeze(1) | (count == scores.shape[1])
    tokens, order = tokens.sort(-1)
    weights = (values.double() - values[:, :1].double()).exp() * inside
    return tokens.gather(1, _first_beyond(weights.gather(1, order).cumsum(-1), uniforms)), whole


def _first_beyond(cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """Find where cumulative weights (B, n) first pass a share (B, 1) of the last: never one of weight 0."""
    total = cumulative[:, -1:].contiguous()
    place = torch.searchsorted(cumulative, uniforms * total, right=True)
    place = torch.minimum(place, torch.searchsorted(cumulative, total))
    return place.clamp(max=cumulative.shape[1] - 1)  # beyond it are only sums that are nan
