"""Write results as tables: a document as JSON, and beside it as Markdown."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.workloads import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results"


def write(document: dict[str, Any], markdown: str, folder: Path, name: str) -> list[Path]:
    """`name`.json and `name`.md in `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.json", folder / f"{name}.md"]
    paths[0].write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(markdown, encoding="utf-8")
    return paths


def interval(figure: dict[str, Any] | None, digits: int = 2) -> str:
    """`0.93 (0.91 to 0.95)`, or a dash where there is none."""
    if not figure or figure.get("value") is None:
        return "–"
    value, low, high = (f"{figure[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others figures."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows)) + "\n"
