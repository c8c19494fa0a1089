"""Make probes, tokens that ask for an answer, and append them to completions."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..scoring.batch import token_ids
from ..span import Span


class Probe(NamedTuple):
    """Probe: tokens to append, and the span of them that is scored."""

    tokens: Tensor  # (L,) int64
    target: Span  # in `tokens`


def own_probe(completion: Tensor, answer: Span, reasoning_end: int) -> Probe:
    """Make a probe of a completion's own marker and answer: its tokens from `reasoning_end` on, the answer scored.

    Args:
        completion: (T,) int64.
        answer: its answer.
        reasoning_end: first token of the answer's marker, at most `answer.start`.

    Raises:
        ValueError: a reasoning end after the answer's start, an answer outside the completion.
    """
    if not 0 <= reasoning_end <= answer.start < answer.end <= len(completion):
        raise ValueError(
            f"reasoning_end and answer must be in order inside the {len(completion)} tokens, got {reasoning_end} and "
            f"{tuple(answer)}"
        )
    target = Span(answer.start - reasoning_end, answer.end - reasoning_end)
    return Probe(completion[reasoning_end : answer.end], target)


def length_without_eos(completion: Tensor | Sequence[int], eos_ids: Collection[int]) -> int:
    """Count the tokens of a completion (T,) before the end-of-text tokens that it ends with, if any."""
    length, ending = len(completion), set(eos_ids)
    while length and int(completion[length - 1]) in ending:
        length -= 1
    return length


def with_probes(
    completions: Sequence[Tensor],
    answers: Sequence[Span | None],
    probes: Sequence[Probe | None],
    eos_ids: Collection[int],
    *,
    spans: Sequence[Sequence[Span]] | None = None,
) -> tuple[list[Tensor], list[Span | None]]:
    """Append probes to completions, and find the answers that are then scored.

    The results fit `score_counterfactuals`. A row with a probe loses the end-of-text tokens that it ends with and is
    scored on the probe's target, whatever its own answer; a row without one stays as it is. Token positions of the
    completions do not move, so spans stay valid and weights, made for the completion's own length, never cover a probe.

    Args:
        completions: B 1-D int64 tensors, unpadded.
        answers: for each completion its answer, or None.
        probes: for each completion its probe, or None.
        eos_ids: the ids that end a text.
        spans: if given, B lists of spans that will be masked; those of a row with a probe must end before it.

    Returns:
        B extended completions, and B answers, None where there is neither answer nor probe.

    Raises:
        ValueError: lists of different lengths; a probe that is not a 1-D int64 tensor, is empty or has its target
            outside; a span that reaches the probe. The message names row and value.
    """
    for name, column in (("answers", answers), ("probes", probes), ("spans", spans)):
        if column is not None and len(column) != len(completions):
            raise ValueError(f"{name} has {len(column)} rows, completions has {len(completions)}; they must agree")
    extended, scored = list[Tensor](), list[Span | None]()
    for b, (completion, answer, probe) in enumerate(zip(completions, answers, probes, strict=True)):
        if probe is None:
            extended.append(completion)
            scored.append(answer)
            continue
        check_probe(b, probe)
        kept = length_without_eos(completion, eos_ids)
        for k, span in enumerate(spans[b] if spans is not None else ()):
            if span.end > kept:
                raise ValueError(f"spans row {b}, span {k}: {tuple(span)} reaches the probe, which starts at {kept}")
        extended.append(torch.cat([completion[:kept], probe.tokens.to(completion.device)]))
        scored.append(Span(kept + probe.target.start, kept + probe.target.end))
    return extended, scored


def check_probe(b: int, probe: Probe, vocab: int | None = None) -> None:
    """Raise `ValueError` naming row `b` and what is wrong with its probe."""
    ids = token_ids(f"probes row {b}", probe.tokens, vocab)
    target = probe.target
    if not 0 <= target[0] < target[1] <= len(ids):
        raise ValueError(f"probes row {b}: target {tuple(target)} is not a non-empty span of {len(ids)} tokens")
