"""`python -m benchmarks speed`: check and time everything: `pytest benchmarks --benchmark-only`, with a result file.

Behind `--` stand options of pytest: `-- --benchmark-autosave -k "Qwen3 and ours"`.
Without a CUDA or HIP device the command says so and exits with status 2, unless `--device cpu` asks for the CPU's
figures. `python -m benchmarks speed ab` races variants of one model in minutes of a GPU.
"""

import argparse
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.harness.environment import REPOSITORY, describe_environment, slug
from benchmarks.harness.results import RESULTS

PARTS = ("kernels", "scoring", "loss", "step", "turns")
"""Each is a file of this folder; `step` is `bench_step.py`."""

NO_DEVICE = 2  # exit code; an option that makes no sense gives it, too


def main(argv: list[str] | None = None) -> int:
    """Run the parts asked for; 0 if all of them passed."""
    if argv and argv[0] == "ab":
        from benchmarks.speed import ab

        return ab.main(argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help='"cuda" is HIP too')
    parser.add_argument("--only", choices=PARTS, action="append", help="part to measure; repeatable; default: all")
    parser.add_argument("--peers", help="race only these in scoring or steps: 'per span,ours'")
    parser.add_argument("--smoke", action="store_true", help="smallest shapes: shows that all runs, measures nothing")
    parser.add_argument("--seconds", default="60", help="time for the rounds of one workload; default: %(default)s")
    parser.add_argument("--rounds", help="fewest rounds; default: 5 on a GPU, 3 on a CPU")
    parser.add_argument("--into", type=Path, help="result file; default: <date>-<device>-<commit>.json of results")
    parser.add_argument("--commit", help="what to record, not what git says")
    parser.add_argument("more", nargs="*", metavar="OPTION", help="of pytest, behind --")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "no CUDA or HIP device here: nothing was run (python -m benchmarks speed --device cpu measures the CPU)",
            file=sys.stderr,
        )
        return NO_DEVICE
    environment = describe_environment(torch.device(options.device), options.commit)
    if environment["commit"] == "unknown":
        print("git cannot tell the commit here: pass --commit, or no figure says where it is from", file=sys.stderr)
    path = (options.into or RESULTS / f"{environment['date'][:10]}-{slug(environment)}.json").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [str(REPOSITORY / f"benchmarks/speed/bench_{part}.py") for part in options.only or PARTS]
    rounds = options.rounds or ("5" if options.device == "cuda" else "3")
    session = [
        *files, "--benchmark-only", "--tb=short", "-p", "no:cacheprovider", f"--rootdir={REPOSITORY}",
        f"--bench-device={options.device}", f"--benchmark-json={path}", f"--benchmark-max-time={options.seconds}",
        f"--benchmark-min-rounds={rounds}", *["--bench-smoke"] * options.smoke, *options.more,
    ]  # fmt: skip
    for name in ("peers", "commit"):
        session += [f"--bench-{name}={value}"] if (value := getattr(options, name)) else []
    return int(pytest.main(session))
