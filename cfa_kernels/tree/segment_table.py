"""Describe which rows of a packed sequence attend to which, in tables that tree attention reads.

`tree/prefix_tree.py` builds them from token sequences.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple
from uuid import uuid4
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from ..ops.upload import stream_of, upload
from .attention_options import EVERYTHING, Reach


class KeyReaders(NamedTuple):
    """For each segment, the rows of *other* segments that attend to it: entries `start[s] <= e < start[s + 1]`.

    Sorted by descending limit, then position, then row, so that without a reach all readers of a key row form a prefix.
    """

    start: np.ndarray  # (S + 1,) int64
    row: np.ndarray  # (E,) int32, packed
    limit: np.ndarray  # (E,) int32: how many first rows of the segment its context holds
    position: np.ndarray  # (E,) int32


def _new_handle() -> Tensor:
    return torch.frombuffer(bytearray(uuid4().bytes), dtype=torch.int64)


@dataclass(frozen=True)
class SegmentTable:
    """Table of the rows that each segment of a packed sequence of N rows attends to; int32 arrays.

    Segment s owns `length[s]` rows from `row_start[s]` on, without gaps. Its context is
    `context_rows[context_start[s] : context_start[s] + context_length[s]]`: the packed row of each position before
    the segment, whose first row thus has position `context_length[s]`. Segments that branch off one path can point
    into one stored copy of that path. Raises `ValueError` for tables that are not as described.
    """

    row_start: np.ndarray  # (S,)
    length: np.ndarray  # (S,)
    context_start: np.ndarray  # (S,)
    context_length: np.ndarray  # (S,)
    context_rows: np.ndarray  # (C,)
    handle: Tensor = field(
        default_factory=_new_handle, repr=False, compare=False
    )  # (2,) int64, unique in all processes
    num_rows: int = field(init=False, repr=False, compare=False)  # N, the rows of the packed sequence
    segments: Tensor = field(init=False, repr=False, compare=False)  # (4 S,) int32 on the CPU: the first four fields
    contexts: Tensor = field(init=False, repr=False, compare=False)  # context_rows on the CPU, at least two entries
    _on_device: dict = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check()
        fields = [self.row_start, self.length, self.context_start, self.context_length]
        object.__setattr__(self, "num_rows", int(self.row_start[-1] + self.length[-1]))
        # No tensor has a size of 0 or 1, for which torch.compile would make another graph.
        unread = np.zeros(max(2 - len(self.context_rows), 0), np.int32)
        object.__setattr__(self, "segments", torch.from_numpy(np.stack(fields, axis=1).reshape(-1)))
        object.__setattr__(self, "contexts", torch.from_numpy(np.concatenate([self.context_rows, unread])))
        _ALIVE[tuple(self.handle.tolist())] = self

    @classmethod
    def of(cls, handle: Tensor, segments: Tensor, contexts: Tensor) -> "SegmentTable":
        """Find the table with this `handle`, or make one of `segments` and `contexts` if it no longer lives."""
        # Operators take these tensors, or copies of them, in the table's place.
        table = _ALIVE.get(tuple(handle.tolist()))
        if table is not None:
            return table
        row_start, length, context_start, context_length = np.ascontiguousarray(segments.numpy().reshape(-1, 4).T)
        _REBUILT.append(cls(row_start, length, context_start, context_length, contexts.numpy(), handle))
        return _REBUILT[-1]

    def _check(self) -> None:
        for name in ("row_start", "length", "context_start", "context_length", "context_rows"):
            array = getattr(self, name)
            if array.dtype != np.int32 or array.ndim != 1:
                raise ValueError(f"{name} must be a 1-D int32 array, got {array.dtype} of shape {array.shape}")
        ends = np.cumsum(self.length, dtype=np.int64)
        if len(self.length) == 0 or (self.length < 1).any():
            raise ValueError(f"length must hold at least one segment, none empty, got {self.length.tolist()}")
        if not np.array_equal(self.row_start, ends - self.length):
            raise ValueError("row_start must place segments one after the other from row 0")
        stop = self.context_start.astype(np.int64) + self.context_length
        outside = (self.context_start < 0) | (self.context_length < 0) | (stop > len(self.context_rows))
        if outside.any():
            s = int(outside.argmax())
            raise ValueError(
                f"context_start and context_length must be inside the {len(self.context_rows)} context_rows, "
                f"got {self.context_start[s]} and {self.context_length[s]} for segment {s}"
            )
        newest = np.maximum.accumulate(self.context_rows) if len(self.context_rows) else self.context_rows
        # A cheap bound first; the exact look only where earlier paths in the store could fool it.
        some = np.flatnonzero(self.context_length)
        for s in some[newest[stop[some] - 1] >= self.row_start[some]].tolist():
            rows = self.context_rows[self.context_start[s] : stop[s]]
            if rows.max() >= self.row_start[s]:
                raise ValueError(f"segment {s}: its context holds row {rows.max()}, at or after its own first row")
        if len(self.context_rows) and self.context_rows.min() < 0:
            raise ValueError(f"context_rows must not be negative, got {self.context_rows.min()}")

    def require_start(self, row: int) -> None:
        """Raise `ValueError` unless a segment starts at packed row `row`."""
        if row and row not in self.row_start:
            segment = int(np.searchsorted(self.row_start, row, side="right")) - 1
            raise ValueError(
                f"first_query_row must be the first row of a segment, but row {row} is inside segment {segment}"
            )

    def positions(self) -> np.ndarray:
        """Return the position of every packed row, (N,) int64."""
        shift = np.repeat(self.context_length.astype(np.int64) - self.row_start, self.length)
        return np.arange(self.num_rows, dtype=np.int64) + shift

    def visible_pairs(self, reach: Reach = EVERYTHING) -> int:
        """Count the (query row, key row) pairs that see each other."""
        position = torch.from_numpy(self.positions())
        return int((position + 1 - reach.oldest_visible(position)).sum())

    def work_list(self, tokens_per_tile: int, first_row: int = 0) -> np.ndarray:
        """Return (W, 5) int32: a row of `segments` and the first token of every query tile, those with most keys first.

        Segments that start before `first_row` have none.
        """
        tiles = np.where(self.row_start < first_row, 0, -(-self.length // tokens_per_tile))
        segment, ordinal = _numbered(tiles)
        first = (ordinal * tokens_per_tile).astype(np.int32)
        keys = self.context_length[segment] + first
        order = np.argsort(-keys, kind="stable")
        return np.column_stack([self.segments.numpy().reshape(-1, 4)[segment], first])[order]

    def on_device(self, device: torch.device, tokens_per_tile: int, first_row: int = 0) -> tuple[Tensor, Tensor]:
        """Return `(work_list (W, 5), context_rows (C,))` on `device`, copied once a stream and kept."""
        key = (device, stream_of(device), tokens_per_tile, first_row)
        if key not in self._on_device:
            self._on_device[key] = upload([self.work_list(tokens_per_tile, first_row), self.context_rows], device)
        return self._on_device[key]

    @cached_property
    def lineage(self) -> np.ndarray:
        """(3, L) int64: descendant, ancestor and how many of the ancestor's rows the descendant's context holds.

        By ancestor, then with the most such rows first, then by descendant. Raises `ValueError` for a context that
        is not made of the first rows of earlier segments, in order and each at its own position.
        """
        links = [np.zeros((3, 0), np.int64)]
        for start in np.unique(self.context_start[self.context_length > 0]):
            descendants = np.flatnonzero((self.context_start == start) & (self.context_length > 0))
            held = self.context_length[descendants].astype(np.int64)
            rows = self.context_rows[start : start + held.max()]
            segment = np.searchsorted(self.row_start, rows, side="right") - 1
            begin = np.flatnonzero(np.diff(segment, prepend=-1))
            position = self.row_start[segment] + np.arange(len(rows)) - self.context_length[segment]
            wrong = np.flatnonzero(rows != position)
            if len(wrong):
                who = descendants[held.argmax()]
                raise ValueError(
                    f"segment {who}: its context holds row {rows[wrong[0]]} at position {wrong[0]}; gradients need "
                    "contexts made of the first rows of earlier segments, in order and at their own positions"
                )
            cut = np.minimum(np.append(begin[1:], len(rows)), held[:, None]) - begin
            who, run = np.nonzero(cut > 0)
            links.append(np.stack([descendants[who], segment[begin[run]], cut[who, run]]))
        lineage = np.concatenate(links, axis=1)
        return lineage[:, np.lexsort((lineage[0], -lineage[2], lineage[1]))]

    def readers(self, reach: Reach = EVERYTHING) -> KeyReaders:
        """List the rows of other segments that see rows of each segment."""
        descendant, ancestor, cut = self.lineage
        last = reach.last_reader(self.context_length[ancestor] + cut - 1)
        count = np.clip(last - self.context_length[descendant] + 1, 0, self.length[descendant])
        link, token = _numbered(count)
        position = self.context_length[descendant[link]] + token
        order = np.argsort((_ordinal(ancestor, cut)[link] << 32) + position, kind="stable")
        link, token = link[order], token[order]
        return KeyReaders(
            start=np.searchsorted(ancestor[link], np.arange(len(self.length) + 1)),
            row=(self.row_start[descendant[link]] + token).astype(np.int32),
            limit=cut[link].astype(np.int32),
            position=position[order].astype(np.int32),
        )

    def key_tiles(self, keys_per_tile: int, readers: KeyReaders, reach: Reach = EVERYTHING) -> np.ndarray:
        """Return (T, 6) int64: tiles of keys of one segment each, and the rows that see any of them.

        Columns: segment, the first row's ordinal there, number of rows; how many rows of the segment from that one on
        see some of them; where the segment's list of readers starts, and how many of it to look at.
        """
        tiles = -(-self.length // keys_per_tile)
        segment, ordinal = _numbered(tiles)
        first = ordinal * keys_per_tile
        keys = np.minimum(self.length[segment] - first, keys_per_tile)
        before = self.context_length[segment].astype(np.int64)
        own = np.minimum(reach.last_reader(before + first + keys - 1) - before + 1, self.length[segment]) - first
        # Readers of one segment that see as much of it form a class, in which they go by position. A tile looks at the
        # list up to the last reader, in any class, within reach of the last of its keys that the class sees.
        owner, _ = _numbered(np.diff(readers.start))
        of_reader = _ordinal(owner, readers.limit)
        place = (of_reader << 32) + readers.position
        begin = np.flatnonzero(np.diff(of_reader, prepend=-1))
        classes = np.searchsorted(owner[begin], np.arange(len(self.length) + 1))
        tile, member = _numbered(np.diff(classes)[segment])
        kind = classes[segment[tile]] + member
        last_key = np.minimum(first[tile] + keys[tile], readers.limit[begin[kind]]) - 1
        stop = np.searchsorted(place, (kind << 32) + reach.last_reader(before[tile] + last_key), side="right")
        seen = (last_key >= first[tile]) & (stop > begin[kind])
        listed = np.zeros(len(segment), np.int64)
        np.maximum.at(listed, tile[seen], (stop - readers.start[segment[tile]])[seen])
        return np.stack([segment, first, keys, own, readers.start[segment], listed], axis=1)

    def key_work(
        self, keys_per_tile: int, queries_per_program: int, reach: Reach = EVERYTHING, most_parts: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return `(work (W, 9), splits (R, 4), readers (3, E))`, int32, for the gradients of keys and values.

        A tile's queries are its `own` rows, then its readers. An entry of `work` is a tile and some of its queries, so
        many, or twice, four times ... as many to make at most `most_parts` partial sums, the longest first: the tile's
        first packed row, its rows, that row's ordinal in its segment and its position; `own`; the number to add to a
        query for its reader; the first query and their end; their partial sum, or -1 if they are all. Each of `splits`
        is a tile with partial sums: first packed row, rows, first partial sum, number of sums. `readers` are rows,
        limits and positions.
        """
        readers = self.readers(reach)
        segment, first, keys, own, start, listed = self.key_tiles(keys_per_tile, readers, reach).T
        parts = -(-(own + listed) // queries_per_program)
        while most_parts is not None and parts[parts > 1].sum() > most_parts:
            queries_per_program *= 2
            parts = -(-(own + listed) // queries_per_program)
        tile, ordinal = _numbered(parts)
        begin = ordinal * queries_per_program
        end = np.minimum(begin + queries_per_program, (own + listed)[tile])
        split = parts > 1
        slot = np.where(split[tile], np.cumsum(split[tile]) - 1, -1)
        row = self.row_start[segment] + first
        position = self.context_length[segment] + first
        work = np.stack(
            [row[tile], keys[tile], first[tile], position[tile], own[tile], (start - own)[tile], begin, end, slot],
            axis=1,
        )[np.argsort(begin - end, kind="stable")]
        slots = (np.cumsum(parts * split) - parts * split)[split]
        splits = np.stack([row[split], keys[split], slots, parts[split]], axis=1)
        lists = np.stack([readers.row, readers.limit, readers.position])
        return work.astype(np.int32), splits.astype(np.int32), lists

    def key_work_on_device(self, device: torch.device, *options: Any) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return `key_work(*options)` on `device`, copied once a stream and kept, and the number of partial sums."""
        key = (device, stream_of(device), "keys", *options)
        if key not in self._on_device:
            parts = self.key_work(*options)
            self._on_device[key] = (*upload(parts, device), int(parts[1][:, 3].sum()))
        return self._on_device[key]


_ALIVE: WeakValueDictionary[tuple[int, ...], SegmentTable] = WeakValueDictionary()  # tables by their handles
_REBUILT: deque[SegmentTable] = deque(maxlen=4)  # a backward asks layer by layer for what its forward has dropped


def _numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)


def _ordinal(*columns: np.ndarray) -> np.ndarray:
    changed = np.zeros(len(columns[0]), dtype=bool)
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return np.cumsum(changed, dtype=np.int64)
