"""Write tables and a page of logged completions and their credit, or compare runs: `cfa-analyze`, `cfa-compare`."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column
from rich.table import Table as Shown

from ..provenance import made_by
from ..report.page import page_of, write_run_page
from ..report.runs import comparison, read_samples
from .tables import Cell, Table, analyse

_WIDTH = 19
"""Columns of a terminal that a run takes; an accuracy with its interval takes up to 17."""

_MARKDOWN = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_|[]$~#"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"})


def compare(runs: Sequence[Path], out: Path) -> None:
    """Print a table of runs, as many side by side as there is room for, and write a page of them."""
    names, rows = comparison(write_run_page(out, runs, "Runs compared"))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 80)
    first = max(map(len, names))
    beside = max(1, (console.width - first) // _WIDTH)
    for block in (rows[start : start + beside] for start in range(0, len(rows), beside)):
        columns = [Column(justify="right", overflow="fold", max_width=_WIDTH - 2) for _ in block]
        table = Shown(Column(no_wrap=True), *columns, box=None, show_header=False, padding=(0, 0, 0, 2), pad_edge=False)
        for name, *cells in zip(names, *block, strict=True):
            table.add_row(name, *map(escape, cells), style="bold" if name == "held-out accuracy" else "")
        console.print(table, "")
    console.print(escape(str(out)), soft_wrap=True)


def write_analysis(source: Path, out: Path | None = None) -> Path:
    """Analyse a run folder or a file, write all results and return their folder.

    `out` is the folder, made if missing; by default `analysis` in the run folder, or NAME-analysis next to the file.
    """
    samples = list(read_samples(source))
    if not samples:
        raise ValueError(f"{source}: holds no completion; was log_completions 0, or did the run end in its first step?")
    folder = out or (source / "analysis" if source.is_dir() else source.with_name(f"{source.stem}-analysis"))
    folder.mkdir(parents=True, exist_ok=True)
    tables, title = analyse(samples), f"Credit in {source.resolve().name}"
    report = {"made_by": made_by(), **{name: vars(table) for name, table in tables.items()}}
    (folder / "analysis.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / "analysis.md").write_text(_markdown(tables, title), encoding="utf-8", errors="replace")
    (folder / "page.html").write_text(page_of(samples, title), encoding="utf-8", newline="\n")
    return folder


def _markdown(tables: Mapping[str, Table], title: str) -> str:
    parts = [f"# {_cell(title)}\n"]
    for table in tables.values():
        lines = [f"## {table.title}\n", *([f"{table.note}\n"] if table.note else [])]
        lines += [f"| {' | '.join(table.columns)} |", f"|{'---|' * len(table.columns)}"]
        lines += [f"| {' | '.join(map(_cell, row))} |" for row in table.rows]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _cell(value: Cell) -> str:
    if not isinstance(value, str):
        return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    text = " ".join("".join(character if character.isprintable() else " " for character in value).split())
    return (text if len(text) <= 100 else f"{text[:99]}…").translate(_MARKDOWN)
