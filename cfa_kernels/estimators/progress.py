"""Score units by how much likelier the policy finds them than a reference does."""

from dataclasses import dataclass

import torch

from ..batch import Batch
from ..rows import check_finite
from ..scoring.access import ModelAccess
from .base import LOG_RATIOS, Estimator, Importances, required, unit_means


@dataclass(frozen=True)
class Progress(Estimator):
    """Log-ratio of policy and reference, summed over a unit (Progress Advantage, arXiv 2606.26080); needs no outcome.

    It reads the columns `old_logprobs` and `ref_logprobs`, nats, and feeds nothing.
    """

    name = "progress"
    default_units = "turns"
    negative = True
    needs = frozenset({LOG_RATIOS})
    is_reward = True

    def __call__(self, access: ModelAccess, batch: Batch) -> Importances:
        """Score the units of a batch; queries no model."""
        columns = [required(name, getattr(batch, name)) for name in ("old_logprobs", "ref_logprobs")]
        ratios = [own.double() - reference.double() for own, reference in zip(*columns, strict=True)]
        check_finite("old_logprobs - ref_logprobs,", batch.index, ratios)
        sizes = [torch.tensor([float(end - start) for start, end in units]) for units in batch.units]
        return Importances([own * size for own, size in zip(unit_means(ratios, batch), sizes, strict=True)])
