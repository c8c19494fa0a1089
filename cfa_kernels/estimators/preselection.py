"""Choose the units worth masking, and estimate importance at no cost."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..span import Span

POSITION_RULES: dict[str, Callable[[Span], int]] = {
    "length": lambda unit: unit.end - unit.start,
    "first": lambda unit: -unit.start,
    "last": lambda unit: unit.start,
}
"""Estimates of importance that cost nothing, high where a unit may matter: its length or its place."""

# `share * count` that misses a whole number only by rounding is that number.
_ROUNDING = 1e-9


def top_units(importance: Tensor, share: float) -> list[int]:
    """Find the numbers of the `max(1, floor(share * K))` most important units, ascending, of equal ones the earlier.

    Args:
        importance: (K,), high = matters. K may be 0, which gives no unit.
        share: share of the units, in (0, 1].

    Raises:
        ValueError: importances that are not finite, naming unit and value.
    """
    if (bad := (~torch.isfinite(importance)).nonzero()).numel():
        k = int(bad[0])
        raise ValueError(f"importance, unit {k}: must be finite, got {importance[k].item()}")
    count = max(1, math.floor(share * len(importance) + _ROUNDING))
    return importance.argsort(descending=True, stable=True)[:count].sort().values.tolist()
