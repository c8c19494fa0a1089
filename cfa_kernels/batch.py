"""Hold rows with their columns in one order: what estimators, credit and loss read."""

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .ops.kept_tokens import KeptTokens
from .options import as_numbers, check_class
from .rows import Rows, check_columns, check_floating, check_tokens, row_numbers
from .span import Span, span_inside


@dataclass(frozen=True)
class ScoredRow:
    """One completion with its units and its answer, as numpy arrays."""

    prompt: np.ndarray  # (P,) int64
    completion: np.ndarray  # (T,) int64, as scored
    spans: Sequence[Span]
    answer: Span | None
    index: int = 0  # by which errors name it and draws are keyed

    @cached_property
    def tokens(self) -> np.ndarray:
        """Prompt and completion, (P + T,) int64."""
        return np.concatenate([self.prompt, self.completion])

    @cached_property
    def masks_something(self) -> list[bool]:
        """Whether masking each span can change the answer; by causality a later span cannot."""
        first = 0 if self.answer is None else self.answer.start
        return [span.start < first for span in self.spans]


Mask = int | Literal["drop"] | Callable[[ScoredRow, int], Any]
"""Rule for masking unit k of a row: the id that replaces each of its tokens, "drop" for no token in its place, or a
function of row and k that gives the ids, of any number."""

Masks = Mask | None
"""One rule for the units of all rows; None for the batch's placeholder."""


class Batch:
    """Rows with columns in the order of the rows, each checked where it enters and held on the host; None if absent.

    Raises `ValueError` naming column, row and value of what is not as described, `TypeError` for any other name.
    """

    rows: Rows  # as sampled
    advantages: Any = None  # (B,), or B tensors (T_b,), float
    groups: Tensor | None = None  # (B,) int64, equal for completions that are compared with each other
    rewards: Tensor | None = None  # (B,) fp32; nan for a completion that is neither compared nor credited
    entropies: list[Tensor] | None = None  # B tensors (T_b,) of each sampled token's distribution, nats
    external: Sequence[Any] | None = None  # B tensors or lists, a number for each unit or each token
    probes: Sequence[Any] | None = None  # B `Probe`s to append and score in place of the own answer, or None
    targets: Sequence[Tensor | str | None] | None = None  # B 1-D int64 ids, or texts, to score in its place
    mask: list[Tensor] | None = None  # B tensors (T_b,) bool, given as 0 and 1: the policy's tokens, which count
    weights: list[Tensor] | None = None  # B tensors (T_b,), factors of each token's loss, and of credit's own
    old_logprobs: list[Tensor] | None = None  # B tensors (T_b,) under the sampling policy, nats
    ref_logprobs: list[Tensor] | None = None  # B tensors (T_b,) under the reference model
    sampling_logprobs: list[Tensor] | None = None  # B tensors (T_b,) of the engine that sampled, nan where it gave none
    kept_tokens: Sequence[KeptTokens] | None = None  # B, the ids that the sampler kept at each token
    scored: Rows  # as scored, with a probe after the sampled tokens or another answer; by default `rows`
    units: Sequence[Sequence[Span]]  # B lists of K_b spans of `scored` completions
    answers: Sequence[Span | None]  # B spans of `scored` completions, None where there is no answer
    reasoning_ends: Sequence[int] | None = None  # B integers, where the answer's marker begins, or the length

    # Settings, of all rows.
    placeholder: Mask | None = None  # rule by which units are masked
    token_budget: int | None = None  # maximum packed tokens per forward; None derives it from free memory
    seed: tuple[int, ...] = ()  # by which draws are keyed, before the row's index
    special_ids: tuple[int, ...] = ()  # ids that end a text or pad a batch, and are not content
    unread: list[Callable[[], object]] | None = None  # checks of scores that stay on a device; None to read them

    def __init__(self, rows: Rows, **columns: Any) -> None:
        check_class(Rows, rows=rows)
        self.rows = self.scored = rows
        self.units, self.answers = [()] * len(rows), [None] * len(rows)
        self._add(columns)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def index(self) -> list[int]:
        """Return the (B,) numbers by which errors name rows."""
        return self.rows.index

    def with_columns(self, **columns: Any) -> "Batch":
        """Copy the batch with some columns added or exchanged, which are checked."""
        batch = self.exchanged()
        batch._add(columns)
        return batch

    def exchanged(self, **columns: Any) -> "Batch":
        """Copy the batch with columns that the library itself made, which are not checked again."""
        batch = copy.copy(self)
        vars(batch).pop("scored_rows", None)
        vars(batch).update(columns)
        return batch

    def take(self, rows: Sequence[int] | Tensor) -> "Batch":
        """Copy some rows with their columns, in the order of `rows`: numbers, or a mask (B,) bool."""
        batch, rows = self.exchanged(), row_numbers(rows, len(self))
        for name, value in vars(batch).items():
            if value is not None and name not in _SETTINGS:
                vars(batch)[name] = batch.rows if value is self.rows and name != "rows" else _taken(value, rows)
        return batch

    @staticmethod
    def joined(parts: Sequence["Batch"]) -> "Batch":
        """Put batches together, one after the other; raise `ValueError` naming a column that one part lacks."""
        batch = copy.copy(parts[0])
        for name in ("rows", *_READ):
            values = [getattr(part, name) for part in parts]
            if len(kinds := {type(value).__name__ for value in values}) > 1:
                raise ValueError(f"{name}: parts have {' and '.join(sorted(kinds))}; all must agree")
            setattr(batch, name, _joined(values))
        return batch

    @cached_property
    def scored_rows(self) -> list[ScoredRow]:
        """List the completions with their units and answers, as numpy arrays."""
        ids, answers = self.scored, self.answers
        columns = zip(ids.prompts, ids.completions, self.units, answers, ids.index, strict=True)
        return [ScoredRow(x.numpy(), y.numpy(), units, answer, b) for x, y, units, answer, b in columns]

    def _add(self, columns: Mapping[str, Any]) -> None:
        for name in sorted(columns, key="scored".__ne__):  # units and answers are spans of it
            if name not in _READ and name not in _SETTINGS:
                raise TypeError(f"a batch has no column {name!r}; it has {', '.join(_READ)}")
            if (column := columns[name]) is None and name in ("scored", "units", "answers"):
                continue  # as they are by default
            if column is not None and name in _READ:
                column = _READ[name](name, column, self)
            setattr(self, name, column)


LOSS_COLUMNS = ("weights", "old_logprobs", "ref_logprobs", "sampling_logprobs", "kept_tokens")
"""Columns that only the loss reads."""
_SETTINGS = ("placeholder", "token_budget", "seed", "special_ids", "unread")


def batch_and_options(rows: Rows | Batch, given: Mapping[str, Any]) -> tuple[Batch, dict[str, Any]]:
    """Make a batch of rows with the columns among the keyword arguments `given`; also return the other arguments."""
    columns = {name: column for name, column in given.items() if name in _READ}
    batch = rows.with_columns(**columns) if isinstance(rows, Batch) else Batch(rows, **columns)
    return batch, {name: value for name, value in given.items() if name not in columns}


def _taken(value: Any, rows: list[int]) -> Any:
    if isinstance(value, Rows):
        return value.take(rows)
    if isinstance(value, Tensor):
        return value[rows]
    # Copies: a view of others would take all of them along to another process.
    return [value[b].clone() if isinstance(value[b], Tensor) else value[b] for b in rows]


def _joined(values: list[Any]) -> Any:
    if values[0] is None or isinstance(values[0], Rows):
        return None if values[0] is None else Rows.joined(values)
    return torch.cat(values) if isinstance(values[0], Tensor) else list(chain.from_iterable(values))


def _listed(name: str, column: Any, batch: Batch) -> Any:
    check_columns(batch.rows.prompts, **{name: column})
    return column


def _tokens(name: str, column: Any, batch: Batch) -> Any:
    check_tokens(name, column, batch.rows)
    if name == "advantages":
        check_floating(name, column)
    if isinstance(column, Tensor):
        return column.detach().cpu()
    if len(devices := {row.device for row in column}) == 1 and devices != {torch.device("cpu")}:  # one copy for all
        column = torch.cat(list(column)).cpu().split(batch.rows.lengths)
    return [row.detach().cpu() for row in column]


def _groups(name: str, column: Any, batch: Batch) -> Any:
    if not isinstance(column, Tensor) or column.dtype != torch.int64:
        try:
            column = torch.tensor(list(map(operator.index, column)), dtype=torch.int64)
        except TypeError as error:
            raise ValueError(f"groups must be (B,) integers, got {column!r:.80}") from error
    return _listed(name, column.cpu(), batch)


def _rewards(name: str, column: Any, batch: Batch) -> Any:
    return _listed(name, as_numbers(column, name, f"{len(batch)} completions"), batch)


def _mask(name: str, column: Any, batch: Batch) -> list[Tensor]:
    rows = _tokens(name, column, batch)
    for b, row in zip(batch.index, rows, strict=True):
        for t in ((row != 0) & (row != 1)).nonzero().flatten().tolist():
            raise ValueError(f"mask row {b}, token {t}: must be 1 or 0, got {row[t].item()}")
    return [row.bool() for row in rows]


def _units(name: str, column: Any, batch: Batch) -> list[list[Span]]:
    check_columns(batch.rows.prompts, spans=column)
    return [
        [span_inside(f"spans row {index}, span {k}", unit, length) for k, unit in enumerate(units)]
        for index, length, units in zip(batch.index, batch.scored.lengths, column, strict=True)
    ]


def _answers(name: str, column: Any, batch: Batch) -> list[Span | None]:
    columns = zip(batch.index, batch.scored.lengths, _listed(name, column, batch), strict=True)
    return [None if x is None else span_inside(f"answers row {index}", x, length) for index, length, x in columns]


_READ: dict[str, Callable[[str, Any, Batch], Any]] = {
    **dict.fromkeys(
        ("advantages", "entropies", "weights", "old_logprobs", "ref_logprobs", "sampling_logprobs"), _tokens
    ),
    **dict.fromkeys(("external", "probes", "targets", "kept_tokens", "scored", "reasoning_ends"), _listed),
    "groups": _groups,
    "rewards": _rewards,
    "mask": _mask,
    "units": _units,
    "answers": _answers,
}
"""Function that checks each column, named as errors name it, and brings it to the host."""
