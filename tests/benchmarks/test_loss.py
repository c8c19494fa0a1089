"""The loss benchmark times only right answers: its peers agree with float64, and a wrong one is refused."""

import pytest
import torch

from benchmarks.harness.race import Absent, WrongAnswer
from benchmarks.speed import loss_jobs, loss_peers

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SLOW = {"torch.compile", "Liger chunked"}  # their compilers take longer than the rest of this file
PEERS = [name for name in loss_peers.PEERS if name not in SLOW]


@pytest.fixture(scope="module", params=[True, False], ids=["head trains", "head frozen"])
def job(request):
    shape = loss_jobs.Shape(48, 24, 160, torch.float32, head_trains=request.param)
    return loss_jobs.make_job(shape, CPU)


@pytest.fixture(scope="module")
def reference(job):
    return loss_jobs.linear_reference(job)


@pytest.mark.parametrize("name", PEERS)
def test_each_peer_agrees_with_float64(name, job, reference):
    try:
        result = loss_peers.PEERS[name](job)
    except Absent as error:
        pytest.skip(str(error))
    assert reference.check(result)["error_over_budget"] <= 1


def test_a_wrong_gradient_a_wrong_loss_and_a_missing_gradient_are_refused(job, reference):
    loss, *gradients = loss_peers.ours(job)
    for wrong in (
        (loss + 0.01, *gradients), (loss, gradients[0] * 1.001, *gradients[1:]),
        (loss, *gradients[:-1], gradients[-1].roll(1, 0)), (loss, *gradients[:-1]), (loss * torch.nan, *gradients),
    ):  # fmt: skip
        with pytest.raises(WrongAnswer):
            reference.check(wrong)
