"""The weighted policy loss and its gradients, from hidden states and from logits: ours against what trainers use.

A job is one training step's loss: forward and backward of the weighted, clipped, token-level (dapo) loss. Every
contender returns the loss and its gradients and is checked against float64 before it is timed.
"""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from benchmarks.harness.race import Budget, Figures, Lap, race, release_memory, replay_clock, times_ours
from benchmarks.harness.workloads import SEED
from benchmarks.speed.command import workload_set
from benchmarks.speed.loss_jobs import LINEAR, LOGITS, Shape, make_job, make_logits_job
from benchmarks.speed.loss_peers import BOUND, HALF, LOGITS_PEERS, OURS, PEERS, linear_contenders, logits_contenders


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, shapes in (("linear_workload", LINEAR), ("logits_workload", LOGITS)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, list(shapes[workload_set(metafunc.config)]), scope="module")


def _record(figures: Figures, workload: str, shape: Shape) -> None:
    figures.workloads[workload] = {**vars(shape), "dtype": str(shape.dtype).removeprefix("torch."), "seed": SEED}


def race_from_hidden_states(shape: Shape, device: torch.device, budget: Budget) -> dict[str, Lap]:
    """By the device's clock: 2,048 rows take less time than launches from Python do."""
    return race(linear_contenders(make_job(shape, device)), device=device, budget=budget, clock="device")


def race_from_logits(shape: Shape, device: torch.device, budget: Budget) -> dict[str, Lap]:
    return race(logits_contenders(make_logits_job(shape, device)), device=device, budget=budget, clock="device")


@pytest.fixture(scope="module")
def linear_laps(
    request: pytest.FixtureRequest, linear_workload: str, device: torch.device, budget: Budget, figures: Figures
) -> Iterator[dict[str, Lap]]:
    shape = LINEAR[workload_set(request.config)][linear_workload]
    _record(figures, f"loss from hidden states, {linear_workload}", shape)
    yield race_from_hidden_states(shape, device, budget)
    gc.collect()
    release_memory(device)


@pytest.fixture(scope="module")
def logits_laps(
    request: pytest.FixtureRequest, logits_workload: str, device: torch.device, budget: Budget, figures: Figures
) -> Iterator[dict[str, Lap]]:
    shape = LOGITS[workload_set(request.config)][logits_workload]
    _record(figures, f"loss from logits, {logits_workload}", shape)
    yield race_from_logits(shape, device, budget)
    gc.collect()
    release_memory(device)


@pytest.mark.benchmark(timer=replay_clock)
@pytest.mark.parametrize("name", [*PEERS, HALF, BOUND])
def test_time_from_hidden_states(
    pytestconfig: pytest.Config,
    linear_laps: dict[str, Lap],
    linear_workload: str,
    name: str,
    report: Callable[..., None],
) -> None:
    shape = LINEAR[workload_set(pytestconfig)][linear_workload]
    report(linear_laps[name], group=f"loss from hidden states, {linear_workload}", flops=shape.flops)


@pytest.mark.benchmark(timer=replay_clock)
@pytest.mark.parametrize("name", list(LOGITS_PEERS))
def test_time_from_logits(
    pytestconfig: pytest.Config,
    logits_laps: dict[str, Lap],
    logits_workload: str,
    name: str,
    report: Callable[..., None],
) -> None:
    shape = LOGITS[workload_set(pytestconfig)][logits_workload]
    # Counted for all: the logits read once and the gradient written once. A second read is the contender's own.
    moved = 2.0 * shape.tokens * shape.vocabulary * shape.dtype.itemsize
    report(logits_laps[name], group=f"loss from logits, {logits_workload}", bytes=moved)


def test_ours_beats_its_peers_from_hidden_states(
    pytestconfig: pytest.Config, linear_laps: dict[str, Lap], linear_workload: str, hold: Callable[..., None]
) -> None:
    factor = LINEAR[workload_set(pytestconfig)][linear_workload].fastest_peer
    ratios, floors, short = times_ours(linear_laps), {}, []
    if factor is not None:
        floors = {name: factor for name in PEERS if not name.startswith(OURS)} | {BOUND: 0.88}
        gain = 1 / ratios[HALF] if HALF in ratios else None
        short = [f"{HALF}: {gain:.2f} x faster, promised 1.8"] if gain is not None and gain < 1.8 else []
    hold(f"loss from hidden states, {linear_workload}", ratios, floors, short)


def test_ours_beats_its_peers_from_logits(
    pytestconfig: pytest.Config, logits_laps: dict[str, Lap], logits_workload: str, hold: Callable[..., None]
) -> None:
    floors = {"Liger logits-level": 1.3} if workload_set(pytestconfig) == "cuda" else {}
    hold(f"loss from logits, {logits_workload}", times_ours(logits_laps), floors)
