"""Choose the units worth masking, estimate importance at no cost, and cut tokens into units."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..span import Span

POSITION_RULES = ("length", "first", "last")
# `share * count` that misses a whole number only by rounding is that number.
_ROUNDING = 1e-9


def top_units(importance: Tensor, share: float) -> list[int]:
    """Find the numbers of the `max(1, floor(share * K))` most important units, ascending, of equal ones the earlier.

    Args:
        importance: (K,) finite, high = matters. K may be 0, which gives no unit.
        share: share of the units, in (0, 1].

    Raises:
        ValueError: a share outside (0, 1]; importances of another shape or not finite, naming unit and value.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}")
    if importance.ndim != 1:
        raise ValueError(f"importance must be (K,), got shape {tuple(importance.shape)}")
    values = importance.tolist()
    for k, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"importance, unit {k}: must be finite, got {value}")
    count = max(1, math.floor(share * len(values) + _ROUNDING))
    return sorted(sorted(range(len(values)), key=lambda k: -values[k])[:count])


def position_estimates(name: str, units: Sequence[Sequence[Span]]) -> list[Tensor]:
    """Estimate importances at no cost: `length` (long units first), `first` or `last` (by position).

    Args:
        name: one of the three.
        units: B lists of K_b spans.

    Returns:
        B tensors (K_b,) fp32, high = matters.

    Raises:
        ValueError: another name.
    """
    rules: dict[str, Callable[[Span], int]] = {
        "length": lambda unit: unit.end - unit.start,
        "first": lambda unit: -unit.start,
        "last": lambda unit: unit.start,
    }
    if name not in rules:
        raise ValueError(f"name must be one of {', '.join(POSITION_RULES)}, got {name!r}")
    return [torch.tensor([float(rules[name](unit)) for unit in row]) for row in units]


def run_units(end: int, length: int, *, start: int = 0) -> list[Span]:
    """Cut tokens `[start, end)` into runs of `length` to be masked as one, the last perhaps shorter: an approximation.

    OAR-P then takes one branch per run instead of one per token, and cannot distinguish tokens within a run.

    Args:
        end: end of the reasoning, usually the answer's marker.
        length: tokens of a unit, at least 1; 1 is exact.
        start: its start.

    Raises:
        ValueError: a length below 1, a start outside [0, end].
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    if not 0 <= start <= end:
        raise ValueError(f"start must be in [0, {end}], got {start}")
    return [Span(first, min(first + length, end)) for first in range(start, end, length)]
