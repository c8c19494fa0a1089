"""Lay out the queries of each completion in one call, and the forwards that answer them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ..model.limits import apart_by_length, largest_forward, rows_per_forward
from ..model.stateful_layers import has_cells
from ..model.walk import Model, ModelWalk
from ..tree.packs import Limits, lay_out_split
from ..tree.prefix_tree import Pack, Query
from .batch import Mask, ScoredBatch, ScoredRow, branch
from .outcomes import DIVERGENCES, Outcome


@dataclass(frozen=True)
class ScoringPlan:
    """Plan of a call: the queries, and which of them may be fed together."""

    index: list[int]  # by which errors name each row
    bundles: Sequence[list[Query]]  # of each row
    parts: list[list[int]]  # bundles that may share a forward, by number
    rows: list[ScoredRow]  # equal prompts side by side; none where only queries are given
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


def plan_scoring(model: Model, batch: ScoredBatch, outcome: Outcome = "logprob") -> ScoringPlan:
    """Plan the scores of a batch; nothing runs on a device. Packs are laid out one at a time, as they are fed."""
    bundles = [queries_of(row, outcome, batch.mask) for row in batch.rows]
    lengths = [len(row.prompt) + len(row.completion) for row in batch.rows]
    return _lay_out(model, batch.index, bundles, lengths, batch.token_budget, batch.rows)


def plan_queries(
    model: Model,
    bundles: Sequence[Sequence[Query]],
    *,
    index: Sequence[int] | None = None,
    token_budget: int | None = None,
) -> ScoringPlan:
    """Check the input of `query_logprobs`; nothing runs on a device."""
    listed = [list(bundle) for bundle in bundles]
    lengths = [max((query.length for query in bundle), default=0) for bundle in listed]
    index = list(range(len(listed)) if index is None else index)
    if len(index) != len(listed):
        raise ValueError(f"index has {len(index)} rows, bundles has {len(listed)}; they must agree")
    return _lay_out(model, index, listed, lengths, token_budget, rows=[])


def _lay_out(
    model: Model,
    index: list[int],
    bundles: list[list[Query]],
    lengths: Sequence[int],
    token_budget: int | None,
    rows: list[ScoredRow],
) -> ScoringPlan:
    walk = ModelWalk.of(model)
    limits = Limits(
        rows_per_forward(walk, token_budget),
        trunks=not has_cells(walk),  # layers that carry a state do not keep it for branches of a later forward
        most_rows=largest_forward(walk),
    )
    return ScoringPlan(index, *apart_by_length(walk, bundles, lengths, index), rows, limits)


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
        end = first + len(targets)
        queries.append(Query(tokens[:end], first, targets, beyond=tokens[end:], divergence=outcome in DIVERGENCES))
    return queries
