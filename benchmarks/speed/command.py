"""`python -m benchmarks speed`: test on the device, measure its ceilings, time everything, write one JSON file.

The file is written as the run goes: a part that is cut off, or killed, leaves its measurements. Without a CUDA or HIP
device the command says so and exits with status 2, unless `--device cpu` asks for the CPU's figures. It exits with 1 if
a part failed, with 3 if none failed but one was cut.
"""

import argparse
import contextlib
import functools
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.environment import describe_environment, slug
from benchmarks.harness.parts import INTERRUPTED, PARTS, Result, missing_plugins, read_results, run_part, with_part
from benchmarks.harness.plots import plot_results
from benchmarks.harness.progress import write_json
from benchmarks.harness.results import RESULTS

FAILED, NO_DEVICE, CUT = 1, 2, 3


def main(argv: list[str] | None = None) -> int:
    """Run the parts asked for and merge them into the result file; 0 if all of them passed."""
    options = parse_options(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "no CUDA or HIP device here: nothing was run (python -m benchmarks speed --device cpu measures the CPU)",
            file=sys.stderr,
        )
        return NO_DEVICE
    device = torch.device(options.device)
    environment = describe_environment(device, options.commit)
    if environment["commit"] == "unknown":
        print("git cannot tell the commit here: pass --commit, or no figure says where it is from", file=sys.stderr)
    path = options.into or options.results / f"{environment['date'][:10]}-{slug(environment)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, str] = {}
    with _ended_like_interrupted():
        for part in options.only or PARTS:
            print(f"== {part}", flush=True)
            save = functools.partial(_save, path, read_results(path), environment, part)
            result = run_part(part, device, options, save)
            save(result)
            outcomes[part] = result["outcome"]
            because = f" ({result['reason']})" if result["reason"] else ""
            print(f"== {part}: {result['outcome']}{because}, {result['took_seconds']:.0f} s -> {path}", flush=True)
            if result["reason"] == INTERRUPTED:
                break
    try:
        for picture in plot_results(path):
            print(f"== {picture}")
    except ImportError as error:
        print(f"== no pictures: {error}")
    for outcome in ("failed", "cut"):
        if named := [part for part, found in outcomes.items() if found == outcome]:
            print(f"{outcome}: {', '.join(named)}", file=sys.stderr)
    found = set(outcomes.values())
    return FAILED if "failed" in found else CUT if "cut" in found else 0


def _save(path: Path, before: dict[str, Any], environment: dict[str, Any], part: str, result: Result) -> None:
    write_json(path, with_part(before, environment, part, result))


@contextlib.contextmanager
def _ended_like_interrupted() -> Iterator[None]:
    """Take SIGTERM (`timeout`, say) for Ctrl-C, so that the part under way is stopped and merged."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks speed", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cuda is HIP, too (default)")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="a part; repeatable; default: all")
    parser.add_argument("--select", help="pytest's -k for the part, to measure a piece of it")
    parser.add_argument(
        "--peers",
        help="race only these in scoring, steps or profiles, comma-separated, a name with a comma in quotes: "
        "'per span,ours'",
    )
    parser.add_argument("--limit", type=float, help="seconds for each part, which is then cut: what it has is kept")
    parser.add_argument("--smoke", action="store_true", help="smallest shapes: shows that all runs, measures nothing")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for the rounds of one workload")
    parser.add_argument("--rounds", type=int, help="fewest rounds; default: 5 on a GPU, 3 on a CPU")
    parser.add_argument(
        "--sampling-seconds", type=float, default=60.0, help="time for the sampling of one step's workload"
    )
    parser.add_argument(
        "--no-sampling", dest="sampling_seconds", action="store_const", const=0.0, help="steps without their sampling"
    )
    parser.add_argument(
        "--tests", action="append", metavar="PATH", help="for the tests part: a file or folder; repeatable"
    )
    parser.add_argument("-n", "--processes", type=int, help="for the tests part: processes (pytest-xdist)")
    parser.add_argument("--timeout", type=float, help="for the tests part: seconds for one test (pytest-timeout)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder")
    parser.add_argument("--into", type=Path, help="result file to merge into; default: <date>-<device>-<commit>.json")
    parser.add_argument("--commit", help="what to record where git cannot tell")
    options = parser.parse_args(argv)
    parts = [PARTS[name] for name in options.only or PARTS]
    if options.peers and not any(part.peers for part in parts):
        parser.error(f"--peers is for {', '.join(name for name, part in PARTS.items() if part.peers)}")
    if options.tests and options.only != ["tests"]:
        parser.error("--tests is for --only tests")
    if missing := missing_plugins(options):
        parser.error(f"{', '.join(missing)}: not installed; pip install {' '.join(missing)}")
    if options.rounds is None:
        options.rounds = 5 if options.device == "cuda" else 3
    return options
