"""Print the figures of result files together: `python -m benchmarks figures FILE.json ...`."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from benchmarks.harness.results import figures_of, table

_FACTS = ("_seconds", "_rows", "idle_share", "tflop_per_s", "gap_nats")  # ends of the names of those that are printed


def page(files: list[Path]) -> str:
    """Every figure and profile of the files, in milliseconds, and what failed, as Markdown."""
    rows, bad = list[list[str]](), list[str]()
    for file in files:
        for part, content in json.loads(file.read_text(encoding="utf-8"))["parts"].items():
            for one in (*figures_of(content), *content.get("profiles", ())):
                seconds = (one.get("seconds") or {}).get("median", one.get("seconds_unprofiled", math.nan))
                facts = [
                    f"{name} {value:.4g}" for name, value in one.items() if name.endswith(_FACTS) and _number(value)
                ]
                rows.append([one["group"], one["name"], f"{seconds * 1e3:,.3f}", ", ".join(facts)])
            for kind in ("refused", "absent"):
                some = content.get(kind, ())
                bad += [f"{part}: {one['group']}, {one['name']} is {kind}: {one['reason']}" for one in some]
            failed = content.get("failed", [])  # of a block the reason, of a part its tests
            bad += [f"{part}: {name} failed" for name in (failed if isinstance(failed, list) else [failed])]
    return table(["workload", "contender", "ms", "facts"], rows) + "".join(f"- {line}\n" for line in bad)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def main(argv: list[str]) -> int:
    """Print the figures of the files that `argv` names; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks figures", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="result file")
    print(page(parser.parse_args(argv).files))
    return 0
