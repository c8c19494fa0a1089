"""An access to no model, and estimators, that give what a test wants."""

import torch

from cfa_kernels.estimators.base import Importances
from cfa_kernels.scoring.access import LOGPROBS
from cfa_kernels.scoring.masked import CounterfactualScores, ScoringWork


class Scored:
    """An access to no model, that gives drops as they are wanted and keeps the batches that it is asked to score."""

    module = model = None

    def __init__(self, drops=(2.0, 1.0), base=0.0, capabilities=(LOGPROBS,), dtype=torch.float32):
        self.drops, self.base, self.capabilities, self.batches = torch.tensor(drops), base, frozenset(capabilities), []
        self.dtype = dtype

    def run(self, body):
        return body()

    def apply(self, estimator, batch):
        return estimator(self, batch)

    def score(self, batch, *, mask=None, outcome="logprob", merge_adapters=False):
        self.batches.append(batch)
        drop = [self.drops[: len(row)] for row in batch.units]
        return CounterfactualScores(torch.full((len(batch),), self.base), drop, drop, ScoringWork(1, 1, 1))


def importances_of(values, **fields):
    """An estimator that gives these values and keeps the batch it was given."""

    def estimate(model, batch):
        estimate.batch = batch
        return Importances([torch.tensor(row, dtype=torch.float32) for row in values(batch)], **fields)

    return estimate
