"""Take the caller's own importances."""

from dataclasses import dataclass

from ..batch import Batch
from ..options import as_numbers
from ..scoring.access import ModelAccess
from .base import EXTERNAL, Estimator, Importances, required, unit_means


@dataclass(frozen=True)
class External(Estimator):
    """Numbers of the caller, one per unit or per token: process rewards, attention, a teacher's scores."""

    name = "external"
    needs = frozenset({EXTERNAL})

    def __call__(self, access: ModelAccess, batch: Batch) -> Importances:
        """Score the units of a batch; queries no model."""
        values = []
        for b, row in enumerate(required("external", batch.external)):
            units, length = batch.units[b], batch.rows.lengths[b]
            row = as_numbers(row, f"external row {batch.index[b]}", f"{len(units)} units or {length} tokens")
            if len(row) == len(units):
                values.append(row)
            elif len(row) == length:
                values += unit_means([row], batch, rows=[b])
            else:
                raise ValueError(
                    f"external row {batch.index[b]}: holds {len(row)}, not {len(units)} or {length} numbers"
                )
        return Importances(values)
