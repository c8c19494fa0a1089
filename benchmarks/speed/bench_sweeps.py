"""Measure how the cost of scoring grows with spans, completion length and group size."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.harness.options import workload_set
from benchmarks.harness.race import Budget, Figures, Lap, race, release_memory, replay_clock
from benchmarks.harness.workloads import SEED, random_model, shaped_job
from benchmarks.speed.bench_scoring import scoring_contenders
from benchmarks.speed.peers import PEERS

SWEPT = ("ours", "per span with logits_to_keep", "padded batches of 8 with logits_to_keep")


@dataclass(frozen=True)
class Scale:
    """Sweep: a model, the shape that all points share, and the points of each axis, which replace one number of it."""

    model: str
    dtype: torch.dtype
    shape: dict[str, int]
    points: dict[str, tuple[int, ...]]


SCALES = {
    "smoke": Scale(
        "qwen3-tiny",
        torch.float32,
        {"group": 2, "prompt": 20, "completion": 40, "spans": 2},
        {"spans": (1, 2), "completion": (30, 60), "group": (1, 2)},
    ),
    "cpu": Scale(
        "qwen3-40m",
        torch.float32,
        {"group": 2, "prompt": 110, "completion": 155, "spans": 5},
        {"spans": (1, 2, 4, 8), "completion": (96, 192, 384), "group": (1, 2, 4)},
    ),
    "cuda": Scale(
        "Qwen3-1.7B",
        torch.bfloat16,
        {"group": 8, "prompt": 110, "completion": 300, "spans": 8},
        {"spans": (1, 2, 4, 8, 16), "completion": (128, 256, 512, 1024, 2048), "group": (1, 2, 4, 8, 16, 32)},
    ),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    scale = SCALES[workload_set(metafunc.config)]
    points = [(axis, value) for axis, values in scale.points.items() for value in values]
    metafunc.parametrize("point", points, ids=[f"{axis}={value}" for axis, value in points], scope="module")


@pytest.fixture(scope="module")
def scale(request: pytest.FixtureRequest) -> Scale:
    return SCALES[workload_set(request.config)]


@pytest.fixture(scope="module")
def sweep_model(scale: Scale, device: torch.device) -> Iterator[PreTrainedModel]:
    yield random_model(scale.model, device=device, dtype=scale.dtype)
    release_memory(device)


@pytest.fixture(scope="module")
def sweep_laps(
    point: tuple[str, int],
    scale: Scale,
    sweep_model: PreTrainedModel,
    device: torch.device,
    budget: Budget,
    figures: Figures,
) -> dict[str, Lap]:
    axis, value = point
    job = shaped_job(**{**scale.shape, axis: value}, span_tokens=8).to(device)
    contenders = scoring_contenders(sweep_model, job, {name: PEERS[name] for name in SWEPT})
    points = sum(map(len, scale.points.values()))
    figures.workloads[f"sweep {axis}={value}"] = {**job.describe(), "model": scale.model, "seed": SEED}
    # The time for one workload is the time for the whole sweep.
    return race(contenders, device=device, budget=replace(budget, seconds=budget.seconds / points))


@pytest.mark.benchmark(timer=replay_clock)
@pytest.mark.parametrize("name", SWEPT)
def test_cost_growth(
    sweep_laps: dict[str, Lap], point: tuple[str, int], name: str, report: Callable[..., None]
) -> None:
    axis, value = point
    report(sweep_laps[name], group=f"sweep {axis}", axis=axis, value=value)
