"""Lay out the queries of each completion in one call, and the forwards that answer them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from ..batch import Batch, Mask, Masks, ScoredRow
from ..model.limits import apart_by_length, largest_forward, rows_per_forward
from ..model.parts import vocab_size
from ..model.stateful_layers import has_cells
from ..model.walk import Model, ModelWalk
from ..rows import equal_prompts
from ..tree.packs import Limits, lay_out_split
from ..tree.prefix_tree import Pack, Query
from .branches import branch, checked_masks
from .outcomes import DIVERGENCES, Outcome


@dataclass(frozen=True)
class ScoringPlan:
    """Plan of a call: the queries, and which of them may be fed together."""

    index: list[int]  # by which errors name each row
    bundles: Sequence[list[Query]]  # of each row
    parts: list[list[int]]  # bundles that may share a forward, by number, equal prompts side by side
    rows: list[ScoredRow]  # none where only queries are given
    limits: Limits

    @cached_property
    def queries(self) -> list[Query]:
        """List the queries of all bundles, by number."""
        return [query for bundle in self.bundles for query in bundle]

    @cached_property
    def queries_of_bundle(self) -> list[range]:
        """List the queries of each bundle, by number."""
        stops = list(accumulate(map(len, self.bundles)))
        return [range(stop - len(bundle), stop) for bundle, stop in zip(self.bundles, stops, strict=True)]

    @cached_property
    def bundle_of(self) -> list[int]:
        """List the bundle of each query, by number."""
        return [i for i, bundle in enumerate(self.bundles) for _ in bundle]

    @cached_property
    def sizes(self) -> list[int]:
        """List how many values are read for each query, by number."""
        return [query.num_values for query in self.queries]

    def packs(self) -> Iterator[Pack]:
        """Lay out every pack, in order, one at a time."""
        for part in self.parts:
            yield from lay_out_split(self.queries, [self.queries_of_bundle[i] for i in part], self.limits)


def plan_scoring(model: Model, batch: Batch, outcome: Outcome = "logprob", mask: Masks = None) -> ScoringPlan:
    """Plan the scores of a batch; nothing runs on a device. Packs are laid out one at a time, as they are fed."""
    walk, rows = ModelWalk.of(model), batch.scored_rows
    masks = checked_masks(mask, batch, vocab_size(walk.model))
    bundles = [queries_of(row, outcome, rule) for row, rule in zip(rows, masks, strict=True)]
    lengths = [len(row.prompt) + len(row.completion) for row in rows]
    groups = equal_prompts(batch.rows.prompts)
    return _lay_out(walk, batch.index, bundles, lengths, groups, batch.token_budget, rows)


def plan_queries(
    model: Model,
    bundles: Sequence[Sequence[Query]],
    *,
    index: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
    token_budget: int | None = None,
) -> ScoringPlan:
    """Check the input of `query_logprobs`; nothing runs on a device."""
    listed = [list(bundle) for bundle in bundles]
    lengths = [max((query.length for query in bundle), default=0) for bundle in listed]
    index = list(range(len(listed)) if index is None else index)
    groups = [0] * len(listed) if groups is None else groups
    for name, column in {"index": index, "groups": groups}.items():
        if len(column) != len(listed):
            raise ValueError(f"{name} has {len(column)} rows, bundles has {len(listed)}; they must agree")
    return _lay_out(model, index, listed, lengths, groups, token_budget, rows=[])


def _lay_out(
    model: Model,
    index: list[int],
    bundles: list[list[Query]],
    lengths: Sequence[int],
    groups: Sequence[int],
    token_budget: int | None,
    rows: list[ScoredRow],
) -> ScoringPlan:
    walk = ModelWalk.of(model)
    limits = Limits(
        rows_per_forward(walk, token_budget),
        trunks=not has_cells(walk),  # layers that carry a state do not keep it for branches of a later forward
        most_rows=largest_forward(walk),
    )
    fed, parts = apart_by_length(walk, bundles, lengths, index)
    return ScoringPlan(index, fed, [sorted(part, key=groups.__getitem__) for part in parts], rows, limits)


def queries_of(row: ScoredRow, outcome: Outcome = "logprob", mask: Mask | None = None) -> list[Query]:
    """List the queries of one completion: its answer as sampled, then a branch for each unit that can change it."""
    if row.answer is None:
        return []
    targets = row.completion[row.answer.start : row.answer.end]
    if outcome == "last":
        targets = targets[:1]
    queries = []
    for k in (None, *(k for k, span in enumerate(row.spans) if row.masks_something(span))):
        tokens, answer = branch(row, k, mask)
        first = answer.start - 1
        fed, beyond = np.split(tokens, [first + len(targets)])
        queries.append(Query(fed, first, targets, beyond=beyond, divergence=outcome in DIVERGENCES))
    return queries
