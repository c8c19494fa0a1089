"""Declare the loss types: the formula of each, how it sums the losses of tokens, and what else distinguishes it."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor

Count = Tensor | float
LEVELS = ("token", "sequence", "sequence_token")


def _sequence_means(mask: Tensor, items: Count, sequences: Count, length: int) -> Count:
    return mask.sum(1, keepdim=True).clamp(min=1) * sequences


def _items(mask: Tensor, items: Count, sequences: Count, length: int) -> Count:
    return items


class LossType(NamedTuple):
    """Record of a loss type."""

    formula: str  # a function of `token_loss`
    divisor: Callable[[Tensor, Count, Count, int], Count] = _items
    """Divisor of the sum, from the mask (B, T), the step's counted tokens (>= 1) and sequences, and the longest one."""
    levels: tuple[str, ...] = LEVELS
    """Levels of the ratio at which it has a meaning: vespo weighs the sequence by itself, gmpo's ratio is its mean."""
    weighs_tokens: bool = False  # whether weights may differ within a row at every level: they multiply log-probs
    rests_at: float = 1.0  # value around which `epsilon` and `epsilon_high` clip; with 0, epsilon_high is the bound
    metrics: Literal["clip", "upper clip", "sequence weight"] | None = "clip"


LOSS_TYPES = {
    "grpo": LossType("clipped", _sequence_means),
    "bnpo": LossType("clipped", lambda mask, items, sequences, length: mask.sum().clamp(min=1)),
    "dr_grpo": LossType("clipped", lambda mask, items, sequences, length: sequences * length),
    "dapo": LossType("clipped"),
    "dppo": LossType("dppo", weighs_tokens=True, rests_at=0.0),
    "reinforce": LossType("reinforce", weighs_tokens=True, metrics=None),
    "luspo": LossType("clipped", lambda mask, items, sequences, length: sequences),
    "cispo": LossType("cispo", weighs_tokens=True, rests_at=0.0, metrics="upper clip"),
    "cispo_two_sided": LossType("cispo", weighs_tokens=True),
    "vespo": LossType("reinforce", levels=LEVELS[:1], weighs_tokens=True, metrics="sequence weight"),
    "gmpo": LossType("gmpo", _sequence_means, levels=LEVELS[1:], rests_at=0.0),
    "sapo": LossType("sapo", _sequence_means, metrics=None),
    "ipo": LossType("ipo", rests_at=0.0),
}


def weights_sequences(loss_type: str, level: str) -> bool:
    """Whether only the sum of a row's weights acts, since its tokens share the ratio that carries the gradient."""
    return level == "sequence" and not (loss_type in LOSS_TYPES and LOSS_TYPES[loss_type].weighs_tokens)
