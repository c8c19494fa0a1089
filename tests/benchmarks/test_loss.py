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


@pytest.mark.parametrize("name", loss_peers.LOGITS_PEERS)
def test_each_peer_from_logits_agrees_with_float64(name):
    job = loss_jobs.make_logits_job(loss_jobs.Shape(48, 0, 160, torch.float32), CPU)
    contender = next(c for c in loss_peers.logits_contenders(job) if c.name == name)
    try:
        result = contender.run()
    except Absent as error:
        pytest.skip(str(error))
    contender.check(result)


def test_a_wrong_gradient_a_wrong_loss_and_a_missing_gradient_are_refused(job, reference):
    loss, *gradients = loss_peers.ours(job)
    for wrong in (
        (loss + 0.01, *gradients),
        (loss, gradients[0] * 1.001, *gradients[1:]),
        (loss, *gradients[:-1], gradients[-1].roll(1, 0)),
        (loss, *gradients[:-1]),
        (loss * torch.nan, *gradients),
    ):
        with pytest.raises(WrongAnswer):
            reference.check(wrong)


def test_half_the_groups_at_zero_advantage_is_the_same_job_on_fewer_rows(job):
    contender = next(c for c in loss_peers.linear_contenders(job) if c.name == loss_peers.HALF)
    result = contender.run()
    contender.check(result)
    assert (result[1][::2] == 0).all()
    assert result[1][1::2].abs().max() > 0
