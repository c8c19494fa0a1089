"""Write the page of one run or of several: figures, curves with seeds over each other, stage times, completions."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from trainer.analyze.page import escaped, page_of, printed
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
    """Write the page of the runs in `folders`, whole or not at all; give the runs.

    Raises:
        ValueError, OSError: a folder or a line of its files is not a run's, or `path` cannot be written.
    """
    runs = read_runs(folders)
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(run_page(runs, title), encoding="utf-8", newline="\n")
    aside.replace(path)
    return runs


def run_page(runs: Sequence[Run], title: str) -> str:
    """Make the page of runs, the last steps' completions first.

    Raises:
        ValueError: as `read_samples`.
    """
    columns, rows = comparison(runs)
    samples, notes = _samples(runs)
    groups = groups_of(runs)
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
        {"name": printed(run.name), "group": group, "steps": run.steps, "metrics": run.metrics}
        for run, group in zip(runs, groups, strict=True)
    ]
    return page_of(samples, title, runs=section, data={"runs": drawn, "panels": _PANELS, "hidden": _HIDDEN})


def _samples(runs: Sequence[Run]) -> tuple[list[Sample], list[str]]:
    """Read the completions of runs, and say of which runs only a part."""
    samples, notes = [], []
    for run in runs:
        file = run.folder / "completions.jsonl"
        size = file.stat().st_size if file.is_file() else 0
        if not size:
            continue
        every = math.ceil(size * len(runs) / _MOST_BYTES)
        threshold = correct_threshold_of(run.folder)
        found = read_samples(run.folder, correct_threshold=threshold, every=every)
        samples += [dataclasses.replace(sample, run=run.name if len(runs) > 1 else None) for sample in found]
        if every > 1:
            notes.append(f"Of the completions in {file} one in {every} is below.")
    return sorted(samples, key=lambda sample: -sample.step if type(sample.step) is int else 0), notes
