"""Take the caller's own importances."""

from dataclasses import dataclass
from typing import ClassVar

from ..options import as_numbers
from ..scoring.access import ModelAccess
from ..scoring.batch import ScoredBatch
from .base import EXTERNAL, Importances, given, unit_means


@dataclass(frozen=True)
class External:
    """Numbers of the caller, one per unit or per token: process rewards, attention, a teacher's judgement."""

    name: ClassVar[str] = "external"
    judges: ClassVar[str] = "spans"
    negative: ClassVar[bool] = False
    weights: ClassVar[str | None] = "range"
    needs: ClassVar[frozenset[str]] = frozenset({EXTERNAL})
    continues: ClassVar[bool] = False

    def __call__(self, access: ModelAccess, batch: ScoredBatch) -> Importances:
        """Judge the units of a batch; asks nothing of the model."""
        values = []
        for b, row in enumerate(given("external", batch.external)):
            units, length = batch.units[b], batch.lengths[b]
            row = as_numbers(row, f"external row {batch.index[b]}", f"{len(units)} units or {length} tokens")
            if len(row) == len(units):
                values.append(row)
            elif len(row) == length:
                values += unit_means([row], batch, rows=[b])
            else:
                raise ValueError(
                    f"external row {batch.index[b]}: must hold a number for each of {len(units)} units or {length} "
                    f"tokens, got {len(row)}"
                )
        return Importances(values)
