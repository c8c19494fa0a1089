"""Write what credit found as tables, figures and a page of shaded completions: `python -m trainer.analyze RUN_OR_FILE`.

It reads what `trainer.report` wrote, or any file of that form (`samples.py`).
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from trainer.analyze.page import page_of
from trainer.analyze.plots import draw_analysis
from trainer.analyze.runs import correct_threshold_of, read_settings
from trainer.analyze.samples import Sample, read_samples
from trainer.analyze.tables import Cell, Table, analyse
from trainer.config import TrainConfig

DESCRIPTION = """Analyse the credit of logged completions: how much masked spans matter, which contents do, where weight
and gradient gather. RUN_OR_FILE is a folder that the training program wrote (log more with --log_completions) or a file
with one JSON object per completion. Writes analysis.json, analysis.md, analysis.png and page.html."""


_MARKDOWN = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_|[]$~#"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"})


def main(argv: list[str] | None = None) -> int:
    """Run the program; an error gives one line on stderr and exit code 1, or 2 for settings."""
    parser = argparse.ArgumentParser(prog="python -m trainer.analyze", description=DESCRIPTION)
    parser.add_argument("run_or_file", type=Path, metavar="RUN_OR_FILE")
    parser.add_argument("--out", type=Path, help="folder to write to; default: analysis in the run, or NAME-analysis")
    parser.add_argument(
        "--correct_threshold", type=float, help="least reward of a correct completion; default: that of the run, or 0.5"
    )
    parser.add_argument(
        "--noise", type=float, help="a drop of at most this much is no effect; default: 0.001 nats, 0 in other units"
    )
    parser.add_argument("--page_completions", type=int, default=12, help="most completions on the page (default 12)")
    options = parser.parse_args(argv)
    if options.noise is not None and not 0 <= options.noise < float("inf"):
        parser.error(f"argument --noise: must be finite and not negative, got {options.noise}")
    if options.page_completions < 1:
        parser.error(f"argument --page_completions: must be at least 1, got {options.page_completions}")
    threshold = options.correct_threshold
    try:
        threshold = _threshold_of(options.run_or_file) if threshold is None else threshold
    except (ValueError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    try:
        folder = write_analysis(
            options.run_or_file, options.out, correct_threshold=threshold, noise=options.noise,
            on_page=options.page_completions,
        )  # fmt: skip
    except (ValueError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    print(f"{folder / 'analysis.md'}\n{folder / 'page.html'}")
    return 0


def write_analysis(
    source: Path,
    out: Path | None = None,
    *,
    correct_threshold: float | None = None,
    noise: float | None = None,
    on_page: int = 12,
) -> Path:
    """Analyse a run folder or a file and write all results.

    Args:
        source: as in `read_samples`.
        out: the folder written to, made if missing; by default `analysis` in the run folder, or beside the file its
            name with `-analysis`.
        correct_threshold: as in `read_samples`; None takes the one in the run's `config.yaml`, or 0.5.
        noise: as in `analyse`.
        on_page: most completions on the page.

    Returns:
        The folder.

    Raises:
        ValueError: as `read_samples`; a `config.yaml` that is not a run's.
    """
    if correct_threshold is None:
        correct_threshold = _threshold_of(source)
    samples = read_samples(source, correct_threshold=correct_threshold)
    folder = out or (source / "analysis" if source.is_dir() else source.with_name(f"{source.stem}-analysis"))
    folder.mkdir(parents=True, exist_ok=True)
    tables, title = analyse(samples, noise=noise), f"Credit in {source.resolve().name}"
    report = {name: asdict(table) for name, table in tables.items()}
    (folder / "analysis.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / "analysis.md").write_text(_markdown(tables, title), encoding="utf-8", errors="replace")
    drops = [span.drop for sample in samples for span in sample.spans]
    draw_analysis(folder / "analysis.png", tables, drops, title)
    (folder / "page.html").write_text(page_of(_shown(samples, on_page), title), encoding="utf-8", newline="\n")
    return folder


def _threshold_of(source: Path) -> float:
    """Return a run's `correct_threshold`; a file of settings may misspell no name, as it may be written by hand."""
    if unknown := sorted(map(str, read_settings(source).keys() - {field.name for field in fields(TrainConfig)})):
        file = source / "config.yaml"
        raise ValueError(f"{file}: unknown setting {unknown[0]!r:.60}; --correct_threshold reads none of the file")
    return correct_threshold_of(source)


def _shown(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Choose the page's samples: most estimators first, then most spans; of equal texts and ranks the last."""
    last = {tuple(sample.tokens): i for i, sample in enumerate(samples)}
    order = sorted(last.values(), key=lambda i: (-len(samples[i].credit), -len(samples[i].spans), -i))
    return [samples[i] for i in sorted(order[:count])]


def _markdown(tables: Mapping[str, Table], title: str) -> str:
    parts = [f"# {_cell(title)}\n"]
    for table in tables.values():
        lines = [f"## {table.title}\n", *([f"{table.note}\n"] if table.note else [])]
        lines += [f"| {' | '.join(table.columns)} |", f"|{'---|' * len(table.columns)}"]
        lines += [f"| {' | '.join(map(_cell, row))} |" for row in table.rows]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _cell(value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return str(value)
    text = " ".join("".join(character if character.isprintable() else " " for character in value).split())
    text = text if len(text) <= 100 else f"{text[:99]}…"
    return text.translate(_MARKDOWN)
