"""Fixtures of the benchmarks: the device, the time for a race, the report of figures and the file that keeps them."""

import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.ceilings import measure_ceilings
from benchmarks.harness.environment import describe_environment
from benchmarks.harness.race import Absent, Budget, Figures, Lap, spread
from benchmarks.harness.results import write_json
from benchmarks.harness.workloads import SEED
from benchmarks.speed.command import add_options, device_name, workload_set

_FIGURES: pytest.StashKey[Figures] = pytest.StashKey()
_DOCUMENT: pytest.StashKey[dict[str, Any]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FIGURES] = Figures()
    if path := config.getoption("--bench-into"):
        before = json.loads(Path(path).read_text()) if Path(path).exists() else {"schema": 1, "parts": {}}
        environment = describe_environment(torch.device(device_name(config)), config.getoption("--bench-commit"))
        config.stash[_DOCUMENT] = before | {"environment": environment}


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Write what there is: a race's figures come with its last test."""
    _write(item.config)


def pytest_sessionfinish(session: pytest.Session) -> None:
    _write(session.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    if report.failed:
        item.config.stash[_FIGURES].failed.append(item.nodeid)
    return report


def _write(config: pytest.Config) -> None:
    document = config.stash.get(_DOCUMENT, None)
    if document is None:
        return
    figures, environment = config.stash[_FIGURES], document["environment"]
    document["parts"][config.getoption("--bench-part")] = {
        "commit": environment["commit"],
        "dirty": environment["dirty"],
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "select": config.getoption("-k") or None,
        "smoke": config.getoption("--bench-smoke"),
        "seed": SEED,
        **vars(figures),
    }
    write_json(Path(config.getoption("--bench-into")), document)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip what compares with a contender that could not run."""
    try:
        return (yield)
    except Absent as error:
        pytest.skip(str(error))


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
def ceilings(request: pytest.FixtureRequest, device: torch.device) -> dict[str, Any]:
    """Measure the device's ceilings, in this session, right before the first race is reported."""
    measured = measure_ceilings(device, smoke=workload_set(request.config) == "smoke")
    if _DOCUMENT in request.config.stash:
        request.config.stash[_DOCUMENT]["ceilings"] = measured
    return measured


@pytest.fixture(scope="session")
def budget(request: pytest.FixtureRequest) -> Budget:
    """Rounds of a race; a single one in plain test runs."""
    rounds = request.config.getoption("--bench-rounds")
    return Budget(request.config.getoption("--bench-seconds"), rounds) if rounds else Budget(0.0, 1, 1)


@pytest.fixture
def report(figures: Figures, ceilings: dict[str, Any]) -> Callable[..., None]:
    """Report a lap: print it, and keep its figures. Fails on a refused one, skips an absent one.

    `group` says what the contenders have in common (the workload); `facts` are numbers to keep beside the time:
    `flops` (operations of one run) and `bytes` (moved by one run) become rates and shares of the ceilings.
    """

    def report_lap(lap: Lap, *, group: str, **facts: Any) -> None:
        if lap.refused is not None:
            figures.refused.append({"group": group, "name": lap.name, "reason": lap.refused})
            pytest.fail(f"{lap.name} is not timed: {lap.refused}", pytrace=False)
        if lap.absent is not None:
            figures.absent.append({"group": group, "name": lap.name, "reason": lap.absent})
            pytest.skip(f"{lap.name}: {lap.absent}")
        facts = {**lap.facts, **facts}
        if flops := facts.get("flops"):
            facts["tflop_per_s"] = flops / lap.median / 1e12
            facts["share_of_gemm"] = facts["tflop_per_s"] / ceilings["gemm_tflop_per_s"]
        if moved := facts.get("bytes"):
            facts["gb_per_s"] = moved / lap.median / 1e9
            facts["share_of_copy"] = facts["gb_per_s"] / ceilings["copy_gb_per_s"]
        seconds = {"seconds": spread(lap.seconds), "peak_extra_bytes": lap.peak_extra_bytes}
        figures.figures.append({"group": group, "name": lap.name, **seconds, **facts})
        print(f"{group}: {lap.name}, median of {len(lap.seconds)}: {lap.median * 1e3:,.3f} ms")

    return report_lap


@pytest.fixture
def hold(budget: Budget, figures: Figures) -> Callable[..., None]:
    """Record what each contender costs in units of ours, then fail if one costs less than its floor.

    `ratios` and `floors` are by name; `short` describes promises that were missed beside these.
    """

    def hold_ratios(
        group: str, ratios: dict[str, float], floors: dict[str, float], short: Sequence[str] = (), ours: str = "ours"
    ) -> None:
        missed = list(short)
        for name, ratio in ratios.items():
            floor = floors.get(name)
            figures.ratios.append({"group": group, "of": name, "to": ours, "ratio": ratio, "floor": floor})
            line = f"{name}: {ratio:.2f} x {ours}" + (f", promised {floor:g}" if floor else "")
            print(f"{group}: {line}")
            if floor and not ratio >= floor:
                missed.append(line)
        if budget.max_rounds == 1:
            pytest.skip("one round is no measurement")
        if missed:
            pytest.fail("; ".join(missed), pytrace=False)

    return hold_ratios
