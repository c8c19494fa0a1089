"""Check options against their own declaration (type, choices, range), and rows of numbers, before any model runs.

This imports no torch: a program checks its settings before the seconds that torch takes.
"""

import importlib
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 1e38  # that float32 holds


@dataclass(frozen=True)
class Interval:
    """Range of numbers from `low` to `high`, within float32; it never includes infinite or nan."""

    low: float = -math.inf
    high: float = math.inf
    above_low: bool = False

    def __contains__(self, value: Any) -> bool:
        is_number = isinstance(value, Real) or getattr(value, "ndim", None) == 0  # a tensor without axes too
        in_float32 = is_number and abs(value) <= _LARGEST  # false for nan
        return in_float32 and self.low <= value <= self.high and not (self.above_low and value == self.low)

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "a finite number"
        if self.high == math.inf:
            return f"finite and {'above' if self.above_low else 'at least'} {self.low:g}"
        return f"in {'(' if self.above_low else '['}{self.low:g}, {self.high:g}]".replace("+", "")

    def check(self, **numbers: Any) -> None:
        """Raise `ValueError` for the first number that is not in the interval; names it."""
        for name, number in numbers.items():
            if number not in self:
                raise ValueError(f"{name} must be {self}, got {repr(number) if isinstance(number, str) else number}")


NOT_NEGATIVE = Interval(0.0)
POSITIVE = Interval(1 / _LARGEST, _LARGEST)
"""Numbers that may be divided by: float32 holds their inverses too."""

Finite = Annotated[float, Interval()]
NotNegative = Annotated[float, NOT_NEGATIVE]
Share = Annotated[float, Interval(0.0, 1.0)]
PositiveShare = Annotated[float, Interval(0.0, 1.0, above_low=True)]
Count = Annotated[int, Interval(1)]
TokenId = Annotated[int, Interval(0)]


def check_class(kind: type, **values: Any) -> None:
    """Raise `ValueError` naming the first value that is not of the class `kind`."""
    for name, value in values.items():
        if not isinstance(value, kind):
            got = repr(value) if isinstance(value, str) else type(value).__name__
            raise ValueError(f"{name} must be of class {kind.__name__}, got {got}")


def check_fields(part: Any) -> None:
    """Raise `ValueError` naming the first field of a dataclass whose value is not what its annotation says."""
    for name, hint in _hints(type(part)).items():  # type: ignore[arg-type]
        value = getattr(part, name)
        if (expected := _mismatch(value, hint)) is not None:
            raise ValueError(f"{name} must be {expected}, got {value!r}")


@cache
def _hints(part: type) -> dict[str, Any]:
    hints = get_type_hints(part, include_extras=True)
    return {entry.name: hints[entry.name] for entry in fields(part)}


def imported(option: str, name: str) -> Callable[..., Any]:
    """Import a function or class named `module:attribute`; raises `ValueError` that names `option` and the cause."""
    module, _, attribute = name.partition(":")
    try:
        value = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as problem:  # a module may raise anything while it is imported
        raise ValueError(f"{option}: cannot import {name!r}: {type(problem).__name__}: {problem}") from problem
    if not callable(value):
        raise ValueError(f"{option}: {name!r} is a {type(value).__name__}, not a function or class")
    return value


def as_numbers(values: Any, name: str, count: str) -> "Tensor":
    """Convert a 1-D tensor, an array or a list of numbers to a tensor, fp32 on the host.

    Raises `ValueError` that begins with `name`; `count` names the things that need a number each.
    """
    import torch

    try:
        row = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name}: expected a number for each of {count}, got {values!r:.80}") from error
    if row.ndim != 1 or row.is_complex():
        raise ValueError(f"{name}: gave shape {tuple(row.shape)} of {row.dtype}, expected a number for each of {count}")
    return row.detach().float().cpu()


def _mismatch(value: Any, hint: Any) -> str | None:
    """Say what `value` should be, if it is not."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        expected = [_mismatch(value, choice) for choice in inside]
        return None if None in expected else " or ".join(dict.fromkeys(filter(None, expected)))
    if origin is Literal:
        return None if value in inside else f"one of {', '.join(map(repr, inside))}"
    if origin is Annotated:
        number, interval = inside
        if not isinstance(interval, Interval):
            return _mismatch(value, number)
        matches = isinstance(value, int | number) and not isinstance(value, bool) and value in interval
        words = str(interval)
        return None if matches else words if number is float else f"an integer, {words.removeprefix('finite and ')}"
    kind = origin or hint
    if kind is Callable:
        return None if callable(value) else "a function"
    return None if isinstance(value, kind) else "None" if kind is type(None) else f"a {kind.__name__}"
