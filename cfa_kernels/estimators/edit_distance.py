"""Align two completions, token by token, with the fewest edits."""

import numpy as np
import torch
from torch import Tensor


def edited_tokens(completion: Tensor, corrected: Tensor) -> Tensor:
    """Mark by 1 the tokens of `completion` that an alignment with `corrected` finds edited, the others by 0.

    The alignment has the fewest substitutions, deletions and insertions (Levenshtein). A substituted or deleted token
    counts as edited, and so does the token before which something is inserted; an insertion at the end counts for
    the last token. Of several best alignments the one that matches tokens earliest is taken: walking back from the
    ends it prefers to delete, then to substitute, then to insert, and matches last. Tokens before the first difference
    are thus never edited.

    Args:
        completion: (T,) int64 on the host.
        corrected: (S,) int64 on the host.

    Returns:
        (T,) fp32 on the host.
    """
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
    """Yield the columns of the edit-distance table of a row, given by its `token_places`, and `other`, as bit sets.

    Hyyro's form (2003) of Myers' bit-parallel algorithm (1999): neighbouring cells differ by at most 1, so a column is
    two sets of rows, those whose distance is one more than that of the row above and those with one less, and the next
    column follows by a dozen operations on integers of `length` bits. Column 0 is that of the empty prefix.
    """
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
