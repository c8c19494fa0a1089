"""Check units and answers of rows once, put them into packing order, and mask their units: `ScoredBatch`, `branch`."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..model.parts import context_length, vocab_size
from ..options import check_class
from ..rows import Rows, check_columns, equal_prompts, token_ids
from ..span import Span, span_inside


@dataclass(frozen=True)
class ScoredRow:
    """One completion with its units and its answer, checked, as numpy arrays."""

    prompt: np.ndarray  # (P,) int64
    completion: np.ndarray  # (T,) int64
    spans: list[Span]
    answer: Span | None
    place: int = 0  # in the caller's `Rows`
    index: int = 0  # by which errors name it and draws are keyed

    @cached_property
    def tokens(self) -> np.ndarray:
        """Prompt and completion, (P + T,) int64."""
        return np.concatenate([self.prompt, self.completion])

    def masks_something(self, span: Span) -> bool:
        """Whether masking `span` can change the answer; by causality a later span cannot."""
        return self.answer is not None and span.start < self.answer.start


Mask = int | Literal["drop"] | Callable[[ScoredRow, int], Any]
"""Rule for masking unit k of a row: the id that replaces each of its tokens, "drop" for no token in its place, or a
function of row and k that gives the ids, of any number. It says nothing else; `branch` does the rest."""


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
        ids = np.full(end - start, mask)
    moved = len(ids) - (end - start) if end <= answer.start else 0
    return Branch(np.concatenate([tokens[:start], ids, tokens[end:]]), Span(answer.start + moved, answer.end + moved))


@dataclass(frozen=True)
class ScoredBatch:
    """Completions with their units and answers, checked on the host, equal prompts side by side.

    Columns from `reasoning_ends` on may be None where no estimator in use reads them.
    """

    rows: list[ScoredRow]
    mask: Mask | None = None  # rule by which units are masked
    token_budget: int | None = None  # maximum packed tokens per forward; None derives it from free memory
    lengths: list[int] = field(default_factory=list)  # (B,) sampled tokens; a probe or another answer may follow them
    reasoning_ends: list[int] | None = None  # (B,) where the answer's marker begins, or the length without an answer
    seed: tuple[int, ...] = ()  # by which draws are keyed, before the row's index
    groups: Tensor | None = None  # (B,) int64, equal for the completions of one prompt
    rewards: Tensor | None = None  # (B,)
    advantages: Tensor | list[Tensor] | None = None  # (B,), or B tensors (T_b,)
    entropies: list[Tensor] | None = None  # B tensors (T_b,) of each sampled token's distribution, nats
    external: list[Tensor | Sequence[float]] | None = None  # B tensors (K_b,) or (T_b,), the caller's own importances
    special_ids: tuple[int, ...] = ()  # ids that end a text or pad a batch, and are not content

    @classmethod
    def of(
        cls,
        model: PreTrainedModel | None,
        rows: Rows,
        units: Sequence[Sequence[Span]] | None = None,
        answers: Sequence[Span | None] | None = None,
        *,
        mask: Mask | Sequence[Sequence[Tensor]] | None = None,
        token_budget: int | None = None,
        places: Sequence[int] | None = None,
        apart: bool = True,
    ) -> "ScoredBatch":
        """Check units and answers of rows and put the rows into packing order.

        Args:
            model: what `causal_lm` finds; its vocabulary and context limit the ids. None if in another process.
            rows, units, answers, mask, token_budget: as in `score_counterfactuals` (its `spans` are `units` here).
            places: place of each row in the caller's `Rows`; default its own.
            apart: whether a unit that overlaps the answer is an error, as it is where units are masked.
        """
        check_class(Rows, rows=rows)
        units = [()] * len(rows) if units is None else units
        answers = [None] * len(rows) if answers is None else answers
        check_columns(rows.prompts, spans=units, answers=answers)
        check_ids(model, rows)
        scored = list[ScoredRow]()
        for b, (prompt, completion, index) in enumerate(zip(rows.prompts, rows.completions, rows.index, strict=True)):
            spans, answer = _checked_spans(units[b], answers[b], len(completion), index, apart)
            place = b if places is None else places[b]
            scored.append(ScoredRow(prompt.numpy(), completion.numpy(), spans, answer, place, index))
        rule = _checked_mask(mask, scored, None if model is None else vocab_size(model))
        groups = equal_prompts(rows.prompts)
        scored = [scored[b] for b in sorted(range(len(rows)), key=groups.__getitem__)]
        return cls(scored, rule, token_budget, [len(row.completion) for row in scored])

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def index(self) -> list[int]:
        """Return the (B,) numbers by which errors name rows."""
        return [row.index for row in self.rows]

    @property
    def prompts(self) -> list[Tensor]:
        """Return B 1-D int64 tensors on the host."""
        return [torch.tensor(row.prompt) for row in self.rows]  # a copy: what Ray hands over cannot be written

    @property
    def completions(self) -> list[Tensor]:
        """Return B 1-D int64 tensors on the host, as scored: with what follows the sampled tokens."""
        return [torch.tensor(row.completion) for row in self.rows]

    @property
    def sampled(self) -> list[Tensor]:
        """Return B 1-D int64 tensors, the completions as they were sampled."""
        return [row[:length] for row, length in zip(self.completions, self.lengths, strict=True)]

    @property
    def units(self) -> list[list[Span]]:
        """Return B lists of K_b spans of completion tokens."""
        return [row.spans for row in self.rows]

    @property
    def answers(self) -> list[Span | None]:
        """Return B spans of `completions`, None where there is no answer."""
        return [row.answer for row in self.rows]

    def with_units(self, units: Sequence[Sequence[Span]], mask: Mask | None = None) -> "ScoredBatch":
        """Copy the batch with other units, taken from its own, and perhaps another mask."""
        rows = [replace(row, spans=list(spans)) for row, spans in zip(self.rows, units, strict=True)]
        return replace(self, rows=rows, mask=self.mask if mask is None else mask)

    def take(self, rows: Sequence[int]) -> "ScoredBatch":
        """Copy the batch with some of its completions, in the order of `rows`."""
        columns: dict[str, Any] = {name: getattr(self, name) for name in _COLUMNS}
        for name, column in columns.items():
            if column is not None:
                columns[name] = column[list(rows)] if isinstance(column, Tensor) else [column[i] for i in rows]
        return replace(self, **columns)

    def to_callers_order(self, column: Sequence[Any]) -> list[Any]:
        """Put a column of this batch into the order of the caller's rows."""
        return [column[i] for i in np.argsort([row.place for row in self.rows], kind="stable")]


_COLUMNS = ("rows", "lengths", "reasoning_ends", "groups", "rewards", "advantages", "entropies", "external")


def _checked_mask(
    mask: Mask | Sequence[Sequence[Tensor]] | None, rows: Sequence[ScoredRow], vocab: int | None
) -> Mask | None:
    """Check a mask; ids that are stored for each unit become a function."""
    if callable(mask):
        return lambda row, k: _ids_of(f"mask row {row.index}, span {k}", mask(row, k), vocab)
    if mask is None or mask == "drop":
        return mask  # type: ignore[return-value]
    if isinstance(mask, Sequence) and not isinstance(mask, str):
        check_columns(rows, mask=mask)
        for row, fills in zip(rows, mask, strict=True):
            if len(fills) != len(row.spans):
                raise ValueError(f"mask row {row.index}: has ids for {len(fills)} units, the row has {len(row.spans)}")
            for k, ids in enumerate(fills):
                token_ids(f"mask row {row.index}, span {k}", ids, vocab, at_least=0)
        stored = {row.place: [ids.cpu().numpy() for ids in fills] for row, fills in zip(rows, mask, strict=True)}
        return lambda row, k: stored[row.place][k]
    whole = isinstance(mask, int) and not isinstance(mask, bool)
    if not whole or mask < 0 or (vocab is not None and mask >= vocab):  # type: ignore[operator]
        limit = "vocabulary" if vocab is None else vocab
        raise ValueError(f"mask must be an id in [0, {limit}), 'drop', ids for each unit or a function, got {mask!r}")
    return mask


def _ids_of(where: str, result: Any, vocab: int | None) -> np.ndarray:
    """Check the result of a caller's function as a mask."""
    try:
        ids = list(map(operator.index, result))
    except TypeError as error:
        raise ValueError(f"{where}: the function must give a row of ids, got {result!r}") from error
    return token_ids(where, torch.tensor(ids, dtype=torch.int64), vocab, at_least=0).numpy()


def _checked_spans(
    units: Sequence[Span], answer: Span | None, length: int, index: int, apart: bool
) -> tuple[list[Span], Span | None]:
    answer = None if answer is None else span_inside(f"answers row {index}", answer, length)
    spans = [span_inside(f"spans row {index}, span {k}", unit, length) for k, unit in enumerate(units)]
    for k, span in enumerate(spans):
        if apart and answer is not None and span.start < answer.end and answer.start < span.end:
            raise ValueError(f"spans row {index}, span {k}: {tuple(span)} overlaps the answer {tuple(answer)}")
    return spans, answer


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
