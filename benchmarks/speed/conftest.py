"""Fixtures of the benchmarks: the device, the time budget, and the report of figures."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.options import add_options, device_name
from benchmarks.harness.race import Absent, Budget, Figures, FiguresFile, Lap, replay_clock, spread

RESERVE = 0.1
"""Share of a session's time kept for what is under way when races must end."""

_FIGURES: pytest.StashKey[Figures] = pytest.StashKey()
_FILE: pytest.StashKey[FiguresFile] = pytest.StashKey()
_UNTIL: pytest.StashKey[float] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--figures")
    config.stash[_FIGURES] = Figures()
    config.stash[_FILE] = FiguresFile(config.stash[_FIGURES], None if path is None else Path(path))
    config.stash[_UNTIL] = time.monotonic() + (1 - RESERVE) * config.getoption("--bench-limit")


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Write what there is; where the time is over, end before the next race is prepared."""
    item.config.stash[_FILE].finish()
    if time.monotonic() > item.config.stash[_UNTIL] and nextitem is not None and _race(item) != _race(nextitem):
        item.config.stash[_FIGURES].cut.append({"group": nextitem.nodeid, "name": "and all that comes after it"})
        item.session.shouldstop = "the time for this part is over"


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash[_FILE].write()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip what compares with a contender that could not run."""
    try:
        return (yield)
    except Absent as error:
        pytest.skip(str(error))


def _race(item: pytest.Item) -> dict[str, Any]:
    """Name the race of an item: its parameters without the contender's name."""
    parameters = getattr(item, "callspec", None)
    return {k: v for k, v in parameters.params.items() if k != "name"} if parameters is not None else {}


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> Figures:
    return request.config.stash[_FIGURES]


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Device that the contenders run on."""
    name = device_name(request.config)
    if name == "cuda" and not torch.cuda.is_available():
        pytest.exit("--bench-device cuda: there is no CUDA or HIP device", returncode=2)
    return torch.device(name)


@pytest.fixture(scope="session")
def budget(request: pytest.FixtureRequest) -> Budget:
    """Rounds of a race; a single one when pytest-benchmark is switched off, as it is in plain test runs."""
    config = request.config
    limits = {"until": config.stash[_UNTIL], "note": config.stash[_FILE].note}
    if config.getoption("benchmark_disable") and not config.getoption("benchmark_enable"):
        return Budget(0.0, 1, 1, **limits)
    return Budget(config.getoption("--bench-seconds"), config.getoption("--bench-rounds"), **limits)


@pytest.fixture(scope="session")
def sampling_budget(request: pytest.FixtureRequest, budget: Budget) -> Budget | None:
    """Rounds of sampling, which takes far longer than the step after it; None: it is left out."""
    seconds = request.config.getoption("--bench-sampling-seconds")
    return replace(budget, seconds=seconds, min_rounds=min(budget.min_rounds, 2)) if seconds > 0 else None


@pytest.fixture
def report(benchmark: Any, figures: Figures) -> Callable[..., None]:
    """Report a lap: to pytest-benchmark and to the figures. Fails on a refused one, skips an absent one.

    `group` says what the contenders have in common (the workload); `facts` are numbers to keep beside the time:
    `flops` (operations of one run) and `bytes` (moved by one run) become rates in the result file.
    """

    def report_lap(lap: Lap, *, group: str, **facts: Any) -> None:
        if lap.cut:
            figures.cut.append({"group": group, "name": lap.name})
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
                **({"cut": True} if lap.cut else {}),
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
