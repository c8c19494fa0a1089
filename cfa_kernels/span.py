"""Define a span of completion tokens, the unit that is scored."""

from typing import NamedTuple


class Span(NamedTuple):
    """Tokens `[start, end)` of one completion."""

    start: int
    end: int


def span_inside(where: str, span: tuple[int, int], length: int) -> Span:
    """Check that a span is not empty and inside a completion of `length` tokens; raises `ValueError` naming `where`."""
    start, end = map(int, span)
    if not 0 <= start < end <= length:
        raise ValueError(f"{where}: {(start, end)} is not a non-empty span inside a completion of {length} tokens")
    return Span(start, end)
