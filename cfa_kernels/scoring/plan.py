"""Lay out packs: of whole completions for a forward with gradients, and of the queries that are asked in one call."""

import numbers
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

import numpy as np
from transformers import PreTrainedModel

from ..batch import Batch, Mask, Masks, ScoredRow
from ..model.limits import apart_by_length, largest_forward, rows_per_forward
from ..model.parts import vocab_size
from ..model.sharded.ranks import Ranks, inside
from ..model.stateful_layers import has_cells
from ..model.walk import Model, ModelWalk
from ..rows import Rows, check_columns, fed_together
from ..tree.packs import Limits, idle_pack, lay_out, lay_out_split
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
    groups: Sequence[int] = ()  # of each bundle, equal for those of one prompt

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
            groups = [[self.queries_of_bundle[i] for i in own] for _, own in groupby(part, self.groups.__getitem__)]
            yield from lay_out_split(self.queries, groups, self.limits)


def plan_scoring(model: Model, batch: Batch, outcome: Outcome = "logprob", mask: Masks = None) -> ScoringPlan:
    """Plan the scores of a batch; nothing runs on a device. Packs are laid out one at a time, as they are fed."""
    walk, rows = ModelWalk.of(model), batch.scored_rows
    masks = checked_masks(mask, batch, vocab_size(walk.model))
    bundles = [queries_of(row, outcome, rule) for row, rule in zip(rows, masks, strict=True)]
    lengths = [len(row.prompt) + len(row.completion) for row in rows]
    groups = fed_together(batch.rows)
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
    return ScoringPlan(index, fed, [sorted(part, key=groups.__getitem__) for part in parts], rows, limits, groups)


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


@dataclass(frozen=True)
class TrainingPlan:
    """Plan of a forward with gradients: how much of each row is fed, and which rows are fed without a gradient."""

    walk: ModelWalk
    rows: Rows
    counts: np.ndarray  # (B,) int64: the first tokens of each completion, which will be read
    groups: Sequence[int]  # of each row, equal for those that are fed together
    with_gradient: list[int]  # rows whose group needs one
    without_gradient: list[int]  # all others
    token_budget: int
    whole: bool  # whether tokens that nobody reads are fed too

    def packs(self, order: Sequence[int]) -> Iterator[Pack]:
        """Lay out the rows in `order`, a group together, one pack at a time; the queries of packs are rows."""
        rows = self.rows
        lengths = [len(rows.prompts[b]) + len(rows.completions[b]) for b in order]
        bundles, parts = apart_by_length(
            self.walk, [self._sequence(b) for b in order], lengths, [rows.index[b] for b in order]
        )
        queries = {b: query for b, bundle in zip(order, bundles, strict=True) for query in bundle}
        for part in parts:
            together = groupby([order[i] for i in part], self.groups.__getitem__)
            yield from lay_out(queries, [list(group) for _, group in together], self.token_budget)

    def _sequence(self, b: int) -> list[Query]:
        """Make the query of a completion's first tokens; none for 0, unless the whole row is fed."""
        count, first = int(self.counts[b]), len(self.rows.prompts[b]) - 1
        if count == 0 and not self.whole:
            return []
        tokens = self.rows.whole(b)
        fed = len(tokens) if self.whole else first + count
        return [Query(tokens[:fed], first, tokens[first + 1 : first + 1 + count], beyond=tokens[fed:])]


def plan_training(
    walk: ModelWalk,
    rows: Rows,
    needed: Sequence[int] | None = None,
    trained: Sequence[bool] | None = None,
    *,
    token_budget: int | None = None,
    whole: bool = False,
) -> TrainingPlan:
    """Check the input of `packed_forward`, and split rows into those whose group needs a gradient and all others.

    If processes share the model, and so must run equally many forwards, all rows are of the first kind. Raises
    `ValueError` naming row and value of `needed`, or the length of `needed` or `trained`, that does not fit the rows.
    """
    counts = np.array(rows.lengths, dtype=np.int64) if needed is None else _checked_needed(needed, rows.lengths)
    groups = fed_together(rows)
    order = sorted(range(len(rows)), key=groups.__getitem__)
    reached = {*groups}
    if trained is not None:
        check_columns(groups, trained=trained)
        if not isinstance(inside(walk.model), Ranks):
            reached = {groups[b] for b in order if trained[b] and counts[b]}
    with_gradient, without = ([b for b in order if (groups[b] in reached) is some] for some in (True, False))
    budget = rows_per_forward(walk, token_budget)
    return TrainingPlan(walk, rows, counts, groups, with_gradient, without, budget, whole)


def as_many_as_others(model: PreTrainedModel, packs: Iterable[Pack], *, at_least: int = 0) -> Iterable[Pack]:
    """Add idle packs where there are fewer than `at_least`, and where processes that share `model` feed more.

    Processes that share a model must all run the same number of forwards and backwards.
    """
    ranks = inside(model)
    if ranks is None and not at_least:
        return packs
    own = list(packs)
    wanted = max(len(own), at_least)
    if ranks is not None:
        wanted = ranks.forwards(wanted)
    return own + [idle_pack()] * (wanted - len(own))


def _checked_needed(needed: Sequence[int], lengths: Sequence[int]) -> np.ndarray:
    """Return how many tokens of each completion are to be fed, (B,) int64."""
    check_columns(lengths, needed=needed)
    for b, (count, length) in enumerate(zip(needed, lengths, strict=True)):
        if isinstance(count, bool) or not isinstance(count, numbers.Integral) or not 0 <= count <= length:
            raise ValueError(f"needed row {b}: must be a number of tokens from 0 to {length}, got {count!r}")
    return np.array(needed, dtype=np.int64)
