"""Profile one training step of a contender on the device, under `torch.profiler`.

Gradients are checked where steps are raced, in `bench_step.py`; here they are not.
"""

import functools
import statistics
from collections.abc import Iterator

import pytest
import torch

from benchmarks.harness.options import chosen_peers, workload_set
from benchmarks.harness.race import Absent, Figures, release_memory
from benchmarks.harness.workloads import policy
from benchmarks.speed.bench_step import WORKLOADS
from benchmarks.speed.profiles import device_events, summarize
from benchmarks.speed.replay import Replay, Stopwatch
from benchmarks.speed.step_peers import EXACT, STEP_PEERS
from benchmarks.speed.step_reference import taken_gradients

WARM, TIMED = 2, 3
"""Steps before any is timed, and steps timed without the profiler."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = metafunc.config.getoption("--bench-peers")
    names = chosen_peers(metafunc.config, list(STEP_PEERS)) if given else [EXACT]
    metafunc.parametrize("workload", list(WORKLOADS[workload_set(metafunc.config)]))
    metafunc.parametrize("name", names)


@pytest.fixture
def replay(request: pytest.FixtureRequest, workload: str, device: torch.device) -> Iterator[Replay]:
    chosen = WORKLOADS[workload_set(request.config)][workload]
    make = functools.partial(policy, chosen.model, lora=chosen.lora, device=device, dtype=chosen.dtype)
    yield Replay(make(), chosen.rollouts().to(device))
    release_memory(device)


def test_where_a_step_takes_its_time(replay: Replay, workload: str, name: str, figures: Figures) -> None:
    def step() -> float:
        stopwatch = Stopwatch(replay.device)
        STEP_PEERS[name].run(replay, stopwatch)
        taken_gradients(replay.policy)
        return sum(stopwatch.seconds.values())

    try:
        for _ in range(WARM):
            step()
    except Absent as error:
        pytest.skip(str(error))
    seconds = statistics.median(step() for _ in range(TIMED))
    found = summarize(device_events(step, replay.device), seconds)
    figures.profiles.append({"group": f"profile, {workload}", "name": name, **found})
    print(f"{workload}, {name}: {seconds:.3f} s, the device idle for {found['idle_share']:.0%}")
    for line in found["classes"]:
        print(f"  {line['name']}: {line['seconds']:.3f} s, {line['share']:.0%}, {line['launches']} launches")
    assert found["launches"] > 0
