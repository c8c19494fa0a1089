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
from benchmarks.speed.loss_peers import (
    BOUND,
    CORRECTED,
    HALF,
    LOGITS_PEERS,
    OURS,
    PEERS,
    linear_contenders,
    logits_contenders,
)

HIDDEN, FROM_LOGITS = "loss from hidden states", "loss from logits"
NAMES = {HIDDEN: [*PEERS, HALF, *CORRECTED, BOUND], FROM_LOGITS: list(LOGITS_PEERS)}
"""Contenders by the kind of the loss."""


def shapes(config: pytest.Config) -> dict[tuple[str, str], Shape]:
    """By the kind of the loss and the workload's name."""
    chosen = workload_set(config)
    kinds = {HIDDEN: LINEAR[chosen], FROM_LOGITS: LOGITS[chosen]}
    return {(kind, name): shape for kind, named in kinds.items() for name, shape in named.items()}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize(("kind", "workload"), list(shapes(metafunc.config)), scope="module")


def race_losses(kind: str, shape: Shape, device: torch.device, budget: Budget) -> dict[str, Lap]:
    """By the device's clock: 2,048 rows take less time than launches from Python do."""
    if kind == HIDDEN:
        contenders = linear_contenders(make_job(shape, device))
    else:
        contenders = logits_contenders(make_logits_job(shape, device))
    return race(contenders, device=device, budget=budget, clock="device")


@pytest.fixture(scope="module")
def laps(
    request: pytest.FixtureRequest, kind: str, workload: str, device: torch.device, budget: Budget, figures: Figures
) -> Iterator[dict[str, Lap]]:
    shape = shapes(request.config)[kind, workload]
    facts = {**vars(shape), "dtype": str(shape.dtype).removeprefix("torch."), "seed": SEED}
    figures.workloads[f"{kind}, {workload}"] = facts
    yield race_losses(kind, shape, device, budget)
    gc.collect()
    release_memory(device)


@pytest.mark.benchmark(timer=replay_clock)
@pytest.mark.parametrize("name", dict.fromkeys(name for names in NAMES.values() for name in names))
def test_time(
    pytestconfig: pytest.Config, laps: dict[str, Lap], kind: str, workload: str, name: str, report: Callable[..., None]
) -> None:
    if name not in laps:
        pytest.skip("no contender there")
    shape = shapes(pytestconfig)[kind, workload]
    # Counted for all from logits: those read once and the gradient written once. A second read is the contender's own.
    work = {"flops": shape.flops} if kind == HIDDEN else {
        "bytes": 2.0 * shape.tokens * shape.vocabulary * shape.dtype.itemsize
    }  # fmt: skip
    report(laps[name], group=f"{kind}, {workload}", **work)


def test_ours_beats_its_peers(
    pytestconfig: pytest.Config, laps: dict[str, Lap], kind: str, workload: str, hold: Callable[..., None]
) -> None:
    factor = shapes(pytestconfig)[kind, workload].fastest_peer
    ratios, floors, short = times_ours(laps), {}, []
    if kind == FROM_LOGITS and workload_set(pytestconfig) == "cuda":
        floors = {"Liger logits-level": 1.3}
    elif factor is not None:
        floors = {name: factor for name in PEERS if not name.startswith(OURS)} | {BOUND: 0.88}
        gain = 1 / ratios[HALF] if HALF in ratios else None
        short = [f"{HALF}: {gain:.2f} x faster, promised 1.8"] if gain is not None and gain < 1.8 else []
        costly = [name for name in CORRECTED if ratios.get(name, 0.0) > 1.03]
        short += [f"{name}: {ratios[name]:.3f} of ours, promised 1.03" for name in costly]
    hold(f"{kind}, {workload}", ratios, floors, short)
