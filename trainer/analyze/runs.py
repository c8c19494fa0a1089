"""Read the folders of runs, and sum them up side by side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from ..cli import read_mapping
from .samples import json_lines

_FORMS = {
    "steps": "{:g}", "accuracy at step 0": "{:.1%}", "held-out accuracy": "{:.1%}", "reward": "{:.3f}",
    "tokens": "{:,.0f}",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One run: its settings, also as written, and its metrics: a row a step, a column a metric, nan without a value."""

    name: str
    folder: Path
    settings: dict[str, Any]
    written: str
    metrics: pandas.DataFrame

    def figures(self) -> dict[str, float]:
        """Sum the run up; nan without a value. Reward is over the last tenth of the steps, times are means."""
        last, means = self.metrics.ffill().iloc[-1], self.metrics.mean()
        rewards = self.metrics.get("reward", pandas.Series(dtype=float)).dropna()
        return {
            "steps": self.metrics.index[-1],
            "accuracy at step 0": self.metrics.iloc[0].get("eval_accuracy", math.nan),
            "held-out accuracy": last.get("eval_accuracy", math.nan),
            "error": last.get("eval_accuracy_stderr", math.nan),
            "reward": rewards.tail(max(1, len(rewards) // 10)).mean(),
            "tokens": last.get("num_tokens", math.nan),
            "seconds per step": means.get("step_time", math.nan),
            **{name.removeprefix("time/"): mean for name, mean in means.items() if name.startswith("time/")},
        }


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders; each is named by its last part, or by its path if two have the same.

    Raises `ValueError` or `OSError` that names a folder, settings or a line of metrics that is not a run's.
    """
    names = [folder.resolve().name for folder in folders]
    for i, folder in enumerate(folders):
        if folder.resolve() in [other.resolve() for other in folders[:i]]:
            raise ValueError(f"{folder}: is given twice")
    return [
        Run(name if names.count(name) == 1 else str(folder), folder, *_settings(folder), _metrics(folder))
        for folder, name in zip(folders, names, strict=True)
    ]


def _metrics(folder: Path) -> pandas.DataFrame:
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise ValueError(f"{folder}: holds no metrics.jsonl, so it is not the folder of a run")
    steps: dict[int, dict[str, float]] = {}  # training and evaluation have a line each, repeated steps the last one
    for number, entry in json_lines(file):
        try:
            steps.setdefault(int(entry.pop("step")), {}).update({name: float(value) for name, value in entry.items()})
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as problem:
            reason = f"{type(problem).__name__}: {problem}"
            raise ValueError(f"{file}, line {number}: must hold a step and numbers ({reason})") from problem
    if not steps:
        raise ValueError(f"{file}: holds no step")
    frame = pandas.DataFrame.from_dict(steps, orient="index", dtype=float).sort_index()
    return frame.where(np.isfinite(frame))


def _settings(folder: Path) -> tuple[dict[str, Any], str]:
    """Read `config.yaml`, and give its text too; no settings if there is no such file."""
    file = folder / "config.yaml"
    return (read_mapping(file), file.read_text("utf-8")) if file.exists() else ({}, "")


def groups_of(runs: Sequence[Run]) -> list[int]:
    """Number the groups of runs that differ in their seeds only, by their first run."""
    own = ("seed", "output_dir")
    keys = [repr(sorted(repr(item) for item in run.settings.items() if item[0] not in own)) for run in runs]
    keys = [key if run.settings else run.name for run, key in zip(runs, keys, strict=True)]
    return pandas.factorize(np.array(keys, dtype=object))[0].tolist()


def comparison(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Tabulate runs, a row each, and the mean of those that differ in their seeds only; returns columns and rows.

    The standard error after ± is over held-out problems in a run's row, over runs in that of a mean.
    """
    names = dict.fromkeys(name for run in runs for name in run.settings if name != "output_dir")
    differing = [name for name in names if len({repr(run.settings.get(name)) for run in runs}) > 1]
    own = [{name: run.settings[name] for name in differing if name in run.settings} for run in runs]
    heads = [(run.name, _settled(settings)) for run, settings in zip(runs, own, strict=True)]
    table, groups = pandas.DataFrame([run.figures() for run in runs]), np.array(groups_of(runs))
    for group in range(max(groups) + 1):
        members = np.flatnonzero(groups == group).tolist()
        if len(members) > 1:
            mean = table.iloc[members].mean()
            twice = len({runs[k].settings.get("seed") for k in members}) < len(members)
            mean["error"] = math.nan if twice else table["held-out accuracy"].iloc[members].sem()
            table.loc[len(table)] = mean
            name = "same seed twice" if twice else f"mean of {len(members)} seeds"
            seeds = " and ".join(str(runs[k].settings.get("seed")) for k in members)
            heads.append((name, _settled(own[members[0]] | {"seed": seeds})))
    cells = {name: [_text(value, _FORMS.get(name, "{:.3g}")) for value in table[name]] for name in table}
    errors = [_text(value, " ± {:.1%}", "") for value in table["error"]]
    cells["held-out accuracy"] = [a + b for a, b in zip(cells["held-out accuracy"], errors, strict=True)]
    del cells["error"]
    rows = [[*head, *row] for head, row in zip(heads, zip(*cells.values(), strict=True), strict=True)]
    return ["run", "differs in" if differing else "", *cells], rows


def _settled(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _text(value: float, form: str, absent: str = "-") -> str:
    return absent if math.isnan(value) else form.format(value)
