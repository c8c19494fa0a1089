"""Mask each unit and see how the answer moves: the reference for the other estimators."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..batch import Batch
from ..options import PositiveShare, TokenId, check_fields
from ..rows import check_finite
from ..scoring.access import DISTRIBUTIONS, LOGPROBS, WHOLE, ModelAccess
from ..scoring.masked import ScoringWork
from ..scoring.outcomes import DIVERGENCES, Outcome
from .base import ANSWER, ESTIMATORS, Estimator, Importances

# `share * count` that misses a whole number only by rounding is that number.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Masking(Estimator):
    """Mask each unit and see how the answer moves (CF paper, eq. 3; with tokens for units the OAR paper's OAR-P)."""

    name = "masking"
    continues = on_device = True

    outcome: Outcome = "logprob"
    """Outcome to compare: "logprob" or "mean_logprob" of the answer, or by KL divergence the distribution of its first
    token ("last") or of its mean logits ("mean")."""
    mask: Literal["placeholder", "drop"] = "placeholder"
    """Replacement of a masked unit: "placeholder" for each token, or "drop", nothing, so that later tokens move up."""
    preselect: PositiveShare = 1.0
    """Share of each completion's units that is masked, at least one; the others count as 0. 1 masks all."""
    preselect_by: str = "length"
    """Estimate that chooses that share: "length" of the unit, or an estimator by its name."""
    placeholder_id: TokenId | None = None
    """Id that replaces masked tokens; None takes the tokenizer's pad token, else its end-of-text token."""
    mask_observation: bool = False
    """Mask each turn together with the observation that follows it (LOTAPO 2607.13501); read where units are turns."""
    merge_adapters: bool = False
    """Score with PEFT's active adapters merged into their layers' weights, which launches less and takes a copy of
    those weights while scores are taken. The sum is rounded to the weights' dtype, as it is when the training program
    samples: the scored policy is the one that sampled, not exactly the one that trains. Weights must be whole."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.preselect_by not in (choices := ("length", *ESTIMATORS)):
            raise ValueError(f"preselect_by must be one of {', '.join(choices)}, got {self.preselect_by!r}")
        if self.preselect_by != "length" and self.preselect == 1:
            raise ValueError(f"preselect_by={self.preselect_by!r} is not read: preselect is 1, which masks every unit")

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """Needs: an answer, and what the way of masking and the preselector need of the model."""
        own = {ANSWER, DISTRIBUTIONS if self.outcome in DIVERGENCES else LOGPROBS}
        own |= {WHOLE} if self.merge_adapters else set()
        return frozenset(own) | (self._preselector.needs if self._preselector else frozenset())

    @property
    def observes(self) -> bool:  # type: ignore[override]
        """Whether a turn is masked together with its observation."""
        return self.mask_observation

    @property
    def negative(self) -> bool:  # type: ignore[override]
        """Whether importances may be below 0: a divergence is not."""
        return self.outcome not in DIVERGENCES

    def __call__(self, access: ModelAccess, batch: Batch) -> Importances:
        """Score the units of a batch."""
        part, some, work = batch, list[list[int]](), ScoringWork()
        if self.preselect < 1:
            batch = batch.exchanged(unread=None)  # scores are compared, and put among others, on the host
            lengths = [torch.tensor([float(end - start) for start, end in row]) for row in batch.units]
            estimate = self._preselector(access, batch) if self._preselector else Importances(lengths)
            check_finite(f"preselect_by={self.preselect_by!r},", batch.index, estimate.values, of="unit")
            some = [top_units(row.abs(), self.preselect) for row in estimate.values]
            work = estimate.work or work
            chosen = [[units[k] for k in row] for units, row in zip(batch.units, some, strict=True)]
            part = batch.exchanged(units=chosen)
        mask = "drop" if self.mask == "drop" else None
        scores = access.score(part, mask=mask, outcome=self.outcome, merge_adapters=self.merge_adapters)  # type: ignore[arg-type]
        values = [drop.float() for drop in scores.drop]
        if self.preselect < 1:
            every = [torch.zeros(len(units)) for units in batch.units]
            for row, numbers, drop in zip(every, some, values, strict=True):
                row[numbers] = drop
            values = every
        change_of = None if self.outcome in DIVERGENCES else self.outcome
        return Importances(values, base=scores.base, work=work + scores.work, change_of=change_of)  # type: ignore[arg-type]

    @property
    def _preselector(self) -> Estimator | None:
        return None if self.preselect == 1 or self.preselect_by == "length" else ESTIMATORS[self.preselect_by]()


def top_units(importance: Tensor, share: float) -> list[int]:
    """Number the `max(1, floor(share * K))` most important of K units, ascending, of equal ones the earlier."""
    count = max(1, math.floor(share * len(importance) + _ROUNDING))
    return importance.argsort(descending=True, stable=True)[:count].sort().values.tolist()
