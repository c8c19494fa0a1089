"""Options of the policy losses, checked once: where they are made."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args, get_type_hints

import torch
from torch import Tensor

from ..options import NOT_NEGATIVE, POSITIVE, Finite, NotNegative
from .types import LEVELS, LOSS_TYPES, Count, weights_sequences

CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs")
Positive = Annotated[float, POSITIVE]


@dataclass(frozen=True)
class LossOptions:
    """Options of all three losses under TRL's names; `policy_loss` says what each is.

    Raises `ValueError` naming the first that is out of its range, or has no meaning beside another.
    """

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    kl_estimator: str = "k3"
    sampling_mode: str | None = None
    sampling_clip_min: NotNegative | None = None
    sampling_clip_max: Positive | None = None
    off_policy_mask_threshold: NotNegative | None = None
    epsilon: NotNegative = 0.2
    epsilon_high: NotNegative = 0.28
    delta: Positive | None = None
    beta: NotNegative = 0.0
    use_bias_correction_kl: bool = False
    sapo_temperature_pos: Positive = 1.0
    sapo_temperature_neg: Positive = 1.05
    vespo_k_pos: NotNegative = 2.0
    vespo_lambda_pos: NotNegative = 3.0
    vespo_k_neg: NotNegative = 3.0
    vespo_lambda_neg: NotNegative = 2.0
    num_items_in_batch: Annotated[Count, NOT_NEGATIVE] | None = None
    num_sequences_in_batch: Annotated[Count, POSITIVE] | None = None
    max_completion_length: Annotated[int, NOT_NEGATIVE] | None = None
    entropy_coef: Finite | Tensor = 0.0
    validate: bool | None = None

    def __post_init__(self) -> None:
        check_choice("loss_type", self.loss_type, tuple(LOSS_TYPES))
        check_choice("importance_sampling_level", self.importance_sampling_level, LEVELS)
        check_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        if self.importance_sampling_level not in (levels := LOSS_TYPES[self.loss_type].levels):
            raise ValueError(
                f"importance_sampling_level must be {' or '.join(map(repr, levels))} with loss_type="
                f"{self.loss_type!r}, got {self.importance_sampling_level!r}"
            )
        for name, interval in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(f"{name} must be {interval}, got a tensor of shape {tuple(value.shape)}")
            if isinstance(value, Tensor) and should_validate(self.validate, value):
                value = value.item()
            if not isinstance(value, Tensor) and value != getattr(LossOptions, name):
                interval.check(**{name: value})
        if self.loss_type == "dr_grpo" and not self.max_completion_length:
            raise ValueError(f"loss_type='dr_grpo' needs max_completion_length > 0, got {self.max_completion_length}")
        self._check_correction()

    def _check_correction(self) -> None:
        mode, low, high = self.sampling_mode, self.sampling_clip_min, self.sampling_clip_max
        if mode is None:
            if low is not None or high is not None:
                raise ValueError("sampling_clip_min and sampling_clip_max are not read without a sampling_mode")
            return
        check_choice("sampling_mode", mode, CORRECTIONS)
        if (low or 0.0) > (math.inf if high is None else high):
            raise ValueError(f"sampling_clip_min must not exceed sampling_clip_max, got {low} and {high}")
        if mode.startswith("token") and weights_sequences(self.loss_type, self.importance_sampling_level):
            raise ValueError(
                f"sampling_mode={mode!r} differs from token to token, and importance_sampling_level='sequence' has one "
                "ratio for a row; use 'sequence_token', or a sequence's mode"
            )
        if self.loss_type == "vespo" and not mode.startswith("token"):
            raise ValueError(
                f"sampling_mode={mode!r} corrects a row, and loss_type='vespo' weighs it by its tokens' own ratios; "
                "use 'token_truncate' or 'token_mask'"
            )

    @property
    def joins_tokens(self) -> bool:
        """Whether a token's loss depends on the log-probs of its whole sequence."""
        by_sequence = (self.sampling_mode or "").startswith(("sequence", "geometric")) or self.loss_type == "vespo"
        masks = self.off_policy_mask_threshold is not None
        return self.importance_sampling_level != "token" or by_sequence or masks

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the lower and the upper clip of what `loss_type` clips; a ratio is never below that of `cispo`."""
        at_rest = LOSS_TYPES[self.loss_type].rests_at
        return at_rest - self.epsilon, at_rest + self.epsilon_high

    def kinds(self) -> str:
        """Join the words among the options of a token for an operator."""
        return ",".join(getattr(self, name) or "" for name in KINDS)

    def numbers(self) -> list[float]:
        """Return the numbers among them, nan for None."""
        values = [getattr(self, name) for name in NUMBERS]
        return [math.nan if value is None else float(value) for value in values]

    @classmethod
    def of(cls, kinds: str, numbers: Sequence[float]) -> "LossOptions":
        """Undo `kinds` and `numbers`, which are not checked again."""
        options = object.__new__(cls)
        options.__dict__.update(zip(KINDS, (kind or None for kind in kinds.split(",")), strict=True))
        options.__dict__.update(zip(NUMBERS, (None if x != x else x for x in numbers), strict=True))
        return options

    def but(self, **changes: Any) -> "LossOptions":
        """Copy the options with some exchanged, which are not checked."""
        options = object.__new__(type(self))
        options.__dict__.update(vars(self) | changes)
        return options


_RANGES = {
    name: part.__metadata__[0]
    for name, hint in get_type_hints(LossOptions, include_extras=True).items()
    for part in (hint, *get_args(hint))
    if hasattr(part, "__metadata__")
}
_OF_SUMS = ("num_items_in_batch", "num_sequences_in_batch", "max_completion_length", "entropy_coef", "validate")
KINDS = ("loss_type", "importance_sampling_level", "kl_estimator", "sampling_mode")
NUMBERS = tuple(one.name for one in fields(LossOptions) if one.name not in (*KINDS, *_OF_SUMS))


def made_options(given: dict[str, Any]) -> LossOptions:
    """Take the `loss_options` that a caller has made, or make them of those given by name."""
    made = given.pop("loss_options", None)
    if unknown := given.keys() - LossOptions.__annotations__.keys():
        raise TypeError(f"a policy loss has no option {min(unknown)!r}")
    if made is not None and given:
        raise TypeError(f"give loss_options or single options, not both, got {min(given)!r} too")
    return LossOptions(**given) if made is None else made


def should_validate(validate: bool | None, tensor: Tensor) -> bool:
    """Whether to check values: by default where that neither waits for a GPU nor breaks a compiled graph."""
    if validate is None:
        return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
    return validate


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise `ValueError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")
