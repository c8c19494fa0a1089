"""The weighted policy loss and its gradients from hidden states: ours against what trainers use.

A job is one training step's loss: forward and backward of the weighted, clipped, token-level (dapo) loss. Every
contender returns the loss and its gradients and is checked against float64 before it is timed.
"""

from collections.abc import Callable, Iterator

import pytest
import torch

from benchmarks.harness.race import Budget, Figures, Lap, race, release_memory
from benchmarks.harness.workloads import SEED
from benchmarks.speed.command import workload_set
from benchmarks.speed.loss_jobs import LINEAR, make_job
from benchmarks.speed.loss_peers import BOUND, CORRECTED, PEERS, linear_contenders

GROUP = "loss from hidden states"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("workload", list(LINEAR[workload_set(metafunc.config)]), scope="module")


@pytest.fixture(scope="module")
def laps(
    request: pytest.FixtureRequest, workload: str, device: torch.device, budget: Budget, figures: Figures
) -> Iterator[dict[str, Lap]]:
    """By the device's clock: 2,048 rows take less time than launches from Python do."""
    shape = LINEAR[workload_set(request.config)][workload]
    facts = {**vars(shape), "dtype": str(shape.dtype).removeprefix("torch."), "seed": SEED}
    figures.workloads[f"{GROUP}, {workload}"] = facts
    yield race(linear_contenders(make_job(shape, device)), device=device, budget=budget, clock="device")
    release_memory(device)


@pytest.mark.parametrize("name", [*PEERS, *CORRECTED, BOUND])
def test_time(
    pytestconfig: pytest.Config, laps: dict[str, Lap], workload: str, name: str, report: Callable[..., None]
) -> None:
    report(laps[name], group=f"{GROUP}, {workload}", flops=LINEAR[workload_set(pytestconfig)][workload].flops)
