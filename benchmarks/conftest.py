"""The suite in front of pytest-benchmark: options, the race's rounds handed to its fixture, machine and commit.

`pytest benchmarks --benchmark-only` runs every contender of every workload. Contenders of a workload take turns in one
race, which its first test runs; each test then reports the rounds that its contender had there.
"""

import csv
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.harness.ceilings import measure_ceilings
from benchmarks.harness.environment import describe_environment
from benchmarks.harness.race import Budget, Race

_NOW = 0.0  # on the clock of `race_clock`


def race_clock() -> float:
    """The clock of reported rounds, which `report` puts forward by what each took in the race."""
    return _NOW


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("benchmarks")
    group.addoption("--bench-device", choices=("cpu", "cuda"), help="where to run; default: the GPU if there is one")
    group.addoption("--bench-smoke", action="store_true", help="smallest shapes, one round: shows that all runs")
    group.addoption("--bench-peers", help="contenders of scoring and steps to race, comma-separated; default: all")
    group.addoption("--bench-commit", help="what to record, not what git says")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--bench-smoke"):
        torch.compiler.set_stance("force_eager")  # compiling takes longer than all the rest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.benchmark(timer=race_clock))


def _environment(config: pytest.Config) -> dict[str, Any]:
    return describe_environment(torch.device(device_name(config)), config.getoption("--bench-commit"))


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Add the device, its driver and the versions of packages; leave out the host's name."""
    del machine_info["node"]
    machine_info |= {name: value for name, value in _environment(config).items() if name not in _OF_THE_RUN}


_OF_THE_RUN = "date", "commit", "dirty"


def pytest_benchmark_update_commit_info(config: pytest.Config, commit_info: dict[str, Any]) -> None:
    environment = _environment(config)
    commit_info |= {"id": environment["commit"], "dirty": environment["dirty"]}


def device_name(config: pytest.Config) -> str:
    """`"cuda"` (CUDA or HIP) or `"cpu"`."""
    return config.getoption("--bench-device") or ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Device that the contenders run on."""
    name = device_name(request.config)
    if name == "cuda" and not torch.cuda.is_available():
        pytest.exit("--bench-device cuda: there is no CUDA or HIP device", returncode=2)
    return torch.device(name)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test the workloads and contenders of its module, which has `WORKLOADS` by size and `NAMES`."""
    module, config = metafunc.module, metafunc.config
    size = "smoke" if config.getoption("--bench-smoke") else device_name(config)
    if "workload" in metafunc.fixturenames:
        metafunc.parametrize("workload", list(module.WORKLOADS[size]), scope="module")
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", chosen_names(config, module))


def chosen_names(config: pytest.Config, module: Any) -> list[str]:
    """The contenders of a module to race, in order; `UsageError` for one that is not among them."""
    chosen, names = config.getoption("--bench-peers"), list(module.NAMES)
    if chosen is None or not getattr(module, "CHOOSES_PEERS", False):
        return names
    wanted = next(csv.reader([chosen], skipinitialspace=True))  # a name with a comma stands in quotes
    if unknown := [name for name in wanted if name not in names]:
        raise pytest.UsageError(f"--bench-peers: {unknown} are not among {names}")
    return [name for name in names if name in wanted]


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest) -> list[str]:
    return chosen_names(request.config, request.module)


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest, workload: str) -> Any:
    """The workload of the test's module that has this name."""
    config = request.config
    return request.module.WORKLOADS["smoke" if config.getoption("--bench-smoke") else device_name(config)][workload]


@pytest.fixture(scope="session")
def ceilings(request: pytest.FixtureRequest, device: torch.device) -> dict[str, Any]:
    """Measure the device's ceilings, in this session, right before the first race is reported."""
    return measure_ceilings(device, smoke=request.config.getoption("--bench-smoke"))


@pytest.fixture(scope="session")
def budget(request: pytest.FixtureRequest) -> Budget:
    """Rounds of a race, as many as pytest-benchmark's options ask for."""
    option = request.config.getoption
    if option("--bench-smoke"):
        return Budget(0.0, 1, 1)
    return Budget(float(option("benchmark_max_time")), option("benchmark_min_rounds"))


@pytest.fixture
def report(benchmark: Any, budget: Budget, ceilings: dict[str, Any]) -> Callable[..., None]:
    """Report a contender's rounds and facts. Fails on a refused one and on a missed promise, skips an absent one.

    Of its facts `flops` (operations of one run) and `bytes` (moved by one run) become rates, beside the ceilings.
    """

    def report_lap(race: Race, name: str, **facts: Any) -> None:
        lap = race.laps.get(name)
        if lap is None or lap.absent is not None:
            pytest.skip(f"{name}: {lap.absent if lap else 'of another job'}")
        if lap.refused is not None:
            pytest.fail(f"{name} is not timed: {lap.refused}", pytrace=False)
        benchmark.group = race.group
        seconds = iter(lap.seconds)

        def replay() -> None:
            global _NOW
            _NOW += next(seconds)

        benchmark.pedantic(replay, rounds=len(lap.seconds))
        facts = {**race.facts, **lap.facts, **facts, "peak_extra_bytes": lap.peak_extra_bytes}
        if flops := facts.get("flops"):
            facts["tflop_per_s"] = flops / lap.median / 1e12
            facts["ceiling_tflop_per_s"] = ceilings["gemm_tflop_per_s"]
        if moved := facts.get("bytes"):
            facts["gb_per_s"] = moved / lap.median / 1e9
            facts["ceiling_gb_per_s"] = ceilings["copy_gb_per_s"]
        ratio, floor = race.ratio(name), race.floors.get(name)
        facts |= {"ratio_to_ours": ratio, "promised_ratio_to_ours": floor}
        benchmark.extra_info.update((key, value) for key, value in facts.items() if isinstance(value, int | float))
        if floor and budget.max_rounds > 1 and ratio is not None and not ratio >= floor:
            pytest.fail(f"{name}: {ratio:.2f} x {race.ours}, promised {floor:g}", pytrace=False)

    return report_lap
