"""Rows of token ids as callers hand them over: checked, on the host, equal prompts side by side."""

from collections.abc import Sequence, Sized

import numpy as np
import torch
from torch import Tensor


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
