"""Append probes, tokens that ask for an answer, to completions."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..options import check_class
from ..rows import token_ids
from ..span import Span


class Probe(NamedTuple):
    """Tokens to append, and the span of them that is scored."""

    tokens: Tensor  # (L,) int64
    target: Span  # in `tokens`


def length_without_eos(completion: Tensor | Sequence[int], eos_ids: Collection[int]) -> int:
    """Count the tokens of a completion (T,) before the end-of-text tokens that it ends with, if any."""
    length, ending = len(completion), set(eos_ids)
    while length and int(completion[length - 1]) in ending:
        length -= 1
    return length


def with_probe(
    b: int, completion: Tensor, spans: Sequence[Span], probe: Probe, eos_ids: Collection[int], vocab: int | None = None
) -> tuple[Tensor, Span]:
    """Append a probe to the completion (T,) of row `b`, in the place of the end-of-text tokens that it ends with.

    Returns the longer completion, and the probe's target in it, which is scored. Raises `ValueError` for a probe that
    is not 1-D int64 in the vocabulary, is empty or has its target outside, and for a span in it.
    """
    check_class(Probe, **{f"probes row {b}": probe})
    ids, target = token_ids(f"probes row {b}", probe.tokens, vocab), probe.target
    if not 0 <= target[0] < target[1] <= len(ids):
        raise ValueError(f"probes row {b}: target {tuple(target)} is not a non-empty span of {len(ids)} tokens")
    length = length_without_eos(completion, eos_ids)
    for k, span in enumerate(spans):
        if span.end > length:
            raise ValueError(f"spans row {b}, span {k}: {tuple(span)} reaches the probe, which starts at {length}")
    return torch.cat([completion[:length], ids.to(completion.device)]), Span(length + target[0], length + target[1])
