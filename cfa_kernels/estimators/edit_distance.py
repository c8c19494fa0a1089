"""Align two completions, token by token, with the fewest edits."""

import numpy as np
import torch
from torch import Tensor


def edited_tokens(completion: Tensor, corrected: Tensor) -> Tensor:
    """Mark by 1 the tokens of `completion` that an alignment with `corrected` finds edited, the others by 0.

    The alignment has the fewest edits (Levenshtein), and of several such the earliest matches, so that tokens before
    the first difference are never edited. A substituted or deleted token counts as edited, and so does the token before
    which something is inserted; an insertion at the end counts for the last token. Takes (T,) and (S,) int64 on the
    host and returns (T,) fp32.
    """
    # Walk back from the ends: delete if that is best, else substitute, else insert, and match last.
    ours, theirs = completion.numpy(), corrected.numpy()
    edited = np.zeros(len(ours) + 1, dtype=np.float32)
    rises, falls = _columns(token_places(ours), len(ours), theirs)
    row, column = len(ours), len(theirs)
    while row and column:
        bit = 1 << (row - 1)
        if rises[column] & bit:  # deleted: the distance was one less without this token
            row -= 1
            edited[row] = 1
            continue
        column -= 1
        if falls[column] & bit:  # inserted before the token at `row`
            edited[row] = 1
        else:
            row -= 1
            edited[row] = max(edited[row], ours[row] != theirs[column])
    if row:
        edited[:row] = 1
    elif column:
        edited[0] = 1
    if edited[-1] and len(ours):
        edited[-2] = 1
    return torch.from_numpy(edited[:-1].copy())


def token_places(row: np.ndarray) -> dict[int, int]:
    """Map each token of a row to the set of its positions, as the bits of an integer."""
    places: dict[int, int] = {}
    for t, token in enumerate(row.tolist()):
        places[token] = places.get(token, 0) | 1 << t
    return places


def _columns(places: dict[int, int], length: int, other: np.ndarray) -> tuple[list[int], list[int]]:
    """Compute the columns of the edit-distance table of a row, given by its `token_places`, and `other`: bit sets."""
    # Hyyro's form (2003) of Myers' bit-parallel algorithm (1999): neighbouring cells differ by at most 1, so a column
    # is two sets of rows, those whose distance is one more than that of the row above and those with one less.
    everything = (1 << length) - 1
    rises, falls = [everything], [0]
    for token in other.tolist():
        up, down = rises[-1], falls[-1]
        match = places.get(token, 0)
        diagonal = (((match & up) + up) ^ up) | match | down
        right_up = (down | ~(diagonal | up)) << 1 | 1
        right_down = (diagonal & up) << 1
        rises.append((right_down | ~(diagonal | right_up)) & everything)
        falls.append(right_up & diagonal & everything)
    return rises, falls


def edit_distance(places: dict[int, int], length: int, other: np.ndarray) -> int:
    """Compute the Levenshtein distance of a row, given by its `token_places`, to `other`."""
    rises, falls = _columns(places, length, other)
    return len(other) + rises[-1].bit_count() - falls[-1].bit_count()
