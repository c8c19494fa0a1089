"""Lay token sequences out as a prefix tree: one packed row for each token, shared where sequences are equal."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from .segment_table import SegmentTable


@dataclass(frozen=True)
class Query:
    """One sequence to feed, and the targets along it whose log-probs are wanted.

    `targets[i]` is the token predicted at position `first + i`; `tokens` ends at or after the last such position, so
    the last target itself need not be fed. `divergence` asks for one number instead: how far the outcome at those
    positions diverges from that of the completion's first such query (`scoring/outcomes.py`).
    """

    tokens: np.ndarray  # (L,) int64
    first: int
    targets: np.ndarray  # (A,) int64
    beyond: np.ndarray | None = None  # tokens that may be fed after `tokens`, where a model needs a longer sequence
    divergence: bool = False
    alone_from: int | None = None  # from this position on, its rows are not shared even with equal ones
    begins: tuple[np.ndarray, int] | None = None  # other tokens, and how many of them it is known to begin with

    @property
    def num_values(self) -> int:
        """Count the numbers that are read for this query."""
        return 1 if self.divergence else len(self.targets)

    @property
    def length(self) -> int:
        """Count the tokens of the whole sequence, `beyond` included."""
        return len(self.tokens) + (0 if self.beyond is None else len(self.beyond))

    def fed_to(self, length: int) -> "Query":
        """Extend what is fed to at least `length` tokens, as far as `beyond` reaches."""
        if length <= len(self.tokens) or self.beyond is None:
            return self
        missing = self.beyond[: length - len(self.tokens)]
        return replace(self, tokens=np.concatenate([self.tokens, missing]), beyond=None)


@dataclass(frozen=True, eq=False)
class Pack:
    """One packed forward: N rows to feed, R logits rows with a target, and the rows of each query."""

    input_ids: np.ndarray  # (N,) int64
    position_ids: np.ndarray  # (N,) int64
    table: SegmentTable
    rows: np.ndarray  # (R,) int64: rows whose hidden state the head needs; each (row, target) is there once
    targets: np.ndarray  # (R,) int64
    query_index: np.ndarray  # (sum A,) int64: index into rows and targets, for the pack's queries one after the other
    queries: list[int]  # the queries that it answers, by their place in what the caller laid out
    tree: "PrefixTree" = field(repr=False)  # tree of all rows, those of the trunk included
    first_row: int = 0  # of the rows fed here: those before were fed by the trunk
    trunk: "Pack | None" = field(default=None, repr=False)  # pack whose rows this one continues

    @property
    def num_tokens(self) -> int:
        """Count the rows fed."""
        return len(self.input_ids)


@dataclass(slots=True)
class _Segment:
    parent: int  # number of the segment that it continues, -1 for none
    start: int  # position of its first token
    token: int  # under which it is found there: that token, or a negative number where it is never shared
    tokens: np.ndarray
    row: int  # packed row of its first token
    path: np.ndarray  # packed row of every position from 0 to the segment's end
    has_children: bool = False


class PrefixTree:
    """Radix tree whose segments are the rows of one packed sequence, in order of insertion."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._branches: dict[tuple[int, int, int], int] = {}  # by parent, start and token
        self._ends: dict[int, tuple[np.ndarray, int, int]] = {}  # of `Query.begins` by id, with what `find` gave
        self.num_tokens = 0

    def copy(self) -> "PrefixTree":
        """Copy the tree; later additions to one are not in the other."""
        tree = PrefixTree()
        tree._segments, tree._branches, tree.num_tokens = [*self._segments], {**self._branches}, self.num_tokens
        tree._ends = {**self._ends}
        return tree

    def insert(
        self, tokens: np.ndarray, alone_from: int | None = None, found: tuple[int, int] | None = None
    ) -> np.ndarray:
        """Add a sequence; return the packed row of each of its tokens, shared ones included, (L,) int32.

        From position `alone_from` on, it shares no row with any sequence before or after it. `found` is what `find`
        gives for the tokens before, if a caller has it.
        """
        common = tokens[:alone_from]
        current, depth = self.find(common) if found is None else found
        for own, key in ((common, None), (tokens, -1 - len(self._segments))):
            if depth == len(own):
                continue
            rows = path = np.arange(self.num_tokens, self.num_tokens + len(own) - depth, dtype=np.int32)
            if current >= 0:
                before = self._segments[current]
                before.has_children = True
                path = np.concatenate([before.path[:depth], rows])
            key = own.item(depth) if key is None else key
            self._branches[current, depth, key], number = len(self._segments), len(self._segments)
            self._segments.append(_Segment(current, depth, key, own[depth:], self.num_tokens, path))
            self.num_tokens += len(rows)
            current, depth = number, len(own)
        return self._segments[current].path[: len(tokens)]

    def common_prefix(self, tokens: np.ndarray) -> int:
        """Count the first tokens of a sequence that have a row here already."""
        return self.find(tokens)[1]

    def num_missing(self, query: Query) -> int:
        """Count the rows that `query` by itself would add."""
        return len(query.tokens) - self.find_shared(query)[1]

    def find(self, tokens: np.ndarray, current: int = -1, depth: int = 0) -> tuple[int, int]:
        """Find the segment with the end of the longest prefix of `tokens`, -1 for none, and that prefix's length.

        A prefix of length `depth` is known to end in segment `current`.
        """
        length = len(tokens)
        while depth < length:
            token, place, own = tokens.item(depth), 0, tokens[:0]
            if current >= 0:
                place, own = depth - self._segments[current].start, self._segments[current].tokens
            if place == len(own) or own.item(place) != token:
                child = self._branches.get((current, depth, token), -1)
                if child < 0:
                    break
                current, place, own = child, 0, self._segments[child].tokens
            # No difference is found at 0, where there is none: then all of the shorter one is shared.
            rest = tokens[depth : depth + len(own) - place]
            depth += int((rest != own[place : place + len(rest)]).argmax()) or len(rest)
        return current, depth

    def find_shared(self, query: Query) -> tuple[int, int]:
        """Find as `find` does the tokens of `query` that it may share."""
        common = query.tokens[: query.alone_from]
        if query.begins is None or query.begins[1] > len(common):
            return self.find(common)
        other, count = query.begins
        if id(other) not in self._ends:
            self._ends[id(other)] = other, *self.find(other)
        _, current, depth = self._ends[id(other)]
        depth = min(depth, count)
        while current >= 0 and self._segments[current].start >= depth:
            current = self._segments[current].parent
        return self.find(common, current, depth)

    def insert_within(self, queries: Sequence[Query], most: int) -> list[np.ndarray] | None:
        """Add the sequences of all `queries`; if that makes more than `most` rows, add none and return None."""
        mark, rows_of = len(self._segments), []
        for query in queries:
            rows_of.append(self.insert(query.tokens, query.alone_from, self.find_shared(query)))
            if self.num_tokens > most:
                self.rollback(mark)
                return None
        return rows_of

    def rollback(self, mark: int) -> None:
        """Forget every segment after the first `mark`."""
        while len(self._segments) > mark:
            segment = self._segments.pop()
            del self._branches[segment.parent, segment.start, segment.token]
            self.num_tokens = segment.row
            self._ends.clear()

    def input_ids(self) -> np.ndarray:
        """Return the tokens in packed order, (N,) int64."""
        return np.concatenate([segment.tokens for segment in self._segments])

    def table(self) -> SegmentTable:
        """Tabulate the segments with their contexts; a path is stored once for all branches that leave it."""
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
            context_start=_int32([stored.get(segment.parent, 0) for segment in self._segments]),
            context_length=_int32([segment.start for segment in self._segments]),
            context_rows=np.concatenate(paths) if paths else np.zeros(0, np.int32),
        )


_int32 = partial(np.array, dtype=np.int32)
