"""Options of a run: on which device, and whether in full or as a smoke run."""

import csv
import math

import pytest
import torch


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("benchmarks")
    group.addoption("--bench-device", choices=("cpu", "cuda"), help="where to run; default: the GPU if there is one")
    group.addoption("--bench-smoke", action="store_true", help="smallest shapes: shows that all runs, measures nothing")
    group.addoption("--bench-seconds", type=float, default=60.0, help="time for the rounds of one race")
    group.addoption("--bench-rounds", type=int, default=5, help="fewest rounds of one race")
    group.addoption("--bench-limit", type=float, default=math.inf, help="seconds for the whole session")
    group.addoption("--bench-sampling-seconds", type=float, default=60.0, help="for the sampling of a step; 0: none")
    group.addoption("--bench-peers", help="contenders to race, comma-separated; default: all")
    group.addoption("--figures", help="JSON file to write every figure to")


def device_name(config: pytest.Config) -> str:
    """`"cuda"` (CUDA or HIP) or `"cpu"`."""
    return config.getoption("--bench-device") or ("cuda" if torch.cuda.is_available() else "cpu")


def workload_set(config: pytest.Config) -> str:
    """Key of the workloads to run: `"smoke"`, or the device's name for those of full size."""
    return "smoke" if config.getoption("--bench-smoke") else device_name(config)


def chosen_peers(config: pytest.Config, known: list[str]) -> list[str]:
    """Names of the contenders to race, in the order of `known`; `UsageError` for one that is not among them."""
    given = config.getoption("--bench-peers")
    if given is None:
        return known
    names = next(csv.reader([given], skipinitialspace=True))  # a name with a comma stands in quotes
    if unknown := [name for name in names if name not in known]:
        raise pytest.UsageError(f"--peers: {unknown} are not among {known}")
    return [name for name in known if name in names]
