"""Plan which queries are asked in a call, and which of them may be fed together: of scoring and of training alike."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
from transformers import PreTrainedModel

from ..batch import Batch, Mask, Masks, ScoredRow
from ..model.limits import apart_by_length, largest_forward, rope_lengths, rows_per_forward
from ..model.parts import vocab_size
from ..model.sharded.ranks import Ranks, inside
from ..model.stateful_layers import has_cells
from ..model.walk import Model, ModelWalk
from ..rows import Rows, check_columns, fed_together
from ..tree.packs import Limits, idle_pack, lay_out, lay_out_split
from ..tree.prefix_tree import Pack, Query
from .branches import branch, checked_mask
from .outcomes import DIVERGENCES, Outcome


@dataclass(frozen=True)
class QueryPlan:
    """Plan of a call: the queries of each row, which are a bundle, and parts of them that may share a forward."""

    index: Sequence[int]  # by which errors name each row
    queries: list[Query]  # of all bundles, as fed
    bundles: list[list[int]]  # numbers of the queries of each row
    parts: list[list[list[list[int]]]]  # of each part, groups of bundles, or of what a part has of them
    limits: Limits

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
            yield from lay_out_split(self.queries, part, self.limits)


def plan_scoring(model: Model, batch: Batch, outcome: Outcome = "logprob", mask: Masks = None) -> QueryPlan:
    """Plan the scores of a batch; nothing runs on a device. Packs are laid out one at a time, as they are fed."""
    walk = ModelWalk.of(model)
    rule = checked_mask(mask, batch, vocab_size(walk.model))
    bundles = [queries_of(row, outcome, rule) for row in batch.scored_rows]
    return plan_queries(
        walk, bundles, index=batch.index, groups=fed_together(batch.rows), token_budget=batch.token_budget
    )


def plan_queries(
    model: Model,
    bundles: Sequence[Sequence[Query]],
    *,
    index: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
    token_budget: int | None = None,
) -> QueryPlan:
    """Plan the forwards of queries; nothing runs on a device.

    Each query keeps the rotary frequencies that its whole sequence has by itself, so a bundle may be in several parts.
    """
    walk = ModelWalk.of(model)
    index = range(len(bundles)) if index is None else index
    groups = [0] * len(bundles) if groups is None else groups
    switches, queries, numbered = rope_lengths(walk)[0], list[Query](), list[list[int]]()
    pieces, owners = list[list[int]](), list[int]()
    for i, bundle in enumerate(bundles):
        numbered.append([*range(len(queries), len(queries) + len(bundle))])
        queries += bundle
        for query in bundle:
            if not 0 <= query.first <= (end := query.first + len(query.targets)) <= (length := len(query.tokens)):
                what = f"targets at positions [{query.first}, {end}) are outside a sequence of {length} tokens"
                raise ValueError(f"queries row {index[i]}: {what}")
    for i in sorted(range(len(bundles)), key=groups.__getitem__):
        sides: dict[int, list[int]] = {}
        for n in numbered[i]:
            side = sum(queries[n].length > switch for switch in switches) if switches else 0
            sides.setdefault(side, []).append(n)
        pieces += sides.values()
        owners += [i] * len(sides)
    fed, parts = apart_by_length(walk, [[queries[n] for n in piece] for piece in pieces], [index[i] for i in owners])
    for piece, own in zip(pieces, fed, strict=True):
        for n, query in zip(piece, own, strict=True):
            queries[n] = query
    # A divergence is read after the first query of its bundle, which must be in an earlier part then.
    firsts = {bundle[0] for bundle in numbered if bundle}
    ordered = [[p for p in part if (pieces[p][0] in firsts) is some] for some in (True, False) for part in parts]
    grouped = [
        [[pieces[p] for p in group] for _, group in groupby(part, lambda p: groups[owners[p]])] for part in ordered
    ]
    limits = Limits(
        rows_per_forward(walk, token_budget),
        trunks=not has_cells(walk),  # layers that carry a state do not keep it for branches of a later forward
        most_rows=largest_forward(walk),
    )
    return QueryPlan(index, queries, numbered, grouped, limits)


def queries_of(row: ScoredRow, outcome: Outcome = "logprob", mask: Mask | None = None) -> list[Query]:
    """List the queries of one completion: its answer as sampled, then a branch for each unit that can change it."""
    if row.answer is None:
        return []
    targets = row.completion[row.answer.start : row.answer.end]
    if outcome == "last":
        targets = targets[:1]
    start, queries = len(row.prompt), []
    for k in (None, *(k for k, masks in enumerate(row.masks_something) if masks)):
        tokens, answer = branch(row, k, mask)
        first = answer.start - 1
        end = first + len(targets)
        begins = row.tokens, end if k is None else start + row.spans[k].start
        queries.append(Query(tokens[:end], first, targets, tokens[end:], outcome in DIVERGENCES, begins=begins))
    return queries


@dataclass(frozen=True)
class TrainingPlan:
    """Plan of a forward with gradients: how much of each row is fed, and which rows are fed without a gradient."""

    walk: ModelWalk
    rows: Rows
    counts: np.ndarray  # (B,) int64: the first tokens of each completion, which will be read
    plan: QueryPlan  # of a query for each row that is fed; no group is cut
    row_of: list[int]  # of each query
    with_gradient: list[bool]  # of each row, whether its group needs one

    def packs(self, *, with_gradient: bool) -> Iterator[Pack]:
        """Lay out the rows of one kind, a group together, one pack at a time; the queries of packs are rows."""
        queries = dict(zip(self.row_of, self.plan.queries, strict=True))
        for part in self.plan.parts:
            groups = [[self.row_of[n] for bundle in group for n in bundle] for group in part]
            own = [group for group in groups if self.with_gradient[group[0]] is with_gradient]
            yield from lay_out(queries, own, self.plan.limits.token_budget)


def plan_training(
    walk: ModelWalk,
    rows: Rows,
    needed: Sequence[int] | None = None,
    trained: Sequence[bool] | None = None,
    *,
    token_budget: int | None = None,
    whole: bool = False,
) -> TrainingPlan:
    """Split rows into those whose group needs a gradient and all others, as `packed_forward` feeds them.

    If processes share the model, and so must run equally many forwards, all rows are of the first kind. Tokens that
    nobody reads are fed too if `whole`.
    """
    given = {"needed": needed, "trained": trained}
    check_columns(rows.prompts, **{name: column for name, column in given.items() if column is not None})
    counts = np.array(rows.lengths if needed is None else needed, dtype=np.int64)
    for b in np.flatnonzero((counts < 0) | (counts > rows.lengths)).tolist():
        raise ValueError(f"needed row {b}: must be a number of tokens from 0 to {rows.lengths[b]}, got {counts[b]}")
    groups = fed_together(rows)
    reached = {*groups}
    if trained is not None and not isinstance(inside(walk.model), Ranks):
        reached = {groups[b] for b in range(len(rows)) if trained[b] and counts[b]}
    bundles = list[list[Query]]()
    for b, count in enumerate(counts.tolist()):
        tokens, first = rows.whole(b), len(rows.prompts[b]) - 1
        fed = len(tokens) if whole else first + count
        query = Query(tokens[:fed], first, tokens[first + 1 : first + 1 + count], beyond=tokens[fed:])
        bundles.append([query] if count or whole else [])
    plan = plan_queries(walk, bundles, index=rows.index, groups=groups, token_budget=token_budget)
    row_of = [b for b, bundle in enumerate(bundles) if bundle]
    return TrainingPlan(walk, rows, counts, plan, row_of, [group in reached for group in groups])


def as_many_as_others(model: PreTrainedModel, packs: Iterable[Pack], *, at_least: int = 0) -> Iterable[Pack]:
    """Add idle packs where there are fewer than `at_least`, and where processes that share `model` feed more.

    Processes that share a model must all run the same number of forwards and backwards.
    """
    if (ranks := inside(model)) is None and not at_least:
        return packs
    own = list(packs)
    wanted = max(len(own), at_least)
    return own + [idle_pack()] * ((wanted if ranks is None else ranks.forwards(wanted)) - len(own))
