"""Edit distance and alignment by the full table: the judge of what counts as edited."""

import itertools
from collections.abc import Sequence


def table(ours: Sequence[int], theirs: Sequence[int]) -> list[list[int]]:
    """Levenshtein distances of all pairs of prefixes."""
    cells = [[i + j for j in range(len(theirs) + 1)] for i in range(len(ours) + 1)]
    for i, j in itertools.product(range(len(ours)), range(len(theirs))):
        cells[i + 1][j + 1] = min(cells[i][j] + (ours[i] != theirs[j]), cells[i][j + 1] + 1, cells[i + 1][j] + 1)
    return cells


def edits_by_table(ours: Sequence[int], theirs: Sequence[int]) -> list[float]:
    """Walk back through the table: delete, else substitute, else insert, else match."""
    cells, edited, (i, j) = table(ours, theirs), [0.0] * len(ours), (len(ours), len(theirs))
    while i or j:
        here = cells[i][j]
        if i and cells[i - 1][j] + 1 == here:
            i -= 1
            edited[i] = 1.0
        elif i and j and ours[i - 1] != theirs[j - 1] and cells[i - 1][j - 1] + 1 == here:
            i, j = i - 1, j - 1
            edited[i] = 1.0
        elif j and cells[i][j - 1] + 1 == here:
            j -= 1
            if ours:
                edited[min(i, len(ours) - 1)] = 1.0
        else:
            i, j = i - 1, j - 1
    return edited
