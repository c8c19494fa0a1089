"""The weighted policy loss and its gradients from hidden states: ours against what trainers use.

A job is one training step's loss: forward and backward of the weighted, clipped, token-level (dapo) loss. Every
contender returns the loss and its gradients and is checked against float64 before it is timed.
"""

from collections.abc import Callable, Iterator

import pytest
import torch

from benchmarks.harness.race import Budget, Race, race, release_memory
from benchmarks.speed.loss_jobs import LINEAR, Shape, make_job
from benchmarks.speed.loss_peers import BOUND, OURS, PEERS, linear_contenders

WORKLOADS = LINEAR
NAMES = [*PEERS, BOUND]


@pytest.fixture(scope="module")
def loss_race(workload: str, chosen: Shape, device: torch.device, budget: Budget) -> Iterator[Race]:
    """By the device's clock: 2,048 rows take less time than launches from Python do."""
    laps = race(linear_contenders(make_job(chosen, device)), device=device, budget=budget, clock="device")
    facts = {"tokens": chosen.tokens, "hidden_size": chosen.hidden, "vocabulary": chosen.vocabulary}
    yield Race(f"loss from hidden states, {workload}", laps, {**facts, "flops": chosen.flops}, OURS)
    release_memory(device)


def test_loss(loss_race: Race, name: str, report: Callable[..., None]) -> None:
    report(loss_race, name)
