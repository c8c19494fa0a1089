"""Record where figures come from: device, driver, versions, commit."""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from trainer.provenance import find_commit

REPOSITORY = Path(__file__).resolve().parents[2]
# The one of the first dozen seeds whose completions share tokens most nearly as the whole file does: one full forward
# per span feeds 2.40 times the tokens of the tree, over the whole file 2.38.
SEED = 6
PACKAGES = ("torch", "triton", "transformers", "peft", "liger-kernel", "numpy", "trl", "lm-eval", "aligntune")


def gsm8k_folder() -> Path | None:
    """Folder of GSM8K's `train.jsonl` and `model_solutions.jsonl`, or None.

    The environment variable `GSM8K` names it; else it is `shared/gsm8k` beside the repository or inside it.

    Raises:
        ValueError: `GSM8K` names a folder that lacks one of the files.
    """
    files = ("train.jsonl", "model_solutions.jsonl")
    if named := os.environ.get("GSM8K"):
        if missing := [file for file in files if not Path(named, file).is_file()]:
            raise ValueError(f"GSM8K={named}: has no {' and no '.join(missing)}; docs/benchmarks.md says how to get it")
        return Path(named)
    places = (REPOSITORY.parent / "shared" / "gsm8k", REPOSITORY / "shared" / "gsm8k")
    return next((place for place in places if place.is_dir()), None)


def describe_environment(device: torch.device, commit: str | None) -> dict[str, Any]:
    """Device, driver, versions, commit and seeds; `commit` is right where a copy's git knows an older one."""
    recorded, dirty = (commit, False) if commit else find_commit()
    versions = {"python": platform.python_version()} | dict.fromkeys(PACKAGES, "absent")
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    described, driver = (_describe_gpu, _driver) if device.type == "cuda" else (_describe_cpu, platform.platform)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "device": described(),
        "driver": driver(), "versions": versions, "commit": recorded or "unknown", "dirty": dirty,
        "seeds": {"workloads": SEED, "models": SEED}, "data": "generated" if gsm8k_folder() is None else "real",
    }  # fmt: skip


def _describe_gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "kind": "hip" if torch.version.hip else "cuda", "name": properties.name,
        "memory_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}", "runtime": torch.version.hip or torch.version.cuda,
    }  # fmt: skip


def _describe_cpu() -> dict[str, Any]:
    listing = Path("/proc/cpuinfo")
    result = re.search(r"model name\s*:\s*(.+)", listing.read_text()) if listing.exists() else None
    name = result.group(1) if result else platform.processor() or platform.machine()
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


def slug(environment: dict[str, Any]) -> str:
    """Name of the device and the commit, for a file's name."""
    device = re.sub(r"[^a-z0-9]+", "-", environment["device"]["name"].lower()).strip("-")
    device = device if environment["device"]["kind"] != "cpu" else f"cpu{environment['device']['threads']}-{device}"
    return f"{device[:40].strip('-')}-{environment['commit']}" + ("-dirty" if environment["dirty"] else "")
