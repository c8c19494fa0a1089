"""Write tables and a page of logged completions and their credit, or compare runs: `cfa-analyze`, `cfa-compare`."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column
from rich.table import Table as Shown

from ..extras import program
from ..provenance import made_by
from .page import page_of, write_run_page
from .runs import comparison
from .samples import read_samples
from .tables import Cell, Table, analyse

DESCRIPTION = """Analyse the credit of logged completions: how much masked spans matter, which contents do, where weight
and gradient gather. RUN_OR_FILE is a folder that the training program wrote (log more with --log_completions) or a file
with one JSON object per completion. Writes analysis.json, analysis.md and page.html. `compare RUN ...`, or
`cfa-compare RUN ...`, compares."""
COMPARISON = """Compare runs of the training program: final held-out accuracy with its standard error, reward, tokens,
time per step and by stage, with means of runs that differ in their seeds only. Writes a page of the runs."""

_MARKDOWN = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_|[]$~#"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"})


def main(argv: list[str] | None = None) -> int:
    """Run the program; an error gives one line on stderr and exit code 1, or 2 for flags."""
    if argv is None:
        argv = ["compare"] * (Path(sys.argv[0]).name == "cfa-compare") + sys.argv[1:]
    compares = argv[:1] == ["compare"]
    prog = program("trainer.analyze" + " compare" * compares)
    parser = argparse.ArgumentParser(prog=prog, description=COMPARISON if compares else DESCRIPTION)
    if compares:
        parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder that the training program wrote")
        parser.add_argument("--out", type=Path, default=Path("compare.html"), help="page to write (compare.html)")
    else:
        parser.add_argument("source", type=Path, metavar="RUN_OR_FILE")
        parser.add_argument("--out", type=Path, help="folder to write to: analysis in the run, or NAME-analysis")
    options = vars(parser.parse_args(argv[compares:]))
    try:
        if compares:
            compare(**options)
        else:
            folder = write_analysis(**options)
            print(f"{folder / 'analysis.md'}\n{folder / 'page.html'}")
    except (ValueError, OSError) as problem:
        print(f"error: {' '.join(str(problem).split())}", file=sys.stderr)
        return 1
    return 0


def compare(runs: Sequence[Path], out: Path) -> None:
    """Print a table of runs and write a page of them."""
    columns, rows = comparison(write_run_page(out, runs, "Runs compared"))
    heads = [Column(name, justify="left" if i < 2 else "right") for i, name in enumerate(columns)]
    table = Shown(*heads, box=None, header_style="dim")
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 240)
    console.print(table)
    console.print(escape(str(out)), soft_wrap=True)


def write_analysis(source: Path, out: Path | None = None) -> Path:
    """Analyse a run folder or a file, write all results and return their folder.

    `out` is the folder, made if missing; by default `analysis` in the run folder, or NAME-analysis beside the file.
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
