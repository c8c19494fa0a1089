"""Judge units by the entropy of the distributions that their tokens were drawn from."""

from dataclasses import dataclass
from typing import ClassVar

from ..scoring.access import ModelAccess
from ..scoring.batch import ScoredBatch
from .base import ENTROPIES, Importances, given, unit_means


@dataclass(frozen=True)
class Entropy:
    """Entropy of each token's distribution, averaged over a unit (arXiv 2506.01939)."""

    name: ClassVar[str] = "entropy"
    judges: ClassVar[str] = "tokens"
    negative: ClassVar[bool] = False
    weights: ClassVar[str | None] = "top"
    needs: ClassVar[frozenset[str]] = frozenset({ENTROPIES})
    continues: ClassVar[bool] = False

    def __call__(self, access: ModelAccess, batch: ScoredBatch) -> Importances:
        """Judge the units of a batch; asks nothing of the model."""
        return Importances(unit_means(given("entropies", batch.entropies), batch))
