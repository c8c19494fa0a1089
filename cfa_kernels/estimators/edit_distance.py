"""Align two completions, token by token, with the fewest edits."""

import torch
from rapidfuzz.distance import Levenshtein
from torch import Tensor


def edit_distance(one: Tensor, other: Tensor) -> int:
    """Compute the Levenshtein distance of two rows of ids on the host."""
    return int(Levenshtein.distance(one.tolist(), other.tolist()))


def edited_tokens(completion: Tensor, corrected: Tensor) -> Tensor:
    """Mark by 1 the tokens of `completion` that an alignment with `corrected` finds edited, the others by 0.

    The alignment has the fewest edits; of several, rapidfuzz chooses one, in which tokens before the first difference
    are not edited. A substituted or deleted token counts as edited, and so does the token before which something is
    inserted; an insertion at the end counts for the last token. Takes (T,) and (S,) int64 on the host; returns (T,).
    """
    edited = torch.zeros(len(completion))
    edits = Levenshtein.editops(completion.tolist(), corrected.tolist())
    if len(edited) and len(edits):
        edited[[min(edit.src_pos, len(edited) - 1) for edit in edits]] = 1
    return edited
