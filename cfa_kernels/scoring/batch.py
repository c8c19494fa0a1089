"""Check completions, units and answers once, on the host, and put them into packing order: `ScoredBatch`."""

from collections.abc import Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..hf.model import context_length, vocab_size
from ..span import Span, span_inside


@dataclass(frozen=True)
class Row:
    """One completion, checked, as numpy arrays."""

    prompt: np.ndarray  # (P,) int64
    completion: np.ndarray  # (T,) int64
    spans: list[Span]
    answer: Span | None
    fills: list[np.ndarray] | None = None  # what replaces each span, int64; None for placeholders

    @cached_property
    def tokens(self) -> np.ndarray:
        """Prompt and completion, (P + T,) int64."""
        return np.concatenate([self.prompt, self.completion])

    def masks_something(self, span: Span) -> bool:
        """Whether masking `span` can change the answer; by causality a later span cannot."""
        return self.answer is not None and span.start < self.answer.start

    def masked(self, k: int, placeholder_id: int | None) -> np.ndarray:
        """Replace the tokens of span `k` by its fill, or by placeholders: (P + T,) int64, prompt and completion."""
        filler = placeholder_id if self.fills is None else self.fills[k]
        if filler is None:
            raise ValueError("placeholder_id: must be given where units are masked, got None")
        tokens = self.tokens.copy()
        tokens[len(self.prompt) + self.spans[k].start : len(self.prompt) + self.spans[k].end] = filler
        return tokens


@dataclass(frozen=True)
class ScoredBatch:
    """Batch that an estimator judges: B completions, their units and answers, checked on the host, by equal prompts.

    Fields after `token_budget` are optional: each holds one value per completion, in the order of the completions, or
    None where no estimator in use reads it.

    Attributes:
        rows: B completions with their prompts, units and answers, as numpy arrays.
        numbers: (B,) the caller's number of each completion, by which errors name it.
        placeholder_id: the id that replaces a masked token; None where nothing is masked by it.
        token_budget: maximum packed tokens per forward; None derives it from free memory.
        lengths: (B,) sampled tokens of each completion; a probe or another answer may follow them.
        reasoning_ends: (B,) where the answer's marker begins; the length where there is no answer.
        generator: source of what is drawn, on the CPU; None for a fixed one.
        groups: (B,) int64, equal for the completions of one prompt.
        rewards: (B,) float.
        advantages: (B,) or (B, T) float.
        entropies: B tensors (T_b,) of each sampled token's distribution, nats.
        external: B tensors (K_b,) or (T_b,), the caller's own importances.
        special_ids: ids that are not content: those that end a text or pad a batch.
    """

    rows: list[Row]
    numbers: list[int]
    placeholder_id: int | None = None
    token_budget: int | None = None
    lengths: list[int] = field(default_factory=list)
    reasoning_ends: list[int] | None = None
    generator: torch.Generator | None = None
    groups: Tensor | None = None
    rewards: Tensor | None = None
    advantages: Tensor | None = None
    entropies: list[Tensor] | None = None
    external: list[Tensor | Sequence[float]] | None = None
    special_ids: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        model: PreTrainedModel | None,
        prompts: Sequence[Tensor],
        completions: Sequence[Tensor],
        units: Sequence[Sequence[Span]] | None = None,
        answers: Sequence[Span | None] | None = None,
        *,
        placeholder_id: int | None = None,
        token_budget: int | None = None,
        fills: Sequence[Sequence[Tensor]] | None = None,
        numbers: Sequence[int] | None = None,
        apart: bool = True,
    ) -> "ScoredBatch":
        """Check columns of one completion each and put them into packing order.

        Args:
            model: what `causal_lm` finds; its vocabulary and context limit the ids. None if in another process.
            prompts, completions, units, answers, placeholder_id, token_budget, fills: as in `score_counterfactuals`
                (its `spans` are `units` here); without units or answers there are none.
            numbers: number by which errors name each completion; default its place.
            apart: whether a unit that overlaps the answer is an error, as it is where units are masked.

        Raises:
            ValueError: bad input; the message names argument, row and value.
        """
        for name, column in (("spans", units), ("answers", answers), ("fills", fills), ("numbers", numbers)):
            if column is not None:
                check_columns(prompts, **{name: column})
        named = list(range(len(prompts)) if numbers is None else numbers)
        vocab = None if model is None else vocab_size(model)
        if placeholder_id is not None or fills is not None:
            _check_placeholder(placeholder_id, vocab)
        rows = []
        for i, (prompt, completion) in enumerate(checked_ids(model, prompts, completions, named)):
            b, answer = named[i], None if answers is None else answers[i]
            row = _checked_row(b, prompt, completion, () if units is None else units[i], answer, apart)
            if fills is not None:
                row = replace(row, fills=_checked_fills(b, fills[i], row.spans, vocab))
            rows.append(row)
        order = packing_order([row.prompt for row in rows])
        sizes = [len(rows[i].completion) for i in order]
        return cls([rows[i] for i in order], [named[i] for i in order], placeholder_id, token_budget, sizes)

    def __len__(self) -> int:
        return len(self.rows)

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
        """Return B lists of K_b spans of completion tokens, each judged as one."""
        return [row.spans for row in self.rows]

    @property
    def answers(self) -> list[Span | None]:
        """Return B spans of `completions`, None where there is no answer."""
        return [row.answer for row in self.rows]

    @property
    def longest(self) -> int:
        """Count the tokens of the longest prompt with its completion; 0 for an empty batch."""
        return max((len(row.prompt) + len(row.completion) for row in self.rows), default=0)

    def with_units(
        self, units: Sequence[Sequence[Span]], fills: Sequence[Sequence[np.ndarray]] | None = None
    ) -> "ScoredBatch":
        """Copy the batch with other units, taken from its own, and the ids that replace them."""
        replaced = [None] * len(self.rows) if fills is None else [list(row) for row in fills]
        rows = [
            replace(row, spans=list(spans), fills=of_row)
            for row, spans, of_row in zip(self.rows, units, replaced, strict=True)
        ]
        return replace(self, rows=rows)

    def take(self, places: Sequence[int]) -> "ScoredBatch":
        """Copy the batch with some of its completions, in the order of `places`."""

        def taken(column: Any) -> Any:
            if column is None:
                return None
            return column[list(places)] if isinstance(column, Tensor) else [column[i] for i in places]

        return replace(self, **{name: taken(getattr(self, name)) for name in _COLUMNS})

    def to_callers_order(self, column: Sequence[Any]) -> list[Any]:
        """Put a column of this batch into the order of `numbers`."""
        return [column[i] for i in np.argsort(self.numbers, kind="stable")]


_COLUMNS = ("rows", "numbers", "lengths", "reasoning_ends", "groups", "rewards", "advantages", "entropies", "external")


def _check_placeholder(placeholder_id: int | None, vocab: int | None) -> None:
    whole = isinstance(placeholder_id, int) and not isinstance(placeholder_id, bool)
    if not whole or placeholder_id < 0 or (vocab is not None and placeholder_id >= vocab):  # type: ignore[operator]
        raise ValueError(
            f"placeholder_id must be an id in [0, {'vocabulary' if vocab is None else vocab}), got {placeholder_id!r}"
        )


def _checked_row(
    b: int, prompt: np.ndarray, completion: np.ndarray, units: Sequence[Span], given: Span | None, apart: bool
) -> Row:
    answer = None if given is None else span_inside(f"answers row {b}", given, len(completion))
    spans = []
    for k, unit in enumerate(units):
        spans.append(span_inside(f"spans row {b}, span {k}", unit, len(completion)))
        if apart and answer is not None and spans[-1].start < answer.end and answer.start < spans[-1].end:
            raise ValueError(f"spans row {b}, span {k}: {tuple(unit)} overlaps the answer {tuple(answer)}")
    return Row(prompt, completion, spans, answer)


def _checked_fills(b: int, fills: Sequence[Tensor], spans: list[Span], vocab: int | None) -> list[np.ndarray]:
    if len(fills) != len(spans):
        raise ValueError(f"fills row {b}: has {len(fills)} fills for {len(spans)} spans")
    checked = []
    for k, (fill, (start, end)) in enumerate(zip(fills, spans, strict=True)):
        where = f"fills row {b}, span {k}"
        checked.append(token_ids(where, fill, vocab).cpu().numpy())
        if len(fill) != end - start:
            raise ValueError(f"{where}: must hold an id for each of {end - start} tokens, got {len(fill)}")
    return checked


def check_columns(prompts: Sized, **columns: Sized) -> None:
    """Raise `ValueError` naming a column that is a padded tensor, or has another number of rows than `prompts`."""
    for name, column in {"prompts": prompts, **columns}.items():
        if isinstance(column, Tensor) and column.ndim > 1:
            raise ValueError(
                f"{name}: must be a list of 1-D tensors without padding, got one tensor {tuple(column.shape)}; take "
                "rows and padding apart by the mask, [row[kept] for row, kept in zip(ids, mask.bool())]"
            )
        if len(column) != len(prompts):
            raise ValueError(f"{name} has {len(column)} rows, prompts has {len(prompts)}; they must agree")


def checked_ids(
    model: PreTrainedModel | None,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    numbers: Sequence[int] | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Copy each row's prompt (P,) and completion (T,) to the host, int64, by one copy for each column.

    Raises `ValueError` naming argument, row (its place, or that of `numbers`) and value: not a 1-D int64 tensor, empty,
    or, where the model is in this process, an id outside its vocabulary or more tokens together than its context.
    """
    check_columns(prompts, completions=completions)
    named = range(len(prompts)) if numbers is None else numbers
    vocab, longest = (None, None) if model is None else (vocab_size(model), context_length(model))
    prompt_ids, completion_ids = (
        _token_ids(name, column, vocab, named) for name, column in (("prompts", prompts), ("completions", completions))
    )
    rows = list(zip(prompt_ids, completion_ids, strict=True))
    for b, (prompt, completion) in zip(named, rows, strict=True):
        if longest is not None and len(prompt) + len(completion) > longest:
            raise ValueError(
                f"completions row {b}: prompt of {len(prompt)} and completion of {len(completion)} tokens exceed "
                f"the model's context of {longest}"
            )
    return rows


def packing_order(prompts: Sequence[np.ndarray]) -> list[int]:
    """Order completions so that equal prompts are side by side, otherwise as they come."""
    first: dict[bytes, int] = {}
    groups = [first.setdefault(prompt.tobytes(), b) for b, prompt in enumerate(prompts)]
    return sorted(range(len(prompts)), key=lambda b: groups[b])


def token_ids(where: str, ids: Any, vocab: int | None = None) -> Tensor:
    """Check one row of token ids: a 1-D int64 tensor, not empty, inside the vocabulary. Names `where` and the value."""
    if not isinstance(ids, Tensor) or ids.ndim != 1 or ids.dtype != torch.int64:
        got = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"{where}: must be a 1-D int64 tensor of token ids, got {got}")
    if len(ids) == 0:
        raise ValueError(f"{where}: is empty")
    if vocab is not None and (bad := (ids < 0) | (ids >= vocab)).any():
        t = int(bad.nonzero()[0])
        raise ValueError(
            f"{where}: id {int(ids[t])} at position {t} is outside the vocabulary [0, {vocab}) "
            f"({int(bad.sum())} such ids in all)"
        )
    return ids


def _token_ids(name: str, column: Sequence[Tensor], vocab: int | None, numbers: Sequence[int]) -> list[np.ndarray]:
    for b, ids in zip(numbers, column, strict=True):
        token_ids(f"{name} row {b}", ids)
    if not column:
        return []
    flat = torch.cat(list(column)).cpu()
    split = flat.split([len(ids) for ids in column])
    if vocab is not None and ((flat < 0) | (flat >= vocab)).any():
        for b, ids in zip(numbers, split, strict=True):
            token_ids(f"{name} row {b}", ids, vocab)
    return [ids.numpy() for ids in split]
