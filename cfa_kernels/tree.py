"""Packing token sequences into shared-prefix trees: what is common is laid out, and computed, once.

Every sequence to score, a completion or one of its masked branches, is inserted into a radix tree. Equal
prompts, equal completions, equal branches and any longer common prefix are then shared by construction, and each
sequence adds one segment: the part of it that no earlier sequence had.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .ops.segment_table import SegmentTable


@dataclass(frozen=True)
class Query:
    """One sequence to feed and the targets whose log-probs are wanted along it.

    `targets[i]` is the token predicted at position `first + i`; `tokens` ends at or after the last such
    position, so the last target itself need not be fed. `tempered` asks for log-probs at the sampling temperature
    instead of at 1. `divergence` asks for one number instead: how far the outcome over the rows of those positions is
    from that of the row's first such query (`outcomes.py`).
    """

    tokens: np.ndarray  # (L,) int64
    first: int
    targets: np.ndarray  # (A,) int64
    tempered: bool = False
    beyond: np.ndarray | None = None  # tokens that may be fed after these, where a model needs a longer sequence
    divergence: bool = False

    @property
    def num_values(self) -> int:
        """How many numbers are read for it."""
        return 1 if self.divergence else len(self.targets)

    @property
    def length(self) -> int:
        """Tokens of the whole sequence, with those beyond."""
        return len(self.tokens) + (0 if self.beyond is None else len(self.beyond))

    def fed_to(self, length: int) -> "Query":
        """The same, fed up to `length` tokens at least, as far as there are some."""
        if length <= len(self.tokens) or self.beyond is None:
            return self
        missing = self.beyond[: length - len(self.tokens)]
        return replace(self, tokens=np.concatenate([self.tokens, missing]), beyond=None)

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.first + len(self.targets) <= len(self.tokens):
            raise ValueError(
                f"targets at positions [{self.first}, {self.first + len(self.targets)}) do not lie on a sequence "
                f"of {len(self.tokens)} tokens"
            )


@dataclass(frozen=True)
class Pack:
    """One packed forward: N rows to feed, R of them with a target for the head, and where each query's are."""

    input_ids: np.ndarray  # (N,) int64
    position_ids: np.ndarray  # (N,) int64
    table: SegmentTable
    rows: np.ndarray  # (R,) int64: rows whose hidden state the head needs, no (row, target, tempered) twice
    targets: np.ndarray  # (R,) int64
    num_tempered: int  # the last so many of the R are wanted at the sampling temperature
    query_index: np.ndarray  # (sum A,) int64: into rows / targets, the pack's queries one after the other
    units: range  # the units this pack covers
    tree: "PrefixTree" = field(repr=False)  # that of all its rows
    first_row: int = 0  # of the rows fed: those before it were fed by the pack that this one continues

    @property
    def num_tokens(self) -> int:
        """Rows fed."""
        return len(self.input_ids)

    def moved(self, shift: int) -> "Pack":
        """The same pack of units that are numbered `shift` higher."""
        return replace(self, units=range(self.units.start + shift, self.units.stop + shift))


@dataclass
class _Segment:
    tokens: np.ndarray  # own tokens
    start: int  # position of the first of them
    row: int  # packed row of the first of them
    path: np.ndarray  # packed row of every position from 0 to the segment's end
    has_children: bool = False


class PrefixTree:
    """A radix tree whose segments are the rows of one packed sequence, in order of insertion."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._branches: dict[tuple[int, int, int], int] = {}  # (segment, position, token) -> segment
        self._parents: list[int] = []
        self.num_tokens = 0

    def insert(self, tokens: np.ndarray) -> np.ndarray:
        """Add a sequence; return the packed row of each of its tokens, shared ones included, (L,) int32."""
        current, depth = self._branches.get((-1, 0, int(tokens[0])), -1), 0
        while current >= 0:
            segment = self._segments[current]
            depth += _common_prefix(tokens[depth:], segment.tokens[depth - segment.start :])
            if depth == len(tokens):
                return segment.path[:depth]
            child = self._branches.get((current, depth, int(tokens[depth])), -1)
            if child < 0:
                break
            current = child
        return self._append(current, depth, tokens)

    def _append(self, parent: int, start: int, tokens: np.ndarray) -> np.ndarray:
        own = tokens[start:]
        rows = np.arange(self.num_tokens, self.num_tokens + len(own), dtype=np.int32)
        path = rows
        if parent >= 0:
            self._segments[parent].has_children = True
            path = np.concatenate([self._segments[parent].path[:start], rows])
        self._branches[parent, start, int(own[0])] = len(self._segments)
        self._segments.append(_Segment(own, start, self.num_tokens, path))
        self._parents.append(parent)
        self.num_tokens += len(own)
        return path

    def insert_within(self, queries: Sequence[Query], most: int | None) -> list[np.ndarray] | None:
        """Add the sequences of all `queries`, or of none, and return None, if that makes more than `most` rows."""
        mark, rows_of = self.checkpoint(), []
        for query in queries:
            rows_of.append(self.insert(query.tokens))
            if most is not None and self.num_tokens > most:
                self.rollback(mark)
                return None
        return rows_of

    def find(self, tokens: np.ndarray) -> np.ndarray | None:
        """The packed rows of a sequence that is in the tree as a whole; None for another."""
        mark = self.checkpoint()
        rows = self.insert(tokens)
        if self.checkpoint() == mark:
            return rows
        self.rollback(mark)
        return None

    def checkpoint(self) -> int:
        """A mark to `rollback` to."""
        return len(self._segments)

    def rollback(self, mark: int) -> None:
        """Forget every segment added since `mark`."""
        while len(self._segments) > mark:
            segment, parent = self._segments.pop(), self._parents.pop()
            del self._branches[parent, segment.start, int(segment.tokens[0])]
            self.num_tokens = segment.row

    def input_ids(self) -> np.ndarray:
        """(N,) int64 tokens in packed order."""
        return np.concatenate([segment.tokens for segment in self._segments])

    def table(self) -> SegmentTable:
        """The segments with their contexts; a path is stored once for all that branch off it."""
        stored: dict[int, int] = {}
        paths, size = [], 0
        for i, segment in enumerate(self._segments):
            if segment.has_children:
                stored[i] = size
                paths.append(segment.path)
                size += len(segment.path)
        return SegmentTable(
            row_start=_int32([segment.row for segment in self._segments]),
            length=_int32([len(segment.tokens) for segment in self._segments]),
            context_start=_int32([stored.get(parent, 0) for parent in self._parents]),
            context_length=_int32([segment.start for segment in self._segments]),
            context_rows=np.concatenate(paths) if paths else np.zeros(0, np.int32),
        )


def _int32(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences share that begin with the same one."""
    n = min(len(a), len(b))
    return int((a[:n] != b[:n]).argmax()) or n


def pack_units(units: Sequence[Sequence[Query]], token_budget: int) -> list[Pack]:
    """Cut `units` into packs of at most `token_budget` fed tokens each, in order.

    A unit is what must be scored together: a completion and its masked branches. A unit that alone is over the
    budget gets a pack of its own. Neighbours in `units` share what they have in common, so put completions of
    one prompt side by side. An empty unit costs nothing.

    Raises `ValueError` for a token budget below one.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, got {token_budget}")
    packs = []
    for covered, laid in _cut(units, token_budget):
        queries = [query for i in covered for query in units[i]]
        if laid is None:
            tree = PrefixTree()
            laid = tree, [tree.insert(query.tokens) for query in queries]
        packs.append(_finish(*laid, queries, covered))
    return packs


def _cut(
    units: Sequence[Sequence[Query]], token_budget: int
) -> Iterator[tuple[range, tuple[PrefixTree, list[np.ndarray]] | None]]:
    """Neighbouring units that fit in a pack, with their tree and rows; one that alone does not fit, with None."""
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, got {token_budget}")
    tree, rows_of, start = PrefixTree(), list[np.ndarray](), 0
    for i, unit in enumerate(units):
        rows = tree.insert_within(unit, token_budget)
        if rows is None and tree.num_tokens:
            yield range(start, i), (tree, rows_of)
            tree, rows_of, start = PrefixTree(), [], i
            rows = tree.insert_within(unit, token_budget)
        if rows is None:
            yield range(start, i + 1), None
            start = i + 1
        else:
            rows_of += rows
    if tree.num_tokens:
        yield range(start, len(units)), (tree, rows_of)


@dataclass(frozen=True)
class Chain:
    """A pack, and the packs that continue its rows where a unit has more of them than fit.

    Queries are known by their numbers in a list that all chains share.
    """

    pack: Pack
    units: list[list[int]]  # the queries of each of its units
    asked: list[int]  # the queries that `pack` answers, in its order
    left: list[int]  # those of the packs that continue it
    token_budget: int  # of each of these

    def packs(self, queries: Sequence[Query]) -> Iterator[tuple[Pack, list[int]]]:
        """Every pack with the numbers of its queries, in order."""
        yield self.pack, self.asked
        for pack in continue_pack(self.pack, [queries[n] for n in self.left], self.token_budget):
            yield pack, [self.left[i] for i in pack.units]


def chain_units(
    queries: Sequence[Query],
    units: Sequence[Sequence[int]],
    token_budget: int,
    *,
    continues: bool = True,
    most_rows: int | None = None,
) -> Iterator[Chain]:
    """Cut units of queries, given by number, into chains of packs of at most `token_budget` fed tokens each, in order.

    Units share packs as in `pack_units`. One that alone is over the budget is split: its longest sequence is fed
    first, and what leaves that one goes into packs that continue its rows, `most_rows` together with those at most, so
    nothing is fed twice. Without `continues` each of its packs feeds what they have in common again. A sequence that
    alone is over the budget gets a pack of its own. Queries are answered in their order, those that lie on a unit's
    longest sequence first. Each chain is made when it is asked for: while a device runs the one before.
    """
    for covered, laid in _cut([[queries[n] for n in unit] for unit in units], token_budget):
        inside = [list(units[i]) for i in covered]
        numbers = [n for unit in inside for n in unit]
        if laid is not None:
            yield Chain(_finish(*laid, [queries[n] for n in numbers], covered), inside, numbers, [], 0)
        elif continues:
            yield _trunk(queries, numbers, inside, covered, token_budget, most_rows)
        else:
            for pack in pack_units([[queries[n]] for n in numbers], token_budget):
                some = [numbers[i] for i in pack.units]
                yield Chain(pack, [some], some, [], 0)


def _trunk(
    queries: Sequence[Query],
    numbers: list[int],
    units: list[list[int]],
    covered: range,
    token_budget: int,
    most_rows: int | None,
) -> Chain:
    """A chain that begins with the longest of some queries, and with all that lie on it."""
    tree = PrefixTree()
    longest = max(numbers, key=lambda n: len(queries[n].tokens))
    tree.insert(queries[longest].tokens)
    on_it = {n: rows for n in numbers if (rows := tree.find(queries[n].tokens)) is not None}
    pack = _finish(tree, list(on_it.values()), [queries[n] for n in on_it], covered)
    if most_rows is not None:
        token_budget = max(min(token_budget, most_rows - pack.num_tokens), 1)
    return Chain(pack, units, list(on_it), [n for n in numbers if n not in on_it], token_budget)


def continue_pack(pack: Pack, queries: Sequence[Query], token_budget: int) -> Iterator[Pack]:
    """Packs of branches alone: `queries` that continue rows which `pack` fed, at most `token_budget` new rows each.

    A query that is over the budget by itself gets a pack of its own. `units` of the result counts queries. Each pack
    is laid out when it is asked for.
    """
    start, tree = 0, pack.tree
    mark, fed = tree.checkpoint(), tree.num_tokens
    while start < len(queries):
        rows_of, stop = list[np.ndarray](), start
        while stop < len(queries):
            rows = tree.insert_within(queries[stop : stop + 1], fed + token_budget if rows_of else None)
            if rows is None:
                break
            rows_of += rows
            stop += 1
        continued = _finish(tree, rows_of, queries[start:stop], range(start, stop), fed)
        tree.rollback(mark)
        yield continued
        start = stop


def _finish(
    tree: PrefixTree, rows_of: list[np.ndarray], queries: Sequence[Query], covered: range, first_row: int = 0
) -> Pack:
    wanted = [rows[q.first : q.first + len(q.targets)] for rows, q in zip(rows_of, queries, strict=True)]
    rows = np.concatenate(wanted).astype(np.int64)
    targets = np.concatenate([query.targets for query in queries])
    tempered = np.repeat([query.tempered for query in queries], [len(query.targets) for query in queries])
    # Two queries that ask the same row for the same token share one head row; tempered ones come last.
    num_ids = int(targets.max(initial=0)) + 1
    key = (tempered * np.int64(tree.num_tokens) + rows) * num_ids + targets
    _, asked, index = np.unique(key, return_index=True, return_inverse=True)
    table = tree.table()
    return Pack(
        input_ids=tree.input_ids()[first_row:],
        position_ids=table.positions()[first_row:],
        table=table,
        rows=rows[asked],
        targets=targets[asked],
        num_tempered=int(tempered[asked].sum()),
        query_index=index,
        units=covered,
        tree=tree,
        first_row=first_row,
    )
