"""Approximate masking by computing a few rows anew instead of all rows after a span.

A branch of `score_counterfactuals` feeds everything from the span to the answer. Here the rows between the span and the
last few stay those of the completion as sampled: `short_branches` feeds the masked span and the last rows,
`answer_knockout` only the last rows, which then do not see the span. Both show what the last rows read from the span
itself, and miss what later reasoning carries over from it.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

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
        batch: as in `short_branches`, but nothing replaces a unit. A row always sees itself.
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
    layout, reader = _Layout(plan, first, hidden), OutcomeReader(head)

    def read_trunk(trunk: _Trunk) -> Read:
        pack = trunk.pack([plan.queries[n] for n in trunk.numbers])
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


class _Part(NamedTuple):
    """Rows after the tree, side by side, and what they see before themselves."""

    tokens: np.ndarray
    position: int  # of the first row
    seen: np.ndarray  # rows
    rows: np.ndarray


_ANEW = 1 << 40
"""Number of the first row after a tree, as long as the tree grows; in the pack it follows the tree's last row."""


@dataclass
class _Trunk:
    """Completions of one forward as a tree, and the rows after it that are computed anew, equal ones once."""

    numbers: list[int] = field(default_factory=list)  # numbers of the queries that it answers
    rows: list[np.ndarray] = field(default_factory=list)  # of each, where its targets are predicted
    tree: PrefixTree = field(default_factory=PrefixTree)
    parts: dict[Hashable, _Part] = field(default_factory=dict)  # by what they compute

    @property
    def after(self) -> int:
        """Return the number of the next row after the tree."""
        return int(next(reversed(self.parts.values())).rows[-1]) + 1 if self.parts else _ANEW

    @property
    def num_tokens(self) -> int:
        """Count the rows of the forward."""
        return self.tree.num_tokens + self.after - _ANEW

    def anew(self, tokens: np.ndarray, position: int, seen: np.ndarray) -> np.ndarray:
        """Add rows after the tree, unless there are equal ones; return their numbers."""
        key = tokens.tobytes(), position, seen.tobytes()
        if key not in self.parts:
            self.parts[key] = _Part(tokens, position, seen, np.arange(self.after, self.after + len(tokens)))
        return self.parts[key].rows

    def mark(self) -> tuple[int, int, int]:
        """Return a mark to `rollback` to."""
        return self.tree.checkpoint(), len(self.parts), len(self.numbers)

    def rollback(self, mark: tuple[int, int, int]) -> None:
        """Forget everything added since `mark`."""
        segments, parts, numbers = mark
        self.tree.rollback(segments)
        while len(self.parts) > parts:
            self.parts.popitem()
        del self.rows[numbers:], self.numbers[numbers:]

    def pack(self, queries: Sequence[Query]) -> Pack:
        """Make the pack of the whole forward, which answers `queries` in the order of `numbers`."""
        tree, parts = self.tree.table(), list(self.parts.values())

        def placed(*rows: np.ndarray) -> np.ndarray:
            flat = np.concatenate(rows).astype(np.int64)
            return np.where(flat < _ANEW, flat, flat - _ANEW + tree.num_rows)

        count = np.array([len(part.seen) for part in parts], dtype=np.int32)
        start = len(tree.context_rows) + np.cumsum(count) - count
        table = SegmentTable(
            row_start=placed(tree.row_start, *(part.rows[:1] for part in parts)).astype(np.int32),
            length=np.concatenate([tree.length, [len(part.tokens) for part in parts]]).astype(np.int32),
            context_start=np.concatenate([tree.context_start, start]).astype(np.int32),
            context_length=np.concatenate([tree.context_length, count]),
            context_rows=placed(tree.context_rows, *(part.seen for part in parts)).astype(np.int32),
        )
        targets = np.concatenate([query.targets for query in queries])
        positions = [np.arange(part.position, part.position + len(part.tokens)) for part in parts]
        return Pack(
            input_ids=np.concatenate([self.tree.input_ids(), *(part.tokens for part in parts)]),
            position_ids=np.concatenate([tree.positions(), *positions]),
            table=table,
            rows=placed(*self.rows),
            targets=targets,
            num_tempered=0,
            query_index=np.arange(len(targets)),
            bundles=range(0),  # `numbers` identifies the queries instead
            tree=self.tree,
        )


@dataclass(frozen=True)
class _Layout:
    """Builder of trunks from the queries of a plan."""

    plan: ScoringPlan
    first: list[int]  # of each bundle, the first token whose row is computed anew
    hidden: bool  # whether the rows from there on do not see the span

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
        found = []
        for numbers in halves(trunk.numbers, self.plan.bundle_of.__getitem__):
            found.append(_Trunk())
            for i, some in groupby(numbers, self.plan.bundle_of.__getitem__):
                self._add(found[-1], i, list(some))
        return found

    def _add(self, trunk: _Trunk, i: int, numbers: Sequence[int]) -> None:
        """Lay out a completion as sampled and, after it, the last rows of its branches among the queries `numbers`."""
        row, bundle = self.plan.rows[i], self.plan.bundles[i]
        base, masked = bundle[0], [span for span in row.spans if row.masks_something(span)]
        path = trunk.tree.insert(base.tokens)
        for number in numbers:
            place = number - self.plan.query_numbers[i].start  # 0 as sampled, then a branch for each span
            rows = self._branch(trunk, row, bundle[place], path, masked[place - 1], self.first[i]) if place else path
            trunk.rows.append(rows[-len(base.targets) :])
            trunk.numbers.append(number)

    def _branch(self, trunk: _Trunk, row: Row, query: Query, path: np.ndarray, span: Span, first: int) -> np.ndarray:
        """Add the rows of a masked branch to compute anew: its span's unless hidden, and those from `first` on."""
        shift, length = len(row.prompt), len(path)
        start, stop = shift + span.start, min(shift + span.end, length)
        before, rows = path[:start], [path]
        if not self.hidden:
            rows.append(trunk.anew(query.tokens[start:stop], start, before))
        elif stop > query.first:  # the span's own last row predicts the first target: it sees itself, as sampled
            rows.append(trunk.anew(row.completion[stop - 1 - shift : stop - shift], stop - 1, before))
        own = max(shift + first, stop)
        if own < length:
            inside = rows[-1] if not self.hidden else before[:0]
            rows.append(trunk.anew(query.tokens[own:length], own, np.concatenate([before, inside, path[stop:own]])))
        return np.concatenate(rows)
