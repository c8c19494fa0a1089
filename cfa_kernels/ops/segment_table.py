"""Which rows of a packed sequence attend to which: the description that attention over a packed tree works by.

`tree.py` builds it from token sequences, `tree_attention.py` reads it.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class SegmentTable:
    """Which rows each segment of a packed sequence of N rows attends to.

    Segments follow one another without gaps. Segment s owns `length[s]` rows from `row_start[s]` on. Its
    context is `context_rows[context_start[s] : context_start[s] + context_length[s]]`: the packed row that
    holds each position 0, 1, ... before the segment. So the segment's first row has position
    `context_length[s]`, and segments that branch off one path can point into one stored copy of that path.

    All fields are 1-D int32 numpy arrays. Raises `ValueError` for tables that are not as described.
    """

    row_start: np.ndarray  # (S,)
    length: np.ndarray  # (S,)
    context_start: np.ndarray  # (S,)
    context_length: np.ndarray  # (S,)
    context_rows: np.ndarray  # (C,)
    _on_device: dict = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
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
        if (self.context_start < 0).any() or (self.context_length < 0).any() or stop.max() > len(self.context_rows):
            raise ValueError("context_start and context_length must lie inside context_rows")
        newest = np.maximum.accumulate(self.context_rows) if len(self.context_rows) else self.context_rows
        for s in np.flatnonzero(self.context_length):
            # A cheap bound first; the exact look only where earlier paths in the store could fool it.
            if newest[stop[s] - 1] >= self.row_start[s]:
                rows = self.context_rows[self.context_start[s] : stop[s]]
                if rows.max() >= self.row_start[s]:
                    raise ValueError(f"segment {s}: its context holds row {rows.max()}, at or after its own first row")
        if len(self.context_rows) and self.context_rows.min() < 0:
            raise ValueError(f"context_rows must not be negative, got {self.context_rows.min()}")

    @property
    def num_rows(self) -> int:
        """N, the rows of the packed sequence."""
        return int(self.row_start[-1] + self.length[-1])

    @property
    def longest(self) -> int:
        """Rows of the longest path: one more than the last position."""
        return int((self.context_length + self.length).max())

    def positions(self) -> np.ndarray:
        """Position of every packed row, (N,) int64."""
        shift = np.repeat(self.context_length.astype(np.int64) - self.row_start, self.length)
        return np.arange(self.num_rows, dtype=np.int64) + shift

    def visible_pairs(self) -> int:
        """Number of (query row, key row) pairs that attention visits, without a sliding window."""
        length = self.length.astype(np.int64)
        return int((length * self.context_length + length * (length + 1) // 2).sum())

    def work_list(self, tokens_per_tile: int, first_row: int = 0) -> np.ndarray:
        """(W, 2) int32: segment and first token of every query tile, those with most keys first.

        Segments that start before `first_row` have none.
        """
        tiles = np.where(self.row_start < first_row, 0, -(-self.length // tokens_per_tile))
        segment = np.repeat(np.arange(len(self.length), dtype=np.int32), tiles)
        ordinal = np.arange(len(segment)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        first = (ordinal * tokens_per_tile).astype(np.int32)
        keys = self.context_length[segment] + first
        order = np.argsort(-keys, kind="stable")
        return np.stack([segment[order], first[order]], axis=1)

    def on_device(
        self, device: torch.device, tokens_per_tile: int, first_row: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`(work list (W, 2), segments (S, 4), context_rows (C,))` on `device`, copied once and kept.

        The work list is of segments from `first_row` on. A segment's four numbers are row_start, length,
        context_start, context_length.
        """
        key = (device, tokens_per_tile, first_row)
        if key not in self._on_device:
            parts = [
                self.work_list(tokens_per_tile, first_row),
                np.stack([self.row_start, self.length, self.context_start, self.context_length], axis=1),
                self.context_rows,
            ]
            # Each starts at a multiple of 16 bytes, by which Triton specialises kernels.
            flat = [np.pad(part.reshape(-1), (0, -part.size % 4)) for part in parts]
            packed = torch.from_numpy(np.concatenate(flat))
            if device.type == "cuda":
                packed = packed.pin_memory()
            split = packed.to(device, non_blocking=True).split([len(part) for part in flat])
            work, segments, rows = (x[: part.size] for x, part in zip(split, parts, strict=True))
            self._on_device[key] = (work.view(-1, 2), segments.view(-1, 4), rows)
        return self._on_device[key]
