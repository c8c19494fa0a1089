"""Mask units of rows: `branch` makes the sequence that a mask makes of a row, `checked_mask` checks the rule."""

import operator
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from ..batch import Batch, Mask, Masks, ScoredRow
from ..model.parts import context_length, vocab_size
from ..rows import Rows, token_ids
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


def checked_mask(mask: Masks, batch: Batch, vocab: int | None = None) -> Mask | None:
    """Return the rule by which units are masked, checked; None takes the batch's placeholder. `vocab` limits ids.

    Raises `ValueError`, also naming row and unit where a unit overlaps the answer.
    """
    for row in batch.scored_rows:
        for k, span in enumerate(row.spans):
            if row.answer is not None and span.start < row.answer.end and row.answer.start < span.end:
                raise ValueError(
                    f"spans row {row.index}, span {k}: {tuple(span)} overlaps the answer {tuple(row.answer)}"
                )
    mask = batch.placeholder if mask is None else mask
    if callable(mask):
        return lambda row, k: _ids_of(f"mask row {row.index}, span {k}", mask(row, k), vocab)
    is_id = isinstance(mask, int) and not isinstance(mask, bool) and mask >= 0 and (vocab is None or mask < vocab)
    if not is_id and mask not in (None, "drop"):
        limit = "vocabulary" if vocab is None else vocab
        raise ValueError(f"mask must be an id in [0, {limit}), 'drop' or a function, got {mask!r}")
    return mask


def _ids_of(where: str, result: Any, vocab: int | None) -> np.ndarray:
    """Check the result of a caller's function as a mask."""
    try:
        ids = list(map(operator.index, result))
    except TypeError as error:
        raise ValueError(f"{where}: the function must give a row of ids, got {result!r}") from error
    return token_ids(where, torch.tensor(ids, dtype=torch.int64), vocab, at_least=0).numpy()


def check_ids(model: PreTrainedModel | None, rows: Rows) -> None:
    """Raise `ValueError` naming a row with an id outside the model's vocabulary, or longer than its context."""
    if model is None or not len(rows):
        return
    vocab, longest = vocab_size(model), context_length(model)
    for name in ("prompts", "completions"):
        column = getattr(rows, name)
        flat = torch.cat(column)
        if ((flat < 0) | (flat >= vocab)).any():
            for b, ids in zip(rows.index, column, strict=True):
                token_ids(f"{name} row {b}", ids, vocab, at_least=0)
    for b, prompt, length in zip(rows.index, rows.prompts, rows.lengths, strict=True):
        if longest is not None and len(prompt) + length > longest:
            sizes = f"prompt of {len(prompt)} and completion of {length} tokens"
            raise ValueError(f"completions row {b}: {sizes} exceed the model's context of {longest}")
