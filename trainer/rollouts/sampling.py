"""Draw tokens from logits, every draw keyed, the nucleus found among the likeliest tokens.

A keyed draw depends neither on the other rows of the batch nor on earlier draws: a run repeats exactly from its
seed. A token is drawn by inverse CDF, in the order of the vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

_CANDIDATES = 256  # likeliest tokens that are looked at first; a nucleus is rarely larger


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
        scaled, position = scores.float() / self._temperature, len(self.logprobs)
        token = _draw(scaled, self._uniforms[:, position : position + 1], self._top_p)
        self.logprobs.append(torch.log_softmax(scaled, -1).gather(1, token).squeeze(1))
        return torch.full_like(scores, -torch.inf, dtype=torch.float32).scatter_(1, token, 0.0)


def _draw(scores: Tensor, uniforms: Tensor, top_p: float) -> Tensor:
    """Draw one token of each row of scores (B, V) by uniforms (B, 1); (B, 1) int64, any token for a row with a nan."""
    weights = (scores.double() - scores.amax(-1, keepdim=True)).exp_()
    cumulative = (weights if top_p >= 1 else _nucleus(weights, top_p)).cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    place = torch.searchsorted(cumulative, uniforms * total, right=True)
    place = torch.minimum(place, torch.searchsorted(cumulative, total))  # never a token of weight 0
    return place.clamp(max=scores.shape[1] - 1)  # beyond it are only sums that are nan


def _nucleus(weights: Tensor, top_p: float, candidates: int = _CANDIDATES) -> Tensor:
    """Give weights (B, V) with 0 for each token than which likelier ones make up `top_p`.

    Among equally likely tokens the last of the vocabulary come first.
    """
    share = top_p * weights.sum(-1, keepdim=True)
    values, tokens = weights.topk(min(candidates, weights.shape[1]))
    whole = (values * (values > values[:, -1:])).sum(-1, keepdim=True) >= share  # and cut in no tie
    tokens, order = tokens.sort(-1, descending=True)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    inside = values.cumsum(-1) - values < share
    kept = torch.zeros_like(weights).scatter_(1, tokens.gather(1, order), values * inside)
    if values.shape[1] < weights.shape[1] and not whole.all():  # the one wait for the device
        rows = (~whole).nonzero()[:, 0]
        kept[rows] = _nucleus(weights[rows], top_p, weights.shape[1])
    return kept
