"""Fixtures of the benchmarks: the device, the time budget, and where figures are reported to."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.race import Budget, Figures, Lap, replay_clock, spread
from benchmarks.selection import add_options, device_name


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FIGURES] = Figures()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (path := session.config.getoption("--figures")) is not None:
        session.config.stash[_FIGURES].write(Path(path))


_FIGURES: pytest.StashKey[Figures] = pytest.StashKey()


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> Figures:
    return request.config.stash[_FIGURES]


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the contenders run."""
    name = device_name(request.config)
    if name == "cuda" and not torch.cuda.is_available():
        pytest.exit("--bench-device cuda: there is no CUDA or HIP device", returncode=2)
    return torch.device(name)


@pytest.fixture(scope="session")
def budget(request: pytest.FixtureRequest) -> Budget:
    """Rounds of a race; a single one when pytest-benchmark is switched off, as it is in plain test runs."""
    if request.config.getoption("benchmark_disable") and not request.config.getoption("benchmark_enable"):
        return Budget(0.0, 1, 1)
    return Budget(request.config.getoption("--bench-seconds"), request.config.getoption("--bench-rounds"))


@pytest.fixture
def report(benchmark: Any, figures: Figures) -> Callable[..., None]:
    """Report a lap: to pytest-benchmark and to the figures. Fails on a refused one, skips an absent one.

    `group` says what the contenders have in common (the workload); `facts` are numbers to keep beside the time:
    `flops` (operations of one run) and `bytes` (moved by one run) become rates in the result file.
    """

    def report_lap(lap: Lap, *, group: str, **facts: Any) -> None:
        if lap.refused is not None:
            figures.refused.append({"group": group, "name": lap.name, "reason": lap.refused})
            pytest.fail(f"{lap.name} is not timed: {lap.refused}", pytrace=False)
        if lap.absent is not None:
            figures.absent.append({"group": group, "name": lap.name, "reason": lap.absent})
            pytest.skip(f"{lap.name}: {lap.absent}")
        facts = {**lap.facts, **facts}
        figures.figures.append(
            {
                "group": group,
                "name": lap.name,
                "seconds": spread(lap.seconds),
                "peak_extra_bytes": lap.peak_extra_bytes,
                **facts,
            }
        )
        benchmark.group = group
        benchmark.extra_info.update(facts)
        benchmark.pedantic(replay_clock.rounds(lap.seconds), rounds=len(lap.seconds), iterations=1)

    return report_lap


@pytest.fixture
def hold(budget: Budget, figures: Figures) -> Callable[..., None]:
    """Record what each contender costs in units of ours, then fail if one costs less than its floor.

    `ratios` and `floors` are by name; `short` describes promises that were missed beside these.
    """

    def hold_ratios(group: str, ratios: dict[str, float], floors: dict[str, float], short: Sequence[str] = ()) -> None:
        missed = list(short)
        for name, ratio in ratios.items():
            floor = floors.get(name)
            figures.ratios.append({"group": group, "of": name, "to": "ours", "ratio": ratio, "floor": floor})
            line = f"{name}: {ratio:.2f} x ours" + (f", promised {floor:g}" if floor else "")
            print(f"{group}: {line}")
            if floor and not ratio >= floor:
                missed.append(line)
        if budget.max_rounds == 1:
            pytest.skip("one round is no measurement")
        if missed:
            pytest.fail("; ".join(missed), pytrace=False)

    return hold_ratios
