"""Approximate masking by computing a few rows anew instead of all rows after a span.

A branch of `score_counterfactuals` feeds everything from the span to the answer. Here the rows between the span and the
last few stay those of the completion as sampled: `short_branches` feeds the masked span and the last rows,
`answer_knockout` only the last rows, which then do not see the span. Both show what the last rows read from the span
itself, and miss what later reasoning carries over from it.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from ..hf.limits import refuse_length_dependent_rope, rows_per_forward
from ..hf.memory import halves, run_in_memory
from ..hf.model_walk import ModelWalk
from ..hf.stateful_layers import has_cells
from ..hf.tree_forward import TreeMask, pack_states, tree_attention_mode
from ..hf.verify import check_supported
from ..ops.attention_options import EVERYTHING
from ..ops.segment_table import SegmentTable
from ..packing.prefix_tree import Pack, PrefixTree, Query
from ..scoring.access import ModelAccess
from ..scoring.batch import Row, ScoredBatch
from ..scoring.masked import CounterfactualScores, Read, collect_scores, gather, read_pack
from ..scoring.outcomes import Outcome, OutcomeReader
from ..scoring.plan import ScoringOptions, ScoringPlan, queries_of
from ..span import Span


def short_branches(
    access: ModelAccess, batch: ScoredBatch, *, fed_from: Sequence[int] | None = None, outcome: Outcome = "logprob"
) -> CounterfactualScores:
    """Mask each unit and compute anew only the unit and the rows from `fed_from` on: an approximation.

    Those rows attend to the masked unit and, between it and themselves, to rows that still saw the unit. It costs the
    unit and the last rows, wherever the unit is; with `fed_from` at or before every unit's end it is
    `score_counterfactuals`.

    Args:
        access: access to the model, which must be in this process and have no layers that carry a state.
        batch: completions, units and answers, with a placeholder or fills. A completion and its branches stay together,
            even over the token budget, as long as memory holds them.
        fed_from: for each completion, the first token whose row is computed anew if it is after the unit; at most,
            and by default, the one before the answer. The first of the answer's marker, or some tokens earlier, is
            closer to exact masking.
        outcome: as in `score_counterfactuals`.

    Returns:
        `CounterfactualScores`, in the batch's order.

    Raises:
        ValueError: a `fed_from` after the answer's start; the message names row and value.
        TypeError, NotImplementedError, FloatingPointError: as `score_counterfactuals`.
    """
    return _score(access.model, batch, "fed_from", fed_from, ScoringOptions(outcome), hidden=False)


def answer_knockout(
    access: ModelAccess, batch: ScoredBatch, *, blind_from: Sequence[int] | None = None, outcome: Outcome = "logprob"
) -> CounterfactualScores:
    """Score each answer by rows that do not see one unit at a time: an approximation of masking.

    The rows from `blind_from` on attend to everything but the unit, at their own positions; all rows before them are
    those of the completion as sampled. Equal to one forward per unit with a mask that hides the unit from those rows,
    to rounding. It costs only the last rows.

    Args:
        access: access to the model, which must be in this process and have full attention in every layer.
        batch: completions, units and answers; a completion and its branches stay together, even over the token budget,
            as long as memory holds them. A row always sees itself.
        blind_from: for each completion, the first token whose row is blind; at most, and by default, the one before
            the answer.
        outcome: as in `score_counterfactuals`.

    Returns:
        `CounterfactualScores`, in the batch's order.

    Raises:
        ValueError: a `blind_from` after the answer's start; the message names row and value.
        NotImplementedError: also a model with windows or chunks of positions.
        TypeError, FloatingPointError: as `score_counterfactuals`.

    Source: the attention suppression of Thought Anchors (arXiv 2506.19143), from a sentence to the answer only.
    """
    return _score(access.model, batch, "blind_from", blind_from, ScoringOptions(outcome), hidden=True)


def _score(
    model: PreTrainedModel,
    batch: ScoredBatch,
    name: str,
    fed_from: Sequence[int] | None,
    options: ScoringOptions,
    *,
    hidden: bool,
) -> CounterfactualScores:
    first = _first_rows(batch, name, fed_from)
    walk = ModelWalk.of(model)
    if has_cells(walk):
        raise NotImplementedError(
            f"model: {type(model).__name__} has layers that carry a state through rows which are not fed again; use "
            "score_counterfactuals"
        )
    refuse_length_dependent_rope(walk, batch.longest)
    placeholder_id = 0 if hidden else batch.placeholder_id  # nothing replaces what is hidden
    bundles = [queries_of(row, options, placeholder_id) for row in batch.rows]
    plan = ScoringPlan(batch.numbers, bundles, batch.rows)
    head = check_supported(walk)
    layout = _Layout(plan, first, hidden)
    reader = OutcomeReader(head)

    def read_trunk(trunk: _Trunk) -> Read:
        pack = trunk.pack()
        return read_pack(reader, plan, pack, trunk.numbers, pack_states(walk, head, pack))

    with tree_attention_mode(walk), _full_attention(walk, required=hidden):
        trunks = layout.trunks(rows_per_forward(walk, batch.token_budget))
        read = list(run_in_memory(trunks, read_trunk, layout.halved))
    values, work = gather(plan, read)
    return collect_scores(values, plan, options, work)


def _first_rows(batch: ScoredBatch, name: str, given: Sequence[int] | None) -> list[int]:
    """Find the first token of each completion whose row is computed anew; -1 before an answer at its start."""
    rows = batch.rows
    before = [-1 if row.answer is None else row.answer.start - 1 for row in rows]
    if given is None:
        return before
    if len(given) != len(rows):
        raise ValueError(f"{name} has {len(given)} rows, the batch has {len(rows)}; they must agree")
    for b, row, first in zip(batch.numbers, rows, given, strict=True):
        if row.answer is not None and not 0 <= first <= row.answer.start:
            raise ValueError(f"{name} row {b}: {first} is outside [0, {row.answer.start}], the places up to the answer")
    return [min(first, last) for first, last in zip(given, before, strict=True)]


@contextmanager
def _full_attention(walk: ModelWalk, *, required: bool) -> Iterator[None]:
    """Refuse layers with a window or a chunk: where rows are left out, places in a context are not positions."""

    def refuse(module: nn.Module, args: tuple, kwargs: dict) -> None:
        for mask in (*args, *kwargs.values()):
            if isinstance(mask, TreeMask) and mask.reach != EVERYTHING:
                raise NotImplementedError(
                    f"model: {type(walk.model).__name__} has layers with a window or chunk of positions, from which a "
                    "span cannot be hidden by itself; use short_branches"
                )

    modules = walk.modules.values() if required else ()
    hooks = [module.register_forward_pre_hook(refuse, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class _Part:
    """Rows after the tree, side by side, and what they see before themselves."""

    tokens: np.ndarray
    start: int  # position of the first row
    seen: np.ndarray  # packed rows; -1, -2, ... for the first, second, ... row of part number `masked`
    masked: int = -1

    @property
    def key(self) -> Hashable:
        """Key that is equal for parts that compute the same."""
        return self.tokens.tobytes(), self.start, self.seen.tobytes(), self.masked


@dataclass(frozen=True)
class _Branch:
    """Places where a query's targets are predicted: on the tree, or by the last rows of parts, given by number."""

    query: Query
    on_tree: np.ndarray  # packed rows
    parts: list[int]


@dataclass
class _Trunk:
    """Completions of one forward as a tree, and the rows after it that are computed anew, equal ones once."""

    numbers: list[int] = field(default_factory=list)  # numbers of the queries that it answers
    tree: PrefixTree = field(default_factory=PrefixTree)
    parts: list[_Part] = field(default_factory=list)
    part_numbers: dict[Hashable, int] = field(default_factory=dict)
    branches: list[_Branch] = field(default_factory=list)
    num_anew: int = 0  # rows of the parts

    @property
    def num_tokens(self) -> int:
        """Count the rows of the forward."""
        return self.tree.num_tokens + self.num_anew

    def add(self, row: Row, bundle: Sequence[Query], asked: Mapping[int, int], first: int, hidden: bool) -> None:
        """Lay out a completion as sampled and, after it, the last rows of the wanted branches.

        Args:
            row: the completion.
            bundle: its queries: as sampled, then a branch for each span that can change the answer.
            asked: places in `bundle` of the wanted queries, ascending, each with the query's number in the plan.
            first: first row that is computed anew.
            hidden: whether those rows do not see the span.
        """
        base, matter = bundle[0], [span for span in row.spans if row.masks_something(span)]
        path = self.tree.insert(base.tokens)
        on_tree = path[base.first : base.first + len(base.targets)]
        for place, number in asked.items():
            query = bundle[place]
            parts = self._lay_out(row, query, path, matter[place - 1], first, hidden) if place else []
            self.branches.append(_Branch(query, on_tree, parts))
            self.numbers.append(number)

    def _lay_out(self, row: Row, query: Query, path: np.ndarray, span: Span, first: int, hidden: bool) -> list[int]:
        """Add the rows of a masked branch to compute anew: its span's unless hidden, and those from `first` on."""
        shift, length = len(row.prompt), len(path)
        start, stop = shift + span.start, min(shift + span.end, length)
        before, numbers = path[:start], list[int]()
        if not hidden:
            numbers.append(self._number(_Part(query.tokens[start:stop], start, before)))
        elif stop > query.first:  # the span's own last row predicts the first target: it sees itself, as sampled
            own_row = row.completion[stop - 1 - shift : stop - shift]
            numbers.append(self._number(_Part(own_row, stop - 1, before)))
        own = max(shift + first, stop)
        if own < length:
            inside = np.zeros(0, np.int64) if hidden else -1 - np.arange(stop - start)
            seen = np.concatenate([before, inside, path[stop:own]])
            numbers.append(self._number(_Part(query.tokens[own:length], own, seen, -1 if hidden else numbers[0])))
        return numbers

    def _number(self, part: _Part) -> int:
        number = self.part_numbers.setdefault(part.key, len(self.parts))
        if number == len(self.parts):
            self.parts.append(part)
            self.num_anew += len(part.tokens)
        return number

    def mark(self) -> tuple[int, int, int]:
        """Return a mark to `rollback` to."""
        return self.tree.checkpoint(), len(self.parts), len(self.branches)

    def rollback(self, mark: tuple[int, int, int]) -> None:
        """Forget everything added since `mark`."""
        segments, parts, branches = mark
        self.tree.rollback(segments)
        for part in self.parts[parts:]:
            del self.part_numbers[part.key]
            self.num_anew -= len(part.tokens)
        del self.parts[parts:], self.branches[branches:], self.numbers[branches:]

    def pack(self) -> Pack:
        """Make the pack of the whole forward."""
        tree = self.tree.table()
        table = _with_parts(tree, self.parts)
        first = table.row_start[len(tree.length) :]
        rows = []
        for branch in self.branches:
            anew = [np.arange(len(self.parts[n].tokens)) + first[n] for n in branch.parts] or [branch.on_tree]
            rows.append(np.concatenate(anew)[-len(branch.query.targets) :])
        positions = [np.arange(part.start, part.start + len(part.tokens)) for part in self.parts]
        targets = np.concatenate([branch.query.targets for branch in self.branches])
        return Pack(
            input_ids=np.concatenate([self.tree.input_ids(), *(part.tokens for part in self.parts)]),
            position_ids=np.concatenate([tree.positions(), *positions]),
            table=table,
            rows=np.concatenate(rows).astype(np.int64),
            targets=targets,
            num_tempered=0,
            query_index=np.arange(len(targets)),
            bundles=range(0),  # `numbers` identifies the queries instead
            tree=self.tree,
        )


def _with_parts(tree: SegmentTable, parts: list[_Part]) -> SegmentTable:
    """Append a segment to `tree` for each of `parts`."""
    length = np.array([len(part.tokens) for part in parts], dtype=np.int32)
    row = tree.num_rows + np.cumsum(length) - length
    seen = [np.where(part.seen < 0, row[part.masked] - 1 - part.seen, part.seen) for part in parts]
    count = np.array([len(rows) for rows in seen], dtype=np.int32)
    start = len(tree.context_rows) + np.cumsum(count) - count
    return SegmentTable(
        row_start=np.concatenate([tree.row_start, row]).astype(np.int32),
        length=np.concatenate([tree.length, length]).astype(np.int32),
        context_start=np.concatenate([tree.context_start, start]).astype(np.int32),
        context_length=np.concatenate([tree.context_length, count]).astype(np.int32),
        context_rows=np.concatenate([tree.context_rows, *seen]).astype(np.int32),
    )


@dataclass(frozen=True)
class _Layout:
    """Builder of trunks from the queries of a plan."""

    plan: ScoringPlan
    first: list[int]  # of each bundle, the first token whose row is computed anew
    hidden: bool

    def trunks(self, budget: int) -> Iterator[_Trunk]:
        """Yield trunks of at most `budget` rows; a completion that exceeds it with its branches gets its own."""
        trunk = _Trunk()
        for i, numbers in enumerate(self.plan.query_numbers):
            if not numbers:
                continue
            mark, begun = trunk.mark(), bool(trunk.numbers)
            self._add(trunk, i, numbers)
            if begun and trunk.num_tokens > budget:
                trunk.rollback(mark)
                yield trunk
                trunk = _Trunk()
                self._add(trunk, i, numbers)
        if trunk.numbers:
            yield trunk

    def halved(self, trunk: _Trunk) -> list[_Trunk]:
        """Split into two, of half of the completions each, or of half of the branches of a single one."""
        return [self._of(numbers) for numbers in halves(trunk.numbers, self.plan.bundle_of.__getitem__)]

    def _of(self, numbers: Sequence[int]) -> _Trunk:
        trunk = _Trunk()
        for i, some in groupby(numbers, self.plan.bundle_of.__getitem__):
            self._add(trunk, i, list(some))
        return trunk

    def _add(self, trunk: _Trunk, bundle: int, numbers: Sequence[int]) -> None:
        asked = {number - self.plan.query_numbers[bundle].start: number for number in numbers}
        trunk.add(self.plan.rows[bundle], self.plan.bundles[bundle], asked, self.first[bundle], self.hidden)
