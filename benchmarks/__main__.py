"""`python -m benchmarks`: test on the device, measure its ceilings, time everything, write one JSON file.

Without a CUDA or HIP device it says so and exits with status 2, unless `--device cpu` asks for the CPU's figures.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.ceilings import measure_ceilings
from benchmarks.plots import plot_results, predict_growth
from benchmarks.race import Figures
from benchmarks.workloads import REPOSITORY, SEED, gsm8k_folder

PARTS = {
    "tests": ["tests"],
    "kernels": ["benchmarks/test_kernels.py"],
    "scoring": ["benchmarks/test_scoring.py"],
    "host": ["benchmarks/test_host_share.py"],
    "sweeps": ["benchmarks/test_sweeps.py"],
    "loss": ["benchmarks/test_loss.py"],
    "step": ["benchmarks/test_step.py"],
}
NO_DEVICE = 2
_LISTS = ("figures", "ratios", "absent", "refused")
PACKAGES = ("torch", "triton", "transformers", "peft", "liger-kernel", "numpy", "trl", "captum", "lm-eval", "aligntune")


def main(argv: list[str] | None = None) -> int:
    """Run the parts asked for and merge them into the result file; 0 if all of them passed."""
    options = _options(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "no CUDA or HIP device here: nothing was run (python -m benchmarks --device cpu measures the CPU)",
            file=sys.stderr,
        )
        return NO_DEVICE
    device = torch.device(options.device)
    environment = describe_environment(device, options.commit)
    path = options.into or options.results / f"{environment['date'][:10]}-{_slug(environment)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    failed = []
    for part in options.only or PARTS:
        missing = [target for target in PARTS[part] if not (REPOSITORY / target).exists()]
        if missing:
            print(f"{part}: left out, there is no {', '.join(missing)}")
            continue
        print(f"== {part}", flush=True)
        result = run_part(part, device, options)
        if result["exit_status"] != 0:
            failed.append(part)
        merge_part(path, environment, part, result)
        print(f"== {part}: {result['outcome']}, {result['took_seconds']:.0f} s -> {path}", flush=True)
    for picture in plot_results(path) if path.exists() else []:
        print(f"== {picture}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cuda is HIP, too (default)")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="a part; repeatable; default: all")
    parser.add_argument("--select", help="pytest's -k for the part, to measure a piece of it")
    parser.add_argument(
        "--peers",
        help="race these alone in scoring or steps, comma-separated, a name with a comma in quotes: 'per span,ours'",
    )
    parser.add_argument("--smoke", action="store_true", help="smallest shapes: shows that all runs, measures nothing")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for the rounds of one workload")
    parser.add_argument("--rounds", type=int, help="fewest rounds; default: 5 on a GPU, 3 on a CPU")
    parser.add_argument("--results", type=Path, default=REPOSITORY / "benchmarks" / "results", help="folder")
    parser.add_argument("--into", type=Path, help="result file to merge into; default: <date>-<device>-<commit>.json")
    parser.add_argument("--commit", help="what to record where git cannot tell")
    options = parser.parse_args(argv)
    if options.rounds is None:
        options.rounds = 5 if options.device == "cuda" else 3
    return options


def run_part(part: str, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Run one part in a process of its own and return what it measured.

    Ceilings are measured right before, on the same device in the same state, so that shares of them mean something.
    """
    measuring = part != "tests"
    ceilings = measure_ceilings(device, smoke=options.smoke) if measuring else None
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as scratch:
        figures, junit = Path(scratch, "figures.json"), Path(scratch, "junit.xml")
        command = [sys.executable, "-m", "pytest", *PARTS[part], f"--junitxml={junit}", "-p", "no:cacheprovider"]
        if measuring:
            command += ["--benchmark-enable", f"--bench-device={device.type}", f"--figures={figures}", "-s"]
            command += [f"--bench-seconds={options.seconds}", f"--bench-rounds={options.rounds}"]
            command += [f"--bench-peers={options.peers}"] if options.peers else []
            command += ["--bench-smoke"] * options.smoke + ["--tb=short"]
            command += ["--benchmark-columns=median,iqr,min,max,rounds", "--benchmark-sort=name"]
        if options.select:
            command += ["-k", options.select]
        start = time.time()
        status = subprocess.run(command, cwd=REPOSITORY, check=False).returncode
        result: dict[str, Any] = {
            "outcome": "passed" if status == 0 else "failed",
            "exit_status": status,
            "tests": _counts(junit),
            "started": datetime.datetime.fromtimestamp(start, datetime.UTC).isoformat(timespec="seconds"),
            "took_seconds": round(time.time() - start, 1),
            "select": options.select,
            "smoke": options.smoke,
        }
        if ceilings is not None:
            measured: dict[str, Any] = json.loads(figures.read_text()) if figures.exists() else vars(Figures())
            for figure in measured["figures"]:
                _add_rates(figure, ceilings)
            result |= {"ceilings": ceilings, "seed": SEED, **measured}
    return result


def _counts(junit: Path) -> dict[str, Any]:
    """How many tests ran, and the names of those that failed."""
    if not junit.exists():
        return {}
    root = ElementTree.parse(junit).getroot()
    keys = ("tests", "failures", "errors", "skipped")
    counts = {key: sum(int(suite.get(key, 0)) for suite in root.iter("testsuite")) for key in keys}
    bad = [case for case in root.iter("testcase") if case.find("failure") is not None or case.find("error") is not None]
    return {**counts, "failed": [f"{case.get('classname')}::{case.get('name')}" for case in bad]}


def _add_rates(figure: dict[str, Any], ceilings: dict[str, Any]) -> None:
    """Turn counted operations and bytes into rates and shares of what this device can do."""
    seconds = figure["seconds"]["median"]
    if flops := figure.get("flops"):
        figure["tflop_per_s"] = flops / seconds / 1e12
        figure["share_of_gemm"] = figure["tflop_per_s"] / ceilings["gemm_tflop_per_s"]
    if moved := figure.get("bytes"):
        figure["gb_per_s"] = moved / seconds / 1e9
        figure["share_of_copy"] = figure["gb_per_s"] / ceilings["copy_gb_per_s"]


def merge_part(path: Path, environment: dict[str, Any], part: str, result: dict[str, Any]) -> None:
    """Put a part into the result file. A piece of a part (`select`) adds to earlier pieces of it."""
    document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"schema": 1, "parts": {}}
    document["environment"] = environment
    result = {"commit": environment["commit"], "dirty": environment["dirty"], **result}
    if (before := document["parts"].get(part)) and result.get("select"):
        result = _with_earlier_pieces(before, result)
    if part == "sweeps":
        predict_growth(result["figures"])
    document["parts"][part] = result
    if "ceilings" in result:
        document["ceilings"] = result["ceilings"]
    if part == "tests":
        document["test_suite"] = {"outcome": result["outcome"], **result["tests"]}
    path.write_text(json.dumps(document, indent=1) + "\n")


def _with_earlier_pieces(before: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """A piece with what earlier ones measured; its own groups replace theirs. A failure stays a failure."""
    whole = {**result, "select": f"{before['select']} | {result['select']}"}
    for key in _LISTS:
        if key in before and key in result:
            groups = {entry["group"] for name in _LISTS for entry in result[name]}
            whole[key] = [entry for entry in before[key] if entry["group"] not in groups] + result[key]
    if "workloads" in before:
        whole["workloads"] = {**before["workloads"], **result["workloads"]}
    whole["tests"] = {key: before["tests"].get(key, type(n)()) + n for key, n in result["tests"].items()}
    whole["exit_status"] = before["exit_status"] or result["exit_status"]
    whole["outcome"] = "failed" if whole["exit_status"] else "passed"
    whole["took_seconds"] = before["took_seconds"] + result["took_seconds"]
    return whole


# Where it ran


def describe_environment(device: torch.device, commit: str | None) -> dict[str, Any]:
    """Device, driver, versions, commit and seeds."""
    recorded, dirty = _commit(commit)
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": _describe_gpu() if device.type == "cuda" else _describe_cpu(),
        "driver": _driver() if device.type == "cuda" else platform.platform(),
        "versions": versions,
        "commit": recorded,
        "dirty": dirty,
        "seeds": {"workloads": SEED, "models": SEED},
        "data": "real" if gsm8k_folder() is not None else "generated",
    }


def _describe_gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "kind": "hip" if torch.version.hip else "cuda",
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "runtime": torch.version.hip or torch.version.cuda,
    }


def _describe_cpu() -> dict[str, Any]:
    listing = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", listing.read_text()) if listing.exists() else None
    name = found.group(1) if found else platform.processor() or platform.machine()
    return {"kind": "cpu", "name": name, "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def _driver() -> str:
    for program, arguments in (
        ("nvidia-smi", ["--query-gpu=driver_version", "--format=csv,noheader"]),
        ("rocm-smi", ["--showdriverversion"]),
    ):
        if shutil.which(program):
            answer = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
            if answer.returncode == 0:
                return answer.stdout.strip().splitlines()[0]
    return "unknown"


def _commit(given: str | None) -> tuple[str, bool | None]:
    """The commit and whether the tree differs from it; `given` where git cannot tell."""

    def git(*arguments: str) -> str | None:
        try:
            answer = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    commit, status = (
        git("rev-parse", "--short=12", "HEAD"),
        git("status", "--porcelain", "--", ".", ":!benchmarks/results"),
    )
    if commit is None:
        return given or "unknown", None
    return commit, bool(status)


def _slug(environment: dict[str, Any]) -> str:
    device = re.sub(r"[^a-z0-9]+", "-", environment["device"]["name"].lower()).strip("-")
    device = device if environment["device"]["kind"] != "cpu" else f"cpu{environment['device']['threads']}-{device}"
    return f"{device[:40].strip('-')}-{environment['commit']}" + ("-dirty" if environment["dirty"] else "")


if __name__ == "__main__":
    sys.exit(main())
