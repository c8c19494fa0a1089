"""Read the folders of runs, and sum them up side by side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import yaml

from trainer.analyze.samples import json_lines

_OWN = ("seed", "output_dir")
"""Settings in which repetitions of a run differ."""


@dataclass(frozen=True)
class Run:
    """One run: its settings and its metrics, a row for each step and a column for each metric, nan without a value."""

    name: str
    folder: Path
    settings: dict[str, Any]
    metrics: pandas.DataFrame

    @property
    def repeats(self) -> str:
        """Settings that runs have in common which differ in their seeds only, as text."""
        named = sorted(repr((name, value)) for name, value in self.settings.items() if name not in _OWN)
        return repr(named) if self.settings else self.name

    def values(self, metric: str) -> list[float]:
        """List a metric's values over the steps that have it."""
        return self.metrics[metric].dropna().tolist() if metric in self.metrics else []

    def figures(self) -> dict[str, float]:
        """Sum the run up; nan without a value. Reward is over the last tenth of the steps, times are means."""
        rewards, before = self.values("reward"), self.metrics.get("eval_accuracy", pandas.Series([math.nan]))
        stages = [name for name in self.metrics if name.startswith("time/")]
        return {
            "steps": self.metrics.index[-1],
            "before": before.iloc[0],
            "accuracy": _last(self.values("eval_accuracy")),
            "error": _last(self.values("eval_accuracy_stderr")),
            "reward": float(np.mean(rewards[-max(1, len(rewards) // 10) :])) if rewards else math.nan,
            "tokens": _last(self.values("num_tokens")),
            **{name: self.metrics[name].mean() for name in ("step_time", *stages) if name in self.metrics},
        }


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders; each is named by its last part, or by its path if two have the same.

    Raises:
        ValueError, OSError: a folder, its settings or a line of its metrics is not a run's; the message names it.
    """
    resolved = [folder.resolve() for folder in folders]
    if len({*resolved}) < len(resolved):
        raise ValueError(
            f"{next(f for f, r in zip(folders, resolved, strict=True) if resolved.count(r) > 1)}: is given twice"
        )
    last = [folder.name for folder in resolved]
    return [
        Run(path.name if last.count(path.name) == 1 else str(folder), folder, read_settings(folder), _metrics(folder))
        for folder, path in zip(folders, resolved, strict=True)
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


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the settings of a run, `config.yaml` in its folder; none if there is no such file."""
    file = folder / "config.yaml"
    if not file.exists():
        return {}
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError, RecursionError) as problem:
        raise ValueError(f"{file}: is not YAML ({' '.join(str(problem).split())})") from problem
    if not isinstance(settings, dict):
        raise ValueError(f"{file}: must hold the settings of a run, `name: value` a line, got {settings!r:.60}")
    return settings


def correct_threshold_of(folder: Path) -> float:
    """Return `correct_threshold` of a run's settings, 0.5 if they do not name it."""
    value = read_settings(folder).get("correct_threshold", 0.5)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise ValueError(f"{folder / 'config.yaml'}: correct_threshold must be a finite number, got {value!r:.60}")
    return float(value)


def groups_of(runs: Sequence[Run]) -> list[int]:
    """Number the groups of runs that differ in their seeds only, by their first run."""
    return pandas.factorize(np.array([run.repeats for run in runs], dtype=object))[0].tolist()


def differences(runs: Sequence[Run]) -> list[str]:
    """Say of each run by which settings, `output_dir` excepted, it differs from another one."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name != "output_dir")
    differing = [name for name in names if len({repr(run.settings.get(name)) for run in runs}) > 1]
    return [", ".join(f"{name} {run.settings[name]}" for name in differing if name in run.settings) for run in runs]


def comparison(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Tabulate runs, a row each, and the mean of those that differ in their seeds only.

    Returns:
        The columns' names and the rows; the standard error after ± is over held-out problems in a run's row, over runs
        in that of a mean.
    """
    table, groups, differing = pandas.DataFrame([run.figures() for run in runs]), groups_of(runs), differences(runs)
    rows = [
        (run.name, differs, figures)
        for run, differs, (_, figures) in zip(runs, differing, table.iterrows(), strict=True)
    ]
    for group in range(max(groups) + 1):
        members = [k for k, own in enumerate(groups) if own == group]
        if len(members) > 1:
            mean = table.iloc[members].mean()
            mean["error"] = table.accuracy.iloc[members].sem()
            named = " and ".join(runs[k].name for k in members)
            rows.append((f"mean of {len(members)} seeds", f"of {named}", mean))
    forms = {
        "step_time": "{:.3g}",
        **{name: "{:.3g}" for name in table if name.startswith("time/")},
        "tokens": "{:,.0f}",
    }
    columns = [
        "run",
        "differs in" if any(differing) else "",
        "steps",
        "accuracy at step 0",
        "held-out accuracy",
        "reward",
    ]
    columns += ["seconds per step" if name == "step_time" else name.removeprefix("time/") for name in forms]
    return columns, [
        [
            name, differs, f"{one.steps:g}", _text(one.before, "{:.1%}"),
            _text(one.accuracy, "{:.1%}") + _text(one.error, " ± {:.1%}", ""), _text(one.reward, "{:.3f}"),
            *(_text(one.get(figure, math.nan), form) for figure, form in forms.items()),
        ]
        for name, differs, one in rows
    ]  # fmt: skip


def _last(values: list[float]) -> float:
    return values[-1] if values else math.nan


def _text(value: float, form: str, absent: str = "-") -> str:
    return absent if math.isnan(value) else form.format(value)
