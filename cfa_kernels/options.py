"""Check options and numbers that a caller gives, before any model is asked.

Options are checked against their own declaration: type, choices and range. Rows of numbers become tensors.
"""

import ast
import inspect
import itertools
import math
import textwrap
import types
from dataclasses import dataclass, fields
from numbers import Real
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

_LARGEST = 1e38  # that float32 holds


@dataclass(frozen=True)
class Interval:
    """Range of numbers from `low` to `high`, within float32; it never includes infinite or nan."""

    low: float = -math.inf
    high: float = math.inf
    above_low: bool = False

    def __contains__(self, value: float) -> bool:
        in_float32 = abs(value) <= _LARGEST  # which is false for nan
        return in_float32 and self.low <= value <= self.high and not (self.above_low and value == self.low)

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "a finite number"
        if self.high == math.inf:
            return f"finite and {'above' if self.above_low else 'at least'} {self.low:g}"
        return f"in {'(' if self.above_low else '['}{self.low:g}, {self.high:g}]".replace("+", "")

    def check(self, **numbers: float | None) -> None:
        """Raise `ValueError` for the first number, if it is there, that is not in the interval; names it."""
        for name, number in numbers.items():
            if number is not None and number not in self:
                raise ValueError(f"{name} must be {self}, got {number}")


NOT_NEGATIVE = Interval(0.0)
POSITIVE = Interval(1 / _LARGEST, _LARGEST)
"""Numbers that may be divided by: float32 holds their inverses too."""

Finite = Annotated[float, Interval()]
NotNegative = Annotated[float, NOT_NEGATIVE]
Share = Annotated[float, Interval(0.0, 1.0)]
PositiveShare = Annotated[float, Interval(0.0, 1.0, above_low=True)]
Count = Annotated[int, Interval(1)]
TokenId = Annotated[int, Interval(0)]


def check_fields(part: Any) -> None:
    """Raise `ValueError` naming the first field of a dataclass whose value is not what its annotation says."""
    hints = get_type_hints(type(part), include_extras=True)
    for entry in fields(part):
        value = getattr(part, entry.name)
        if (wanted := _mismatch(value, hints[entry.name])) is not None:
            raise ValueError(f"{entry.name} must be {wanted}, got {value!r}")


def as_numbers(given: Any, what: str, count: str) -> Tensor:
    """Convert a 1-D tensor, an array or a list of numbers to a tensor, fp32 on the host.

    Raises `ValueError` that begins with `what`; `count` names the things that need a number each.
    """
    if isinstance(given, Tensor | np.ndarray):
        row = torch.as_tensor(given)
        if row.ndim == 1 and not row.is_complex():
            return row.detach().float().cpu()
        raise ValueError(f"{what}: gave shape {tuple(row.shape)} of {row.dtype}, expected a number for each of {count}")
    if not isinstance(given, list | tuple):
        raise ValueError(
            f"{what}: expected a tensor or a list with a number for each of {count}, got {type(given).__name__}"
        )
    for i, number in enumerate(given):
        try:
            known: float | None = float(number)
        except (TypeError, ValueError, OverflowError):
            known = None
        if known is None or not isinstance(number, Real | Tensor | np.ndarray):
            raise ValueError(f"{what}[{i}]: expected a number that a float holds, got a {type(number).__name__}")
    return torch.tensor([float(number) for number in given], dtype=torch.float32)


def option_docs(part: type) -> dict[str, str]:
    """Read the string under each field of a dataclass, on one line, from which flags and pages are made."""
    body = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0].body  # type: ignore[attr-defined]
    texts = {}
    for entry, following in itertools.pairwise(body):
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and isinstance(following, ast.Expr):
            texts[entry.target.id] = " ".join(ast.literal_eval(following.value).split())
    return texts


def _mismatch(value: Any, hint: Any) -> str | None:
    """Say what `value` should be, if it is not."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        wanted = [_mismatch(value, choice) for choice in inside]
        return None if None in wanted else " or ".join(dict.fromkeys(filter(None, wanted)))
    if origin is Literal:
        return (
            None
            if any(value is choice or value == choice for choice in inside)
            else f"one of {', '.join(map(repr, inside))}"
        )
    if origin is Annotated:
        kind, interval = inside[0], inside[1]
        number = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
        words = str(interval) if kind is float else f"an integer, {interval}".replace("finite and ", "")
        return None if number and value in interval else words
    if hint is type(None):
        return None if value is None else "None"
    if isinstance(hint, type) and not getattr(hint, "_is_protocol", False):
        return None if isinstance(value, hint) else f"a {hint.__name__}"
    return None if callable(value) else "a function"
