"""Rows of token ids as callers hand them over: checked, on the host, equal prompts side by side."""

from collections.abc import Sequence, Sized
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..hf.model import vocab_size
from ..span import Span


@dataclass(frozen=True)
class Row:
    """One completion, checked, as numpy arrays."""

    prompt: np.ndarray  # (P,) int64
    completion: np.ndarray  # (T,) int64
    spans: list[Span]
    answer: Span | None
    fills: list[np.ndarray] | None = None  # what replaces each span, int64; None for placeholders

    def masks_something(self, span: Span) -> bool:
        """Whether masking `span` can change the answer: a later span cannot, by causality."""
        return self.answer is not None and span.start < self.answer.start


def checked_rows(
    model: PreTrainedModel,
    ids: Sequence[tuple[np.ndarray, np.ndarray]],
    spans: Sequence[Sequence[Span]],
    answers: Sequence[Span | None],
    placeholder_id: int,
    fills: Sequence[Sequence[Tensor]] | None = None,
) -> list[Row]:
    """Checked prompts and completions with spans, answers and fills, checked too; see `score_counterfactuals`."""
    check_columns(ids, spans=spans, answers=answers, **({} if fills is None else {"fills": fills}))
    vocab = vocab_size(model)
    if isinstance(placeholder_id, bool) or not isinstance(placeholder_id, int) or not 0 <= placeholder_id < vocab:
        raise ValueError(f"placeholder_id must be an id in [0, {vocab}), got {placeholder_id!r}")
    rows = []
    for b, (prompt, completion) in enumerate(ids):
        given = answers[b]
        answer = None if given is None else _checked_span(f"answers row {b}", given, len(completion))
        row_spans = []
        for k, span in enumerate(spans[b]):
            row_spans.append(_checked_span(f"spans row {b}, span {k}", span, len(completion)))
            if answer is not None and row_spans[-1].start < answer.end and answer.start < row_spans[-1].end:
                raise ValueError(f"spans row {b}, span {k}: {tuple(span)} overlaps the answer {tuple(answer)}")
        row_fills = None if fills is None else _checked_fills(b, fills[b], row_spans, vocab)
        rows.append(Row(prompt, completion, row_spans, answer, row_fills))
    return rows


def _checked_fills(b: int, fills: Sequence[Tensor], spans: list[Span], vocab: int) -> list[np.ndarray]:
    if len(fills) != len(spans):
        raise ValueError(f"fills row {b}: has {len(fills)} fills for {len(spans)} spans")
    checked = []
    for k, (fill, (start, end)) in enumerate(zip(fills, spans, strict=True)):
        if not isinstance(fill, Tensor) or fill.dtype != torch.int64 or fill.shape != (end - start,):
            got = f"{fill.dtype} of shape {tuple(fill.shape)}" if isinstance(fill, Tensor) else type(fill).__name__
            raise ValueError(f"fills row {b}, span {k}: must be an int64 tensor ({end - start},), got {got}")
        ids = fill.cpu().numpy()
        if (bad := (ids < 0) | (ids >= vocab)).any():
            raise ValueError(f"fills row {b}, span {k}: id {ids[bad][0]} is outside the vocabulary [0, {vocab})")
        checked.append(ids)
    return checked


def _checked_span(where: str, span: Span, length: int) -> Span:
    start, end = (int(edge) for edge in span)
    if not 0 <= start < end <= length:
        raise ValueError(f"{where}: {(start, end)} is not a non-empty span inside a completion of {length} tokens")
    return Span(start, end)


def check_columns(prompts: Sized, **columns: Sized) -> None:
    """Raise `ValueError` naming a column that has not as many rows as `prompts`."""
    for name, column in columns.items():
        if len(column) != len(prompts):
            raise ValueError(f"{name} has {len(column)} rows, prompts has {len(prompts)}; they must agree")


def checked_ids(
    prompts: Sequence[Tensor], completions: Sequence[Tensor], vocab: int, longest: int | None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Prompt and completion of each row, (P,) and (T,) int64, by one copy to the host for each column.

    Raises `ValueError` naming argument, row and value: no 1-D int64 tensor, empty, an id outside `[0, vocab)`, or
    more than `longest` tokens together.
    """
    prompt_ids, completion_ids = _token_ids("prompts", prompts, vocab), _token_ids("completions", completions, vocab)
    rows = list(zip(prompt_ids, completion_ids, strict=True))
    for b, (prompt, completion) in enumerate(rows):
        if longest is not None and len(prompt) + len(completion) > longest:
            raise ValueError(
                f"completions row {b}: prompt of {len(prompt)} and completion of {len(completion)} tokens exceed "
                f"the model's context of {longest}"
            )
    return rows


def equal_prompts_together(prompts: Sequence[np.ndarray]) -> list[int]:
    """Row numbers, equal prompts side by side, otherwise in the caller's order."""
    first: dict[bytes, int] = {}
    groups = [first.setdefault(prompt.tobytes(), b) for b, prompt in enumerate(prompts)]
    return sorted(range(len(prompts)), key=lambda b: groups[b])


def _token_ids(name: str, column: Sequence[Tensor], vocab: int) -> list[np.ndarray]:
    for b, ids in enumerate(column):
        if not isinstance(ids, Tensor) or ids.ndim != 1 or ids.dtype != torch.int64:
            got = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(f"{name} row {b}: must be a 1-D int64 tensor of token ids, got {got}")
        if len(ids) == 0:
            raise ValueError(f"{name} row {b}: is empty")
    if not column:
        return []
    flat = torch.cat(list(column)).cpu().numpy()
    split = np.split(flat, np.cumsum([len(ids) for ids in column])[:-1])
    if (bad := (flat < 0) | (flat >= vocab)).any():
        b = next(b for b, ids in enumerate(split) if ((ids < 0) | (ids >= vocab)).any())
        t = int(((split[b] < 0) | (split[b] >= vocab)).argmax())
        raise ValueError(
            f"{name} row {b}: id {split[b][t]} at position {t} is outside the vocabulary [0, {vocab})"
            f" ({int(bad.sum())} such ids in all)"
        )
    return split
