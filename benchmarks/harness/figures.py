"""Print the figures of result files together: `python -m benchmarks figures FILE.json ...`."""

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.results import figures_of, table

# Ends of the names of the facts that are printed.
_FACTS = ("_seconds", "_rows", "_share", "tflop_per_s", "_off", "launches", "step_time", "time/generate", "time/update")


def page(parts: Mapping[str, Any]) -> str:
    """Every figure and profile of a document's parts, in milliseconds or as a ratio, and what failed, as Markdown."""
    rows, bad = list[list[str]](), list[str]()
    for part, content in parts.items():
        for one in (*figures_of(content), *content.get("profiles", ())):
            named = one.get("seconds_unprofiled", one.get("time/credit", one.get("ratio", math.nan)))
            seconds, predicted = (one.get("seconds") or {}).get("median", named), one.get("predicted")
            unit = 1 if "ratio" in one else 1e3
            facts = {name: value for name, value in one.items() if name.endswith(_FACTS)}
            facts |= {name: value for name, value in one.get("parts", {}).items() if value}
            rows.append([
                one["group"], one["name"], f"{(seconds or math.nan) * unit:,.3f}",
                "" if predicted is None else f"{predicted * unit:,.4g}",
                ", ".join(f"{name} {value:.4g}" for name, value in facts.items()),
            ])  # fmt: skip
            bad += [f"{part}: {one['group']}, {one['name']} failed: {one['failed']}"] if "failed" in one else []
        for kind in ("refused", "absent"):
            for one in content.get(kind, ()):
                bad.append(f"{part}: {one['group']}, {one['name']} is {kind}: {one['reason']}")
        failed = content.get("failed", content.get("skipped", []))  # of a block the reason, of a part its tests
        bad += [f"{part}: {name} failed" for name in (failed if isinstance(failed, list) else [failed])]
    lines = "".join(f"- {line}\n" for line in bad)
    return table(["workload", "contender", "ms", "predicted", "facts"], rows) + lines


def main(argv: list[str]) -> int:
    """Print the figures of the files that `argv` names; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks figures", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="result file")
    for file in parser.parse_args(argv).files:
        print(page(json.loads(file.read_text(encoding="utf-8"))["parts"]))
    return 0
