"""Judge units by the entropy that their tokens were drawn with."""

from dataclasses import dataclass
from typing import ClassVar

from ..scoring.access import ModelAccess
from ..scoring.batch import ScoredBatch
from .base import ENTROPIES, Importances, given, unit_means


@dataclass(frozen=True)
class Entropy:
    """The entropy of each token's distribution, averaged over a unit (arXiv 2506.01939)."""

    name: ClassVar[str] = "entropy"
    judges: ClassVar[str] = "tokens"
    negative: ClassVar[bool] = False
    weights: ClassVar[str | None] = "top"
    needs: ClassVar[frozenset[str]] = frozenset({ENTROPIES})
    continues: ClassVar[bool] = False

    def __call__(self, access: ModelAccess, batch: ScoredBatch) -> Importances:
        """Judge the units of a batch; asks nothing of the model."""
        return Importances(unit_means(given("entropies", batch.entropies), batch))
