"""Run the parts of a benchmark: each is a pytest process, stopped at its limit, merged into a result file."""

import argparse
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.ceilings import measure_ceilings
from benchmarks.harness.plots import predict_growth
from benchmarks.harness.progress import write_json
from benchmarks.harness.race import Figures
from benchmarks.harness.workloads import REPOSITORY, SEED


@dataclass(frozen=True)
class Part:
    """Files of tests, and what they take.

    Attributes:
        targets: files and folders.
        measures: it reports figures, so it runs in one process and takes the options of the benchmarks.
        ceilings: the device's ceilings are measured right before it.
        peers: its contenders can be chosen.
        interprets: on a CPU it runs Triton's kernels in their interpreter.
    """

    targets: tuple[str, ...]
    measures: bool = True
    ceilings: bool = True
    peers: bool = False
    interprets: bool = False


PARTS = {
    "first-light": Part(("benchmarks/speed/bench_first_light.py",), ceilings=False, interprets=True),
    "tests": Part(("tests",), measures=False, ceilings=False),
    "kernels": Part(("benchmarks/speed/bench_kernels.py", "benchmarks/speed/bench_attention_backward.py")),
    "scoring": Part(("benchmarks/speed/bench_scoring.py",), peers=True),
    "host": Part(("benchmarks/speed/bench_host.py",)),
    "rollouts": Part(("benchmarks/speed/bench_rollouts.py",)),
    "sweeps": Part(("benchmarks/speed/bench_sweeps.py",)),
    "loss": Part(("benchmarks/speed/bench_loss.py",)),
    "step": Part(("benchmarks/speed/bench_step.py",), peers=True),
    "profile": Part(("benchmarks/speed/bench_profile.py",), ceilings=False, peers=True),
}
POLL_SECONDS, GRACE_SECONDS = 1.0, 20.0
"""How often a result file follows its part, and how long a part has to end once it is asked to."""

clock = time.monotonic
Result = dict[str, Any]


def run_part(
    name: str, device: torch.device, options: argparse.Namespace, save: Callable[[Result], None] = lambda result: None
) -> Result:
    """Run one part in a process of its own and return what it measured.

    `save` is given what there is whenever there is more. Ceilings are measured right before, on the same device in the
    same state, so that shares of them mean something. At `options.limit` seconds the part is stopped.
    """
    part, began, started = PARTS[name], clock(), datetime.datetime.now(datetime.UTC)
    ceilings = measure_ceilings(device, smoke=options.smoke) if part.ceilings else None
    if device.type == "cuda":
        torch.cuda.empty_cache()
    left = None if options.limit is None else max(options.limit - (clock() - began), 1.0)
    with tempfile.TemporaryDirectory() as scratch:
        files = Path(scratch, "figures.json"), Path(scratch, "progress.json")

        def result(outcome: str, status: int | None, reason: str | None = None) -> Result:
            found: Result = {
                "outcome": outcome,
                "reason": reason,
                "exit_status": status,
                "tests": _read(files[1], {"tests": 0, "failures": 0, "errors": 0, "skipped": 0, "failed": []}),
                "started": started.isoformat(timespec="seconds"),
                "took_seconds": round(clock() - began, 1),
                "select": selection(part, options),
                "smoke": options.smoke,
            }
            if part.measures:
                measured = {**vars(Figures()), **_read(files[0], {})}
                if ceilings is not None:
                    found["ceilings"] = ceilings
                    for figure in measured["figures"]:
                        _add_rates(figure, ceilings)
                found |= {"seed": SEED, **measured}
            return found

        save(result("running", None))
        process = subprocess.Popen(
            _command(part, device, options, left, *files), cwd=REPOSITORY, env=_environment(part, device, options)
        )
        stopped = _watch(process, left, files, lambda: save(result("running", None)))
        status = process.returncode
        if stopped is None and status < 0:
            stopped = f"killed by {signal.Signals(-status).name}"
        if stopped is None and result("", 0).get("cut"):
            stopped = "its time was over"
        return result("cut" if stopped else "passed" if status == 0 else "failed", status, stopped)


def selection(part: Part, options: argparse.Namespace) -> str | None:
    """Name the pieces of its part that this run takes; None for all of it."""
    chosen = [*(options.tests or []), *([options.select] if options.select else [])]
    chosen += [f"peers {options.peers}"] if options.peers and part.peers else []
    return ", ".join(chosen) or None


def _command(
    part: Part, device: torch.device, options: argparse.Namespace, left: float | None, figures: Path, progress: Path
) -> list[str]:
    targets = part.targets if part.measures else options.tests or part.targets
    command = [sys.executable, "-m", "pytest", *targets, "-p", "no:cacheprovider"]
    command += ["-p", "benchmarks.harness.progress", f"--progress={progress}"]
    if part.measures:
        command += ["--benchmark-enable", f"--bench-device={device.type}", f"--figures={figures}", "-s"]
        command += [f"--bench-seconds={options.seconds}", f"--bench-rounds={options.rounds}"]
        command += [f"--bench-sampling-seconds={options.sampling_seconds}"]
        command += [f"--bench-peers={options.peers}"] if part.peers and options.peers else []
        command += [f"--bench-limit={left}"] if left is not None else []
        command += ["--bench-smoke"] * options.smoke + ["--tb=short"]
        command += ["--benchmark-columns=median,iqr,min,max,rounds", "--benchmark-sort=name"]
    else:
        command += ["-n", str(options.processes), "--dist=worksteal"] if options.processes else []
        if options.timeout is not None:
            command += [f"--timeout={options.timeout:g}"]
    return command + (["-k", options.select] if options.select else [])


def _environment(part: Part, device: torch.device, options: argparse.Namespace) -> dict[str, str]:
    extra = {"OMP_NUM_THREADS": "1"} if options.processes and not part.measures else {}
    if part.interprets and device.type == "cpu":
        extra["TRITON_INTERPRET"] = "1"
    return os.environ | extra


def missing_plugins(options: argparse.Namespace) -> list[str]:
    """Names of pytest's plug-ins that these options need and that are not installed."""
    needed = {"pytest-benchmark": ("pytest_benchmark", True), "pytest-xdist": ("xdist", options.processes)}
    needed |= {"pytest-timeout": ("pytest_timeout", options.timeout)}
    return [name for name, (module, wanted) in needed.items() if wanted and importlib.util.find_spec(module) is None]


def _watch(
    process: subprocess.Popen[bytes], seconds: float | None, files: tuple[Path, ...], changed: Callable[[], None]
) -> str | None:
    """Wait until a process ends or its time is over; returns why it was stopped, None if it ended by itself.

    SIGINT lets pytest report what it has; what does not end by that is killed.
    """
    began, seen = clock(), [0] * len(files)
    try:
        while True:
            try:
                process.wait(POLL_SECONDS)
                return None
            except subprocess.TimeoutExpired:
                pass
            if (now := [file.stat().st_mtime_ns if file.exists() else 0 for file in files]) != seen:
                seen = now
                changed()
            if seconds is not None and clock() - began > seconds:
                reason = "stopped at its limit"
                break
    except KeyboardInterrupt:
        reason = INTERRUPTED
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return reason


INTERRUPTED = "interrupted"


def _read(path: Path, otherwise: Result) -> Result:
    return json.loads(path.read_text()) if path.exists() else otherwise


def _add_rates(figure: dict[str, Any], ceilings: dict[str, Any]) -> None:
    """Turn counted operations and bytes into rates and shares of what this device can do."""
    seconds = figure["seconds"]["median"]
    if flops := figure.get("flops"):
        figure["tflop_per_s"] = flops / seconds / 1e12
        figure["share_of_gemm"] = figure["tflop_per_s"] / ceilings["gemm_tflop_per_s"]
    if moved := figure.get("bytes"):
        figure["gb_per_s"] = moved / seconds / 1e9
        figure["share_of_copy"] = figure["gb_per_s"] / ceilings["copy_gb_per_s"]


# Result files

_LISTS = ("figures", "ratios", "absent", "refused", "checks", "builds", "profiles", "cut", "unfinished")
_PIECE = ("select", "outcome", "reason", "exit_status", "commit", "dirty", "started", "took_seconds", "tests")
_OUTCOMES = ("running", "failed", "cut", "passed")
"""Of several runs together, the first of these that one of them has."""


def read_results(path: Path) -> dict[str, Any]:
    """A result file, or one that holds nothing yet."""
    return json.loads(path.read_text()) if path.exists() else {"schema": 1, "parts": {}}


def merge_part(path: Path, environment: dict[str, Any], part: str, result: Result) -> None:
    """Put a part into the result file: see `with_part`."""
    write_json(path, with_part(read_results(path), environment, part, result))


def with_part(document: dict[str, Any], environment: dict[str, Any], part: str, result: Result) -> dict[str, Any]:
    """`document` with one run of a part; `document` itself stays as it is.

    A piece of a part (`select`), or what a run had measured before it was cut, adds to earlier runs of the part.
    The runs that a part was merged from are its `pieces`, each with its commit and what it measured; a run of the same
    piece replaces the one before. `state` says of each part whether it is "whole", "pieces" of it were run, or it was
    "cut", has "failed" or is still "running".
    """
    result = {"commit": environment["commit"], "dirty": environment["dirty"], **result}
    result["pieces"] = [_piece(result)]
    if (before := document["parts"].get(part)) and (result["select"] or result["outcome"] in ("running", "cut")):
        result = _with_earlier_pieces(before, result)
    if part == "sweeps":
        predict_growth(result["figures"])
    parts = {**document["parts"], part: result}
    merged = {**document, "environment": environment, "state": {name: _state(p) for name, p in parts.items()}}
    merged["parts"] = parts
    if "ceilings" in result:
        merged["ceilings"] = result["ceilings"]
    if part == "tests":
        merged["test_suite"] = {"outcome": result["outcome"], **result["tests"]}
    return merged


def _piece(result: Result) -> dict[str, Any]:
    piece = {key: result.get(key) for key in _PIECE}
    return piece | {"groups": sorted(_groups(result)), "workloads": sorted(result.get("workloads", {}))}


def _groups(result: Result) -> set[str]:
    return {entry["group"] for name in _LISTS for entry in result.get(name, [])}


def _state(part: Result) -> str:
    whole = "pieces" if part.get("select") else "whole"
    return {"passed": whole}.get(part["outcome"], part["outcome"])


def _with_earlier_pieces(before: Result, result: Result) -> Result:
    """A piece with what earlier ones measured; its own groups replace theirs. A failure stays a failure."""
    earlier = [piece for piece in before.get("pieces", [_piece(before)]) if piece["select"] != result["select"]]
    pieces = [*earlier, *result["pieces"]]
    whole = {**result, "pieces": pieces, "select": " | ".join(piece["select"] or "all" for piece in pieces)}
    groups = _groups(result)
    for key in _LISTS:
        if key in before and key in result:
            whole[key] = [entry for entry in before[key] if entry["group"] not in groups] + result[key]
    if "workloads" in before:
        whole["workloads"] = {**before["workloads"], **result["workloads"]}
    for key in result["tests"]:
        numbers = [piece["tests"].get(key, type(result["tests"][key])()) for piece in pieces]
        whole["tests"] = {**whole["tests"], key: sum(numbers[1:], numbers[0])}
    whole["exit_status"] = next((p["exit_status"] for p in pieces if p["exit_status"]), result["exit_status"])
    whole["outcome"] = min((piece["outcome"] for piece in pieces), key=_OUTCOMES.index)
    whole["took_seconds"] = sum(piece["took_seconds"] for piece in pieces)
    return whole
