"""Edit distance and alignment by the full table: what counts as edited."""

import functools
import itertools
from collections.abc import Sequence


def table(ours: Sequence[int], theirs: Sequence[int]) -> list[list[int]]:
    """Levenshtein distances of all pairs of prefixes."""
    cells = [[i + j for j in range(len(theirs) + 1)] for i in range(len(ours) + 1)]
    for i, j in itertools.product(range(len(ours)), range(len(theirs))):
        cells[i + 1][j + 1] = min(cells[i][j] + (ours[i] != theirs[j]), cells[i][j + 1] + 1, cells[i + 1][j] + 1)
    return cells


def edits_by_table(ours: Sequence[int], theirs: Sequence[int]) -> set[tuple[float, ...]]:
    """Find the marks of every alignment with the fewest edits, walking back through the table."""
    cells = table(ours, theirs)

    @functools.cache
    def walk(i: int, j: int) -> frozenset[frozenset[int]]:
        here, found = cells[i][j], set[frozenset[int]]()
        if i and cells[i - 1][j] + 1 == here:
            found |= {marks | {i - 1} for marks in walk(i - 1, j)}
        if i and j and cells[i - 1][j - 1] + (ours[i - 1] != theirs[j - 1]) == here:
            found |= {marks | ({i - 1} if ours[i - 1] != theirs[j - 1] else set()) for marks in walk(i - 1, j - 1)}
        if j and cells[i][j - 1] + 1 == here:
            found |= {marks | ({min(i, len(ours) - 1)} if ours else set()) for marks in walk(i, j - 1)}
        return frozenset(found or {frozenset[int]()})

    every = walk(len(ours), len(theirs))
    return {tuple(float(t in marks) for t in range(len(ours))) for marks in every}
