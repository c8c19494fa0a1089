"""A span of completion tokens, the unit that everything else here speaks of."""

from typing import NamedTuple


class Span(NamedTuple):
    """Tokens `[start, end)` of one completion."""

    start: int
    end: int
