"""cfa_kernels/scoring/plan.py."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from ..hf.limits import apart_by_length, largest_forward, rows_per_forward
from ..hf.model import context_length, vocab_size
from ..hf.stateful_layers import has_cells
from ..packing.packs import Chain, Limits, chain_units
from ..packing.prefix_tree import Pack, Query
from ..span import Span
from .batch import Row, check_columns, checked_ids, checked_rows, equal_prompts_together
from .outcomes import DIVERGENCES, Outcome, checked_outcome


@dataclass(frozen=True)
class ScoringOptions:
    """The keyword options of `score_counterfactuals`, which see.

    Raises:
        ValueError: a temperature that is not positive, an outcome that is none.
    """

    placeholder_id: int
    token_budget: int | None = None
    outcome: Outcome = "logprob"
    logprobs: bool = False
    temperature: float = 1.0
    fills: Sequence[Sequence[Tensor]] | None = None

    def __post_init__(self) -> None:
        checked_outcome(self.outcome)
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")


@dataclass(frozen=True)
class _Part:
    """Units, by number, that may share a forward: all, unless the model's positions follow the longest of a forward."""

    units: list[int]
    limits: Limits


@dataclass(frozen=True)
class ScoringPlan:
    """What is asked in one call, and what may be fed together."""

    order: list[int]  # the caller's number of each row
    units: list[list[Query]]  # of each row
    rows: list[Row] = field(default_factory=list)  # equal prompts side by side; none where queries alone are given
    parts: list[_Part] = field(default_factory=list)

    @cached_property
    def queries(self) -> list[Query]:
        """Those of all units, by number."""
        return [query for unit in self.units for query in unit]

    @cached_property
    def numbers(self) -> list[range]:
        """The numbers of each unit's queries."""
        stops = np.cumsum([len(unit) for unit in self.units]).tolist()
        return [range(stop - len(unit), stop) for unit, stop in zip(self.units, stops, strict=True)]

    @cached_property
    def unit_of(self) -> list[int]:
        """The unit of each query, by number."""
        return [i for i, unit in enumerate(self.units) for _ in unit]

    def chains(self) -> Iterator[Chain]:
        """Every chain of packs, in order, made when it is asked for."""
        for part in self.parts:
            yield from chain_units(self.queries, [self.numbers[i] for i in part.units], part.limits)

    @property
    def packs(self) -> list[Pack]:
        """Every forward, in order."""
        return [pack for chain in self.chains() for pack, _ in chain.packs(self.queries)]


def plan_scoring(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    spans: Sequence[Sequence[Span]],
    answers: Sequence[Span | None],
    **options: Any,
) -> ScoringPlan:
    """Check the input of `score_counterfactuals`; nothing runs on a device. `options` are those of `ScoringOptions`.

    Packs are laid out when they are asked for.
    """
    return _plan(model, prompts, completions, spans, answers, ScoringOptions(**options))


def plan_queries(
    model: PreTrainedModel,
    units: Sequence[Sequence[Query]],
    *,
    lengths: Sequence[int] | None = None,
    row_numbers: Sequence[int] | None = None,
    token_budget: int | None = None,
    temperature: float = 1.0,
) -> ScoringPlan:
    """Check the input of `query_logprobs`; nothing runs on a device."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    asked = [list(unit) for unit in units]
    if lengths is None:
        lengths = [max((query.length for query in unit), default=0) for unit in asked]
    numbers = list(range(len(asked)) if row_numbers is None else row_numbers)
    for name, column in (("lengths", lengths), ("row_numbers", numbers)):
        if len(column) != len(asked):
            raise ValueError(f"{name} has {len(column)} rows, units has {len(asked)}; they must agree")
    return _lay_out(model, numbers, asked, lengths, token_budget, rows=[])


def _plan(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    spans: Sequence[Sequence[Span]],
    answers: Sequence[Span | None],
    options: ScoringOptions,
) -> ScoringPlan:
    check_columns(prompts, completions=completions)
    ids = checked_ids(prompts, completions, vocab_size(model), context_length(model))
    rows = checked_rows(model, ids, spans, answers, options.placeholder_id, options.fills)
    order = equal_prompts_together([row.prompt for row in rows])
    rows = [rows[b] for b in order]
    units = [queries_of(row, options) for row in rows]
    lengths = [len(row.prompt) + len(row.completion) for row in rows]
    return _lay_out(model, order, units, lengths, options.token_budget, rows)


def _lay_out(
    model: PreTrainedModel,
    order: list[int],
    units: list[list[Query]],
    lengths: Sequence[int],
    token_budget: int | None,
    rows: list[Row],
) -> ScoringPlan:
    limits = Limits(
        rows_per_forward(model, token_budget),
        continues=not has_cells(model),  # layers that carry a state keep none for branches of a later forward
        most_rows=largest_forward(model),
    )
    parts = apart_by_length(model, units, lengths, order)
    return ScoringPlan(
        order,
        [max(unit, key=len) for unit in zip(*parts, strict=True)],  # each asks in one part at most
        rows,
        [_Part([i for i, unit in enumerate(part) if unit], limits) for part in parts],
    )


def queries_of(row: Row, options: ScoringOptions) -> list[Query]:
    """What to ask for one completion: every token's log-prob if wanted, the base answer, then a branch per span."""
    prompt_length = len(row.prompt)
    tokens = np.concatenate([row.prompt, row.completion])
    queries = []
    if options.logprobs:
        tempered = options.temperature != 1.0
        queries.append(Query(tokens[:-1], prompt_length - 1, row.completion, tempered, beyond=tokens[-1:]))
    if row.answer is None:
        return queries
    targets = row.completion[row.answer.start : row.answer.end]
    if options.outcome == "last":
        targets = targets[:1]
    divergence = options.outcome in DIVERGENCES
    first = prompt_length + row.answer.start - 1
    fed, beyond = np.split(tokens, [first + len(targets)])
    queries.append(Query(fed, first, targets, beyond=beyond, divergence=divergence))
    for k, span in enumerate(row.spans):
        if row.masks_something(span):
            branch = fed.copy()
            filler = options.placeholder_id if row.fills is None else row.fills[k]
            branch[prompt_length + span.start : prompt_length + span.end] = filler
            queries.append(Query(branch, first, targets, beyond=beyond, divergence=divergence))
    return queries
