"""The loss benchmark times only right answers: a wrong one is refused. A smoke run holds all peers to float64."""

import pytest
import torch

from benchmarks.harness.race import WrongAnswer
from benchmarks.speed import loss_jobs, loss_peers

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[True, False], ids=["head trains", "head frozen"])
def job(request):
    shape = loss_jobs.Shape(48, 24, 160, torch.float32, head_trains=request.param)
    return loss_jobs.make_job(shape, CPU)


@pytest.fixture(scope="module")
def reference(job):
    return loss_jobs.linear_reference(job)


def test_a_wrong_gradient_a_wrong_loss_and_a_missing_gradient_are_refused(job, reference):
    loss, *gradients = loss_peers.ours(job)
    for wrong in (
        (loss + 0.01, *gradients), (loss, gradients[0] * 1.001, *gradients[1:]),
        (loss, *gradients[:-1], gradients[-1].roll(1, 0)), (loss, *gradients[:-1]), (loss * torch.nan, *gradients),
    ):  # fmt: skip
        with pytest.raises(WrongAnswer):
            reference.check(wrong)
