"""Run layers with a state instead of attention (Mamba, gated delta nets, short convolutions) on a packed tree.

Each piece of a tree between branches runs through the model's own cell from the state at the end of its parent, as
generation continues from a cache.
"""

import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..tree.segment_table import SegmentTable
from .modes import exchanged
from .walk import Model, ModelWalk

_CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")  # "cache" from transformers 5.24 on
_KEEPS_STATE = {"update_conv_state", "update_recurrent_state"}


@dataclass(frozen=True)
class _Piece:
    """Piece of a tree: rows [start, end) of one segment, continued from the state at row `after`, -1 at a root.

    A piece before it of a single row is its `lead`: it is run again, and `after` is the row before it.
    """

    start: int
    end: int
    after: int
    lead: int | None = None

    @property
    def num_run(self) -> int:
        return self.end - self.start + (self.lead is not None)

    def rows(self, hidden_states: Tensor) -> Tensor:
        own = hidden_states[:, self.start : self.end]
        return own if self.lead is None else torch.cat([hidden_states[:, self.lead : self.lead + 1], own], dim=1)

    def own(self, out: Tensor) -> Tensor:  # which also covers the lead and padding
        return out[:, self.num_run - (self.end - self.start) : self.num_run]


@dataclass
class _State:
    """State that a cell carries from token to token, with the methods of transformers' cache that cells call."""

    conv_states: dict[int, Tensor] = field(default_factory=dict)
    recurrent_states: dict[int, Tensor] = field(default_factory=dict)
    record_past: ClassVar[bool] = True  # so that at a root of one token a convolution runs its code for several tokens

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv_states.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent_states.get(state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.conv_states or self.recurrent_states)

    @property
    def layers(self) -> "dict[int, _State]":
        """Return itself at every index: before transformers 5.21 cells read the fields of their own layer's cache."""
        return defaultdict(lambda: self)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: object
    ) -> Tensor:
        before = self.conv_states.get(state_idx)
        width = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        if before is not None:
            conv_states = torch.cat([before, conv_states], dim=-1)
        elif conv_states.shape[-1] < width:
            conv_states = nn.functional.pad(conv_states, (width - conv_states.shape[-1], 0))
        self.conv_states[state_idx] = conv_states[..., -width:]
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return self.record_past

    def copy(self) -> "_State":  # no cell writes into the tensors of a state
        return _State(dict(self.conv_states), dict(self.recurrent_states))

    @staticmethod
    def stack(states: "list[_State]") -> "_State":
        def joined(columns: list[dict[int, Tensor]]) -> dict[int, Tensor]:
            return {i: torch.cat([column[i] for column in columns]) for i in columns[0]}

        return _State(joined([s.conv_states for s in states]), joined([s.recurrent_states for s in states]))


@dataclass(frozen=True)
class _Schedule:
    """The order in which a tree's pieces run: first those whose state others continue, then the rest in batches."""

    # No cell is given one token and a state: it would run its code for generation, which may write the state in place,
    # have no backward pass on a GPU, or leave out limits that its code for several tokens keeps.
    handed_on: list[_Piece]
    batches: list[list[_Piece]]

    @staticmethod
    def of(table: SegmentTable) -> "_Schedule":
        last_context = table.context_start + table.context_length - 1
        before = table.context_rows[last_context] if len(table.context_rows) else 0
        after = np.where(table.context_length > 0, before, -1)
        cuts = np.unique(after[after >= 0]) + 1  # rows that begin a piece because a branch leaves before them
        pieces: dict[int, _Piece] = {}  # by their last row
        for start, length, before in zip(table.row_start.tolist(), table.length.tolist(), after.tolist(), strict=True):
            inside = cuts[(cuts > start) & (cuts < start + length)].tolist()
            edges = [start, *inside, start + length]
            for a, b in itertools.pairwise(edges):
                piece = _Piece(a, b, before if a == start else a - 1)
                earlier = pieces.get(piece.after)
                if earlier is not None and earlier.after >= 0 and earlier.num_run == 1:
                    piece = _Piece(a, b, earlier.after, lead=earlier.start)
                pieces[b - 1] = piece
        continued = {piece.after for piece in pieces.values()}
        handed_on = [piece for last, piece in pieces.items() if last in continued]
        ends = [piece for last, piece in pieces.items() if last not in continued]
        return _Schedule(handed_on, _batches(ends))


def _batches(pieces: list[_Piece]) -> list[list[_Piece]]:
    """Batch pieces of similar length, so that padding is less than half of a batch."""
    batches, tokens = list[list[_Piece]](), 0
    for piece in sorted(pieces, key=lambda piece: (piece.after < 0, piece.num_run)):
        length, root = piece.num_run, piece.after < 0  # a root has no state to stack
        if not batches or root or length * (len(batches[-1]) + 1) > 1.5 * (tokens + length):
            batches.append([])
            tokens = 0
        batches[-1].append(piece)
        tokens += length
    return batches


def tree_states(
    walk: ModelWalk, table: SegmentTable, *, inside: nn.Module | None = None
) -> AbstractContextManager[None]:
    """Run every cell of a model, or of a module `inside` it, on the pieces of the packed tree of `table`."""
    cells = _cells(walk)
    if inside is not None and cells:
        own = {*inside.modules()}
        cells = [(cell, name) for cell, name in cells if cell in own]
    if not cells:
        return nullcontext()
    schedule = _Schedule.of(table)
    return exchanged((cell, {"forward": _on_tree(cell.forward, name, schedule)}) for cell, name in cells)


def has_cells(model: Model) -> bool:
    """Whether `model` has layers that carry a state."""
    return bool(_cells(ModelWalk.of(model)))


def _cells(walk: ModelWalk) -> list[tuple[nn.Module, str]]:
    if "cells" not in walk.kept:
        named = {kind: name for kind in walk.by_class if (name := _cache_argument(kind))}
        walk.kept["cells"] = [(cell, name) for kind, name in named.items() for cell in walk.by_class[kind]]
    return walk.kept["cells"]  # type: ignore[no-any-return]


def _cache_argument(kind: type[nn.Module]) -> str | None:
    """Return the argument that passes a state to modules of a class, if they are cells that keep one."""
    outer = inspect.unwrap(kind.forward)
    if not inspect.isfunction(outer):
        return None
    decorated = [cell.cell_contents for cell in outer.__closure__ or ()]  # transformers 5.15 sets no `__wrapped__`
    for each in (outer, *(inspect.unwrap(inner) for inner in decorated if inspect.isfunction(inner))):
        if _KEEPS_STATE & set(each.__code__.co_names):
            return next((name for name in _CACHE_ARGUMENTS if name in inspect.signature(each).parameters), None)
    return None


def _on_tree(forward: Callable[..., Any], cache_argument: str, schedule: _Schedule) -> Callable[..., Tensor]:
    def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if "attention_mask" in kwargs:  # every row of a tree counts
            kwargs = {**kwargs, "attention_mask": None}

        def cell(rows: Tensor, state: _State) -> Tensor:
            out = forward(rows, *args, **{**kwargs, cache_argument: state})
            return out[0] if isinstance(out, tuple) else out

        states, outputs = dict[int, _State](), list[tuple[int, Tensor]]()
        for piece in schedule.handed_on:
            state = states[piece.after].copy() if piece.after >= 0 else _State()
            outputs.append((piece.start, piece.own(cell(piece.rows(hidden_states), state))))
            states[piece.end - 1] = state
        for batch in schedule.batches:
            root = batch[0].after < 0
            longest = max(1 if root else 2, *(piece.num_run for piece in batch))  # two: see `_Schedule`
            rows = hidden_states.new_zeros(len(batch), longest, hidden_states.shape[-1])
            for i, piece in enumerate(batch):
                rows[i, : piece.num_run] = piece.rows(hidden_states)[0]
            out = cell(rows, _State() if root else _State.stack([states[piece.after] for piece in batch]))
            outputs += [(piece.start, piece.own(out[i : i + 1])) for i, piece in enumerate(batch)]
        return torch.cat([out for _, out in sorted(outputs, key=lambda pair: pair[0])], dim=1)

    return run
