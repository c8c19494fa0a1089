"""Mask each unit and see how the answer moves: the reference for the other estimators."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..options import Count, PositiveShare, TokenId, check_fields
from ..scoring.access import DISTRIBUTIONS, LOGPROBS, MODEL, ModelAccess
from ..scoring.batch import ScoredBatch
from ..scoring.masked import CounterfactualScores, ScoringWork
from ..scoring.outcomes import DIVERGENCES, Outcome
from .base import ANSWER, Estimator, Importances
from .entropy import Entropy
from .gradient import Gradient
from .prefix_gain import PrefixGain
from .resampling import resampled_scores
from .total_effects import total_effects

_PRESELECTORS: dict[str, type[Estimator]] = {kind.name: kind for kind in (PrefixGain, Gradient, Entropy)}
# `share * count` that misses a whole number only by rounding is that number.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Masking:
    """Mask each unit and see how the answer moves (CF paper, eq. 3; with tokens for units the OAR paper's OAR-P).

    Exact with placeholders, unless `preselect` says otherwise. Details with `preselect`: `exact`, B
    bool tensors (K_b,), the units that were masked.
    """

    name: ClassVar[str] = "masking"
    judges: ClassVar[str] = "spans"
    weights: ClassVar[str | None] = "range"

    outcome: Outcome = "logprob"
    """Outcome to compare: "logprob" or "mean_logprob" of the answer, or by KL divergence the distribution of its first
    token ("last") or of its mean logits ("mean")."""
    effect: Literal["direct", "total"] = "direct"
    """"direct", what the answer loses while all later text stays as it was written, or "total", also what it loses
    through later units that would not have come out as they did, see `total_effects`. Total effects are exact, of the
    answer's log-prob, with placeholders."""
    mask: Literal["placeholder", "drop", "resampled"] = "placeholder"
    """Replacement of a masked unit: "placeholder" for each token, "drop", nothing, so that later tokens move up, or
    "resampled", what the model itself might have written there, see `draw_fills`."""
    samples: Count = 1
    """Draws of resampled units to average."""
    preselect: PositiveShare = 1.0
    """Share of each completion's units that is masked, at least one; the others count as 0. 1 masks all."""
    preselect_by: Literal["length", "prefix_gain", "gradient", "entropy"] = "length"
    """Estimate that chooses that share: "length" of the unit, or another estimator."""
    placeholder_id: TokenId | None = None
    """Id that replaces masked tokens; None takes the tokenizer's pad token, else its end-of-text token."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.effect == "total":
            for name, default in {"mask": "placeholder", "preselect": 1.0, "outcome": "logprob"}.items():
                if getattr(self, name) != default:
                    raise ValueError(f"{name}={getattr(self, name)!r} cannot be combined with effect='total'")
        if self.samples != 1 and self.mask != "resampled":
            raise ValueError(f"samples={self.samples} is not read: only mask='resampled' draws, mask is {self.mask!r}")
        if self.preselect_by != "length" and self.preselect == 1:
            raise ValueError(f"preselect_by={self.preselect_by!r} is not read: preselect is 1, which masks every unit")

    @property
    def needs(self) -> frozenset[str]:
        """Needs: an answer, and what the way of masking and the preselector need of the model."""
        if self.effect == "total" or self.mask == "resampled":
            own = MODEL
        else:
            own = DISTRIBUTIONS if self.outcome in DIVERGENCES else LOGPROBS
        other = self._preselector.needs if self._preselector is not None else frozenset[str]()
        return frozenset({ANSWER, own}) | other

    @property
    def negative(self) -> bool:
        """Whether importances may be below 0: a divergence is not."""
        return self.outcome not in DIVERGENCES

    @property
    def continues(self) -> bool:
        """Whether branches continue completions as sampled; resampled units are drawn by forwards of their own."""
        return self.mask != "resampled"

    def __call__(self, access: ModelAccess, batch: ScoredBatch) -> Importances:
        """Judge the units of a batch."""
        if self.effect == "total":
            return total_effects(access, batch)
        if self.mask == "drop":
            batch = replace(batch, mask="drop")
        if self.preselect == 1:
            scores = self._score(access, batch)
            values = [-row.float() for row in scores.drop]
            return Importances(values, base=scores.base, work=scores.work, change_of=self._change_of)
        estimate = self._estimate(access, batch)
        chosen = []
        for b, row in zip(batch.index, estimate.values, strict=True):
            try:
                chosen.append(top_units(row.abs(), self.preselect))
            except ValueError as error:
                raise ValueError(f"preselect_by={self.preselect_by!r}, row {b}: {error}") from error
        some = batch.with_units([[units[k] for k in row] for units, row in zip(batch.units, chosen, strict=True)])
        scores = self._score(access, some)
        exact = [torch.zeros(len(row), dtype=torch.bool) for row in batch.units]
        for masked, numbers in zip(exact, chosen, strict=True):
            masked[numbers] = True
        values = [
            torch.zeros(len(masked)).masked_scatter(masked, -drop.float())
            for masked, drop in zip(exact, scores.drop, strict=True)
        ]
        work = scores.work + (estimate.work or ScoringWork())
        return Importances(values, base=scores.base, work=work, change_of=self._change_of, details={"exact": exact})

    @property
    def _change_of(self) -> Literal["logprob", "mean_logprob"] | None:
        return None if self.outcome in DIVERGENCES else self.outcome  # type: ignore[return-value]

    def _score(self, access: ModelAccess, batch: ScoredBatch) -> CounterfactualScores:
        if self.mask == "resampled":
            return resampled_scores(access, batch, self.samples, self.outcome)
        return access.score(batch, outcome=self.outcome)

    @property
    def _preselector(self) -> Estimator | None:
        return None if self.preselect == 1 or self.preselect_by == "length" else _PRESELECTORS[self.preselect_by]()

    def _estimate(self, access: ModelAccess, batch: ScoredBatch) -> Importances:
        """Estimate the importances by which the units worth masking are chosen."""
        if (other := self._preselector) is not None:
            return other(access, batch)
        return Importances([torch.tensor([float(end - start) for start, end in row]) for row in batch.units])


def top_units(importance: Tensor, share: float) -> list[int]:
    """Find the numbers of the `max(1, floor(share * K))` most important units, ascending, of equal ones the earlier.

    Args:
        importance: (K,), high = matters. K may be 0, which gives no unit.
        share: share of the units, in (0, 1].

    Raises:
        ValueError: importances that are not finite, naming unit and value.
    """
    if (bad := (~torch.isfinite(importance)).nonzero()).numel():
        k = int(bad[0])
        raise ValueError(f"importance, unit {k}: must be finite, got {importance[k].item()}")
    count = max(1, math.floor(share * len(importance) + _ROUNDING))
    return importance.argsort(descending=True, stable=True)[:count].sort().values.tolist()
