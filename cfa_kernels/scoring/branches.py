"""Mask units of rows: `branch` makes the sequence that a mask makes of a row, `checked_masks` checks masks."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..batch import Batch, Mask, Masks, ScoredRow
from ..model.parts import context_length, vocab_size
from ..options import check_class
from ..rows import Rows, check_columns, token_ids
from ..span import Span


class Branch(NamedTuple):
    """Sequence that a mask makes of a row."""

    tokens: np.ndarray  # (L,) int64, prompt and completion
    answer: Span  # in `tokens`


def branch(row: ScoredRow, k: int | None, mask: Mask | None) -> Branch:
    """Mask unit `k` of a row that has an answer; None for the row as it was sampled."""
    assert row.answer is not None
    tokens, first = row.tokens, len(row.prompt)
    answer = Span(first + row.answer.start, first + row.answer.end)
    if k is None:
        return Branch(tokens, answer)
    start, end = row.spans[k]
    start, end = first + start, first + end
    if mask is None:
        raise ValueError("mask: must be given where units are masked, got None")
    if mask == "drop":
        ids = tokens[:0]
    elif callable(mask):
        ids = np.asarray(mask(row, k), dtype=np.int64)
    else:
        masked = tokens.copy()
        masked[start:end] = mask
        return Branch(masked, answer)
    moved = len(ids) - (end - start) if end <= answer.start else 0
    return Branch(np.concatenate([tokens[:start], ids, tokens[end:]]), Span(answer.start + moved, answer.end + moved))


def checked_masks(mask: Masks, batch: Batch, vocab: int | None = None) -> list[Mask | None]:
    """Give the rule of each row, checked, from one for all or from ids for each unit; None takes the placeholder.

    Raises `ValueError` naming row and unit, also for a unit that overlaps the answer. `vocab` limits ids.
    """
    for row in batch.scored_rows:
        for k, span in enumerate(row.spans):
            if row.answer is not None and span.start < row.answer.end and row.answer.start < span.end:
                raise ValueError(
                    f"spans row {row.index}, span {k}: {tuple(span)} overlaps the answer {tuple(row.answer)}"
                )
    mask = batch.placeholder if mask is None else mask
    if isinstance(mask, Sequence) and not isinstance(mask, str):
        check_columns(batch.rows.prompts, mask=mask)
        return [_stored(row, fills, vocab) for row, fills in zip(batch.scored_rows, mask, strict=True)]
    whole = isinstance(mask, int) and not isinstance(mask, bool)
    if callable(mask):
        rule: Mask | None = lambda row, k: _ids_of(f"mask row {row.index}, span {k}", mask(row, k), vocab)  # noqa: E731
    elif mask in (None, "drop") or (whole and mask >= 0 and (vocab is None or mask < vocab)):  # type: ignore[operator]
        rule = mask
    else:
        limit = "vocabulary" if vocab is None else vocab
        raise ValueError(f"mask must be an id in [0, {limit}), 'drop', ids for each unit or a function, got {mask!r}")
    return [rule] * len(batch)


def _stored(row: ScoredRow, fills: Sequence[Tensor], vocab: int | None) -> Mask:
    if len(fills) != len(row.spans):
        raise ValueError(f"mask row {row.index}: has ids for {len(fills)} units, the row has {len(row.spans)}")
    for k, ids in enumerate(fills):
        token_ids(f"mask row {row.index}, span {k}", ids, vocab, at_least=0)
    return lambda _, k: fills[k].cpu().numpy()


def _ids_of(where: str, result: Any, vocab: int | None) -> np.ndarray:
    """Check the result of a caller's function as a mask."""
    try:
        ids = list(map(operator.index, result))
    except TypeError as error:
        raise ValueError(f"{where}: the function must give a row of ids, got {result!r}") from error
    return token_ids(where, torch.tensor(ids, dtype=torch.int64), vocab, at_least=0).numpy()


def check_ids(model: PreTrainedModel | None, rows: Rows) -> None:
    """Raise `ValueError` naming a row with an id outside the model's vocabulary, or longer than its context."""
    check_class(Rows, rows=rows)
    if model is None or not len(rows):
        return
    vocab, longest = vocab_size(model), context_length(model)
    for name in ("prompts", "completions"):
        column = getattr(rows, name)
        flat = torch.cat(column)
        if ((flat < 0) | (flat >= vocab)).any():
            for b, ids in zip(rows.index, column, strict=True):
                token_ids(f"{name} row {b}", ids, vocab, at_least=0)
    for b, prompt, completion in zip(rows.index, rows.prompts, rows.completions, strict=True):
        if longest is not None and len(prompt) + len(completion) > longest:
            raise ValueError(
                f"completions row {b}: prompt of {len(prompt)} and completion of {len(completion)} tokens exceed "
                f"the model's context of {longest}"
            )
