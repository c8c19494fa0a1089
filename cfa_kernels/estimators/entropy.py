"""Judge units by the entropy of the distributions that their tokens were drawn from."""

from dataclasses import dataclass

from ..scoring.access import ModelAccess
from ..scoring.batch import ScoredBatch
from .base import ENTROPIES, Estimator, Importances, required, unit_means


@dataclass(frozen=True)
class Entropy(Estimator):
    """Entropy of each token's distribution, averaged over a unit (arXiv 2506.01939)."""

    name = "entropy"
    judges = "tokens"
    weights = "top"
    needs = frozenset({ENTROPIES})

    def __call__(self, access: ModelAccess, batch: ScoredBatch) -> Importances:
        """Judge the units of a batch; asks nothing of the model."""
        return Importances(unit_means(required("entropies", batch.entropies), batch))
