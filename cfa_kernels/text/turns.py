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

    `mask` is what hosts call tool, response, action or loss mask: 1 on tokens that the policy wrote, else 0. Tokens of
    0 before the first turn are in no turn.
    """
    edges = np.flatnonzero(np.diff(torch.as_tensor(mask).cpu().int(), prepend=0, append=0)).tolist()
    starts, ends = edges[::2], edges[1::2]
    stops = [*starts[1:], len(mask)]
    return [Turn(Span(*own), Span(own[1], later)) for *own, later in zip(starts, ends, stops, strict=False)]
