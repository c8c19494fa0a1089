"""`python -m benchmarks speed`: measure the device's ceilings, check and time everything, write one JSON file.

Each part is a session of pytest of its own, which writes the file anew after every race: what is killed keeps the races
that it had finished. Without a CUDA or HIP device the command says so and exits with status 2, unless `--device cpu`
asks for the CPU's figures. It exits with 1 if a part failed.
"""

import csv
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
import tyro

from benchmarks.harness.environment import REPOSITORY, describe_environment, slug
from benchmarks.harness.results import RESULTS

PARTS = ("kernels", "scoring", "loss", "step", "turns")
"""Each is a file of this folder; `step` is `bench_step.py`."""

PEERS_OF = ("scoring", "step")
"""Parts whose contenders can be chosen."""

FAILED, NO_DEVICE = 1, 2  # exit codes; an option that makes no sense gives the latter, too


@dataclass(frozen=True)
class Options:
    """Choose what is measured, for how long, and where figures go."""

    device: Literal["cuda", "cpu"] = "cuda"
    """Device; "cuda" is HIP too."""
    only: tyro.conf.UseAppendAction[tuple[Literal["kernels", "scoring", "loss", "step", "turns"], ...]] = ()
    """Part to measure; repeatable; by default all."""
    select: str | None = None
    """pytest's -k for the part, to measure a piece of it."""
    peers: str | None = None
    """Race only these in scoring or steps, comma-separated, a name with a comma in quotes: 'per span,ours'."""
    smoke: tyro.conf.FlagCreatePairsOff[bool] = False
    """Take the smallest shapes: shows that all runs, measures nothing."""
    seconds: float = 60.0
    """Time for the rounds of one workload."""
    rounds: int | None = None
    """Fewest rounds; by default 5 on a GPU, 3 on a CPU."""
    results: Path = RESULTS
    """Folder of result files."""
    into: Path | None = None
    """Result file, whose other parts stay; by default <date>-<device>-<commit>.json."""
    commit: str | None = None
    """What to record, not what git says."""


def main(argv: list[str] | None = None) -> int:
    """Run the parts asked for; 0 if all of them passed."""
    if argv[:1] == ["ab"]:
        from benchmarks.speed import ab

        return ab.main(argv[1:])
    options = tyro.cli(Options, prog="python -m benchmarks speed", description=__doc__, args=argv)
    parts = options.only or PARTS
    if options.peers and not set(parts) & set(PEERS_OF):
        print(f"--peers is for {', '.join(PEERS_OF)}", file=sys.stderr)
        return NO_DEVICE
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "no CUDA or HIP device here: nothing was run (python -m benchmarks speed --device cpu measures the CPU)",
            file=sys.stderr,
        )
        return NO_DEVICE
    environment = describe_environment(torch.device(options.device), options.commit)
    if environment["commit"] == "unknown":
        print("git cannot tell the commit here: pass --commit, or no figure says where it is from", file=sys.stderr)
    path = (options.into or options.results / f"{environment['date'][:10]}-{slug(environment)}.json").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    failed = []
    for part in parts:
        print(f"== {part} -> {path}", flush=True)
        if subprocess.run(session(part, options, path), cwd=REPOSITORY, check=False).returncode:
            failed.append(part)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return FAILED if failed else 0


def session(part: str, options: Options, path: Path) -> list[str]:
    """The command of a part's session of pytest, which `conftest.py` gives its options."""
    command = [sys.executable, "-m", "pytest", f"benchmarks/speed/bench_{part}.py"]
    command += ["-p", "no:cacheprovider", "-s", "--tb=short"]
    command += [f"--bench-device={options.device}", f"--bench-part={part}", f"--bench-into={path}"]
    rounds = options.rounds or (5 if options.device == "cuda" else 3)
    command += [f"--bench-seconds={options.seconds}", f"--bench-rounds={rounds}"]
    command += [f"--bench-commit={options.commit}"] if options.commit else []
    command += [f"--bench-peers={options.peers}"] if options.peers and part in PEERS_OF else []
    return command + ["--bench-smoke"] * options.smoke + (["-k", options.select] if options.select else [])


def add_options(parser: pytest.Parser) -> None:
    """Options of a session, as `session` gives them."""
    group = parser.getgroup("benchmarks")
    group.addoption("--bench-device", choices=("cpu", "cuda"), help="where to run; default: the GPU if there is one")
    group.addoption("--bench-smoke", action="store_true", help="smallest shapes: shows that all runs, measures nothing")
    group.addoption("--bench-seconds", type=float, default=60.0, help="time for the rounds of one race")
    group.addoption("--bench-rounds", type=int, help="fewest rounds of one race; default: a single one")
    group.addoption("--bench-peers", help="contenders to race, comma-separated; default: all")
    group.addoption("--bench-part", default="part", help="name of the part in the result file")
    group.addoption("--bench-into", help="result file")
    group.addoption("--bench-commit", help="what to record, not what git says")


def device_name(config: pytest.Config) -> str:
    """`"cuda"` (CUDA or HIP) or `"cpu"`."""
    return config.getoption("--bench-device") or ("cuda" if torch.cuda.is_available() else "cpu")


def workload_set(config: pytest.Config) -> str:
    """Key of the workloads to run: `"smoke"`, or the device's name for those of full size."""
    return "smoke" if config.getoption("--bench-smoke") else device_name(config)


def chosen_peers(config: pytest.Config, known: list[str]) -> list[str]:
    """Names of the contenders to race, in the order of `known`; `UsageError` for one that is not among them."""
    chosen = config.getoption("--bench-peers")
    if chosen is None:
        return known
    names = next(csv.reader([chosen], skipinitialspace=True))  # a name with a comma stands in quotes
    if unknown := [name for name in names if name not in known]:
        raise pytest.UsageError(f"--peers: {unknown} are not among {known}")
    return [name for name in known if name in names]
