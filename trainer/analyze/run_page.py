"""Write the page of one run or of several: figures, curves with seeds over each other, stage times, completions."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.analyze.page import escaped, page_pieces, printed
from trainer.analyze.runs import Run, comparison, correct_threshold_of, groups_of, read_runs
from trainer.analyze.samples import Sample, read_samples

_MOST_BYTES = 16_000_000
"""Size of the completions that a page holds; of more, every second or third and so on is on it."""

_PANELS = (
    {"title": "Held-out accuracy, greedy", "metric": "eval_accuracy", "error": "eval_accuracy_stderr"},
    {"title": "Mean reward of sampled completions", "metric": "reward"},
    {"title": "Groups without an advantage", "metric": "frac_reward_zero_std"},
    {"title": "Entropy (nats per token)", "metric": "entropy"},
    {"title": "Drop per masked span (nats)", "metric": "credit/drop_mean"},
    {"title": "Tokens per completion", "metric": "completions/mean_length"},
)
_HIDDEN = ("eval_accuracy_stderr",)


def write_run_page(path: Path, folders: Sequence[Path], title: str) -> list[Run]:
    """Write the page of the runs in `folders`, whole or not at all, and return the runs.

    Raises:
        ValueError, OSError: a folder or a line of its files is not a run's, or `path` cannot be written.
    """
    runs = read_runs(folders)
    aside = path.with_name(f".{path.name}.partial")
    try:
        with aside.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(run_page(runs, title))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return runs


def run_page(runs: Sequence[Run], title: str) -> Iterator[str]:
    """Make the page of runs piece by piece, the last steps' completions first."""
    columns, rows = comparison(runs)
    groups, parts = groups_of(runs), _parts(runs)
    notes = [
        f"Of the completions in {run.folder / 'completions.jsonl'} one in {every} is below."
        for run, every in parts
        if every > 1
    ]
    keys = [f'<i class="key r{group % 8}"></i>' for group in groups] + [""] * (len(rows) - len(runs))
    head = "".join(f"<th>{escaped(column)}</th>" for column in columns)
    body = "".join(
        f"<tr><td>{key}{escaped(name)}</td><td>{escaped(differs)}</td>"
        + "".join(f'<td class="number">{escaped(cell)}</td>' for cell in cells)
        + "</tr>\n"
        for key, (name, differs, *cells) in zip(keys, rows, strict=True)
    )
    section = f"""<div class="wide"><table class="figures"><tr>{head}</tr>
{body}</table></div>
<p class="soft">± is the standard error: over held-out problems, and over seeds in a row of means. Reward is the mean of
the last tenth of the steps; seconds are means over steps. Thin lines are what was measured, strong ones trailing means
over a tenth of the steps, and over seeds. Hover over a curve, or step through it with the arrow keys, to read it.</p>
<div class="row" id="curves"></div>
<details id="more"><summary>All other metrics</summary><div class="row"></div></details>
{"".join(f'<p class="soft">{escaped(note)}</p>{chr(10)}' for note in notes)}"""
    drawn = [
        {
            "name": printed(run.name), "group": group, "steps": run.metrics.index.tolist(),
            "metrics": {
                metric: [None if math.isnan(value) else value for value in column.tolist()]
                for metric, column in run.metrics.items()
            },
        }
        for run, group in zip(runs, groups, strict=True)
    ]  # fmt: skip
    data = {"runs": drawn, "panels": _PANELS, "hidden": _HIDDEN}
    return page_pieces(_samples(parts, len(runs) > 1), title, latest_first=True, runs=section, data=data)


def _parts(runs: Sequence[Run]) -> list[tuple[Run, int]]:
    """List the runs that have completions, each with k if the page holds one in k of them."""
    files = [run.folder / "completions.jsonl" for run in runs]
    sizes = [file.stat().st_size if file.is_file() else 0 for file in files]
    return [(run, math.ceil(size * len(runs) / _MOST_BYTES)) for run, size in zip(runs, sizes, strict=True) if size]


def _samples(parts: Sequence[tuple[Run, int]], named: bool) -> Iterator[Sample]:
    for run, every in parts:  # one at a time: a run that goes on must not keep what all of them need
        for sample in read_samples(run.folder, correct_threshold=correct_threshold_of(run.folder), every=every):
            yield dataclasses.replace(sample, run=run.name if named else None)
