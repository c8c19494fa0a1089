"""Score units by the entropy of the distributions that their tokens were drawn from."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ..batch import Batch
from ..options import Interval, NotNegative, check_fields
from ..rows import check_finite
from ..scoring.access import ModelAccess
from .base import ENTROPIES, Estimator, Importances, required, unit_means


@dataclass(frozen=True)
class Entropy(Estimator):
    """Entropy of each token's distribution, averaged over a unit (arXiv 2506.01939)."""

    name = "entropy"
    default_units = "tokens"
    weights = "top"
    needs = frozenset({ENTROPIES})

    def __call__(self, access: ModelAccess, batch: Batch) -> Importances:
        """Score the units of a batch; queries no model."""
        return Importances(unit_means(_entropies(batch), batch))


@dataclass(frozen=True)
class EntropyShaping(Estimator):
    """Bonus min(alpha H, |A| / kappa) on the advantage A of a token of entropy H (arXiv 2506.14758); signed.

    The OAR paper's baseline (eq. 6). The bonus has no gradient.
    """

    name = "entropy_shaping"
    default_units = "tokens"
    weights = None
    needs = frozenset({ENTROPIES})

    alpha: NotNegative = 0.4
    """Bonus per nat of entropy."""
    kappa: Annotated[float, Interval(1.0)] = 2.0
    """Advantage over its largest bonus; from 1 on no advantage changes its sign."""

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, access: ModelAccess, batch: Batch) -> Importances:
        """Score the units of a batch; queries no model."""
        columns = zip(_entropies(batch), required("advantages", batch.advantages), strict=True)
        bonus = [torch.minimum(self.alpha * row.double(), own.abs() / self.kappa) for row, own in columns]
        return Importances(unit_means(bonus, batch), signed=True)


def _entropies(batch: Batch) -> list[Tensor]:
    """Return the entropies; raise `ValueError` for one that is not finite, or further below 0 than rounding puts it."""
    check_finite("entropies", batch.index, entropies := required("entropies", batch.entropies), low=-0.01)
    return entropies
