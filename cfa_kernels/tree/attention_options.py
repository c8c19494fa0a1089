"""Options of tree attention, as the tables, the reference and the kernels read them."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

LAST_POSITION = torch.iinfo(torch.int32).max


class Reach(NamedTuple):
    """Reach of rows: everything (both None), fewer than `window` positions, or their own `chunk` of them."""

    window: int | None = None
    chunk: int | None = None

    @property
    def span(self) -> int:
        """Positions of the window or of a chunk, 0 if there is neither."""
        return min(self.window or self.chunk or 0, LAST_POSITION)

    def oldest_visible(self, position: Tensor) -> Tensor:
        """Return the first key position that rows at `position` see."""
        if self.window is not None:
            return (position - self.window + 1).clamp(min=0)
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return torch.zeros_like(position)

    def last_reader(self, key: np.ndarray) -> np.ndarray:
        """Return the last position, int64, from which rows see the keys at positions `key`."""
        last = np.full(key.shape, LAST_POSITION, dtype=np.int64)
        if self.window is not None:
            last = key + np.int64(self.span - 1)
        if self.chunk is not None:
            last = key // self.span * np.int64(self.span) + self.span - 1
        return np.minimum(last, LAST_POSITION)


EVERYTHING = Reach()


@dataclass(frozen=True, eq=False)
class AttentionRule:
    """Options of `tree_attention`; raises `ValueError` for a value out of range, naming the option."""

    scale: float
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("scale", "softcap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        for name in ("sliding_window", "attention_chunk_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.sliding_window is not None and self.attention_chunk_size is not None:
            raise ValueError(
                f"sliding_window {self.sliding_window} and attention_chunk_size {self.attention_chunk_size} "
                "exclude each other; give one of them"
            )

    @cached_property
    def reach(self) -> Reach:
        """Reach of the rows."""
        return Reach(self.sliding_window, self.attention_chunk_size)

    @cached_property
    def kinds(self) -> "RuleKinds":
        """Say which options there are."""
        given = (self.sliding_window, self.attention_chunk_size, self.softcap, self.sinks)
        return RuleKinds(*(value is not None for value in given))


class RuleKinds(NamedTuple):
    """Options that an `AttentionRule` has, as far as they choose a kernel's build."""

    window: bool = False
    chunk: bool = False
    softcap: bool = False
    sinks: bool = False
