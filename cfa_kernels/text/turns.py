"""Find the turns of a completion by the mask of what the policy wrote; no chat template is read."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..span import Span


class Turn(NamedTuple):
    """Tokens of one turn, and of the observation that follows it."""

    written: Span  # by the policy, at least one token
    observation: Span  # up to the next turn or the completion's end, perhaps empty


def find_turns(mask: Sequence[float] | torch.Tensor) -> list[Turn]:
    """Find the turns of a completion: runs of 1 in its mask (T,), each with the run of 0 that follows.

    `mask` is what hosts call tool, response, action or loss mask: 1 on tokens that the policy wrote. Tokens of 0 before
    the first turn are in no turn. Raises `ValueError` naming the first token that is neither 1 nor 0.
    """
    values = np.asarray(mask.cpu() if isinstance(mask, torch.Tensor) else mask, dtype=np.float64)
    for t in np.flatnonzero((values != 0) & (values != 1))[:1]:
        raise ValueError(f"mask, token {t}: must be 1 or 0, got {values[t]}")
    edges = np.flatnonzero(np.diff(values, prepend=0, append=0)).tolist()
    starts, ends = edges[::2], edges[1::2]
    stops = [*starts, len(values)][1:] if starts else []
    return [Turn(Span(*own), Span(own[1], later)) for *own, later in zip(starts, ends, stops, strict=True)]
