"""Read what the training program wrote of runs, and sum them up side by side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml

from trainer.analyze.samples import Torn, json_lines

_OWN = ("seed", "output_dir")
"""Settings in which repetitions of a run differ."""


@dataclass(frozen=True)
class Run:
    """One run: its settings and, by metric, a value or None for each of its steps."""

    name: str
    folder: Path
    settings: dict[str, Any]
    steps: list[int]
    metrics: dict[str, list[float | None]]

    def values(self, metric: str) -> list[float]:
        """List a metric's values over the steps that have it."""
        return [value for value in self.metrics.get(metric, []) if value is not None]

    @property
    def repeats(self) -> str:
        """Return what runs have in common that differ in their seeds only."""
        named = sorted(repr((name, value)) for name, value in self.settings.items() if name not in _OWN)
        return repr(named) * bool(self.settings)


def read_runs(folders: Sequence[Path], torn: Torn = None) -> list[Run]:
    """Read run folders; each is named by its last part, or by its path where that is not enough.

    Of metrics that end with a half-written line what is whole is read; `torn` is told, as in `json_lines`.

    Raises:
        ValueError, OSError: a folder, its settings or a line of its metrics is not a run's; the message names it.
    """
    resolved = [folder.resolve() for folder in folders]
    for k, folder in enumerate(resolved):
        if folder in resolved[:k]:
            raise ValueError(f"{folders[k]}: is given twice")
    last = [folder.name for folder in resolved]
    names = [folder.name if last.count(folder.name) == 1 else str(folder) for folder in resolved]
    return [_read_run(folder, name, torn) for folder, name in zip(folders, names, strict=True)]


def _read_run(folder: Path, name: str, torn: Torn) -> Run:
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder")
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise ValueError(f"{folder}: holds no metrics.jsonl, so it is not the folder of a run")
    places: dict[int, int] = {}  # of steps; training and evaluation have a line each
    columns: dict[str, list[float | None]] = {}
    for number, entry in json_lines(file, torn=torn):
        if not isinstance(entry, dict) or type(entry.get("step")) is not int:
            raise ValueError(f"{file}, line {number}: must be an object with an integer step, got {entry!r:.60}")
        place = places.setdefault(entry.pop("step"), len(places))
        for metric, value in entry.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{file}, line {number}: {metric} must be a number, got {value!r:.60}")
            column = columns.setdefault(metric, [])
            column += [None] * (place + 1 - len(column))
            column[place] = value if abs(value) < math.inf else None
    if not places:
        raise ValueError(f"{file}: holds no step")
    steps = sorted(places)
    return Run(
        name,
        folder,
        read_settings(folder),
        steps,
        {
            metric: [column[places[step]] if places[step] < len(column) else None for step in steps]
            for metric, column in columns.items()
        },
    )


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the settings of a run, `config.yaml` in its folder; none where there is no such file.

    Raises:
        ValueError: the file is not YAML, or holds something else than settings.
    """
    file = folder / "config.yaml"
    if not file.exists():
        return {}
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as problem:
        raise ValueError(f"{file}: is not YAML ({' '.join(str(problem).split())})") from problem
    if not isinstance(settings, dict):
        raise ValueError(f"{file}: must hold the settings of a run, `name: value` a line, got {settings!r:.60}")
    return settings


def correct_threshold_of(folder: Path) -> float:
    """Return `correct_threshold` of a run's settings, 0.5 where there are none or they do not name it."""
    file, value = folder / "config.yaml", read_settings(folder).get("correct_threshold", 0.5)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise ValueError(f"{file}: correct_threshold must be a finite number, got {value!r:.60}")
    try:
        return float(value)
    except OverflowError as problem:
        raise ValueError(f"{file}: correct_threshold must be a number that a float holds") from problem


def groups_of(runs: Sequence[Run]) -> list[int]:
    """Number the groups of runs that differ in their seeds only, by their first run."""
    kinds = list(dict.fromkeys(run.repeats or run.name for run in runs))
    return [kinds.index(run.repeats or run.name) for run in runs]


def differences(runs: Sequence[Run]) -> list[str]:
    """Say of each run by which settings it differs from some other one, where it is written excepted."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name != "output_dir")
    differing = [name for name in names if len({repr(run.settings.get(name)) for run in runs}) > 1]
    return [", ".join(f"{name} {run.settings[name]}" for name in differing if name in run.settings) for run in runs]


@dataclass(frozen=True)
class Figures:
    """Figures of a run, or means over repetitions; None where there is nothing to tell them by."""

    steps: float
    accuracy_before: float | None  # held-out, greedy, before the first step
    accuracy: float | None  # after the last evaluation
    accuracy_error: float | None  # standard error of that: over problems of one run, over repetitions of several
    reward: float | None  # mean over the last tenth of the steps
    step_time: float | None  # mean over all steps, seconds, as are the stages
    stages: dict[str, float]
    tokens: float | None

    @classmethod
    def of(cls, run: Run) -> "Figures":
        """Sum up one run."""
        accuracies, errors = run.values("eval_accuracy"), run.values("eval_accuracy_stderr")
        rewards, tokens = run.values("reward"), run.values("num_tokens")
        return cls(
            steps=run.steps[-1],
            accuracy_before=accuracies[0] if accuracies and run.metrics["eval_accuracy"][0] is not None else None,
            accuracy=accuracies[-1] if accuracies else None,
            accuracy_error=errors[-1] if errors else None,
            reward=fmean(rewards[-max(1, len(rewards) // 10) :]) if rewards else None,
            step_time=_mean(run.values("step_time")),
            stages={name[5:]: fmean(run.values(name)) for name in run.metrics if name.startswith("time/")},
            tokens=tokens[-1] if tokens else None,
        )

    @classmethod
    def mean(cls, repetitions: "Sequence[Figures]") -> "Figures":
        """Average several runs of the same settings."""

        def over(name: str) -> float | None:
            return _mean([getattr(one, name) for one in repetitions if getattr(one, name) is not None])

        accuracies = [one.accuracy for one in repetitions if one.accuracy is not None]
        error = stdev(accuracies) / math.sqrt(len(accuracies)) if len(accuracies) > 1 else None
        stages = dict.fromkeys(name for one in repetitions for name in one.stages)
        return cls(
            steps=fmean(one.steps for one in repetitions),
            accuracy_before=over("accuracy_before"), accuracy=over("accuracy"), accuracy_error=error,
            reward=over("reward"), step_time=over("step_time"), tokens=over("tokens"),
            stages={name: fmean(one.stages.get(name, 0.0) for one in repetitions) for name in stages},
        )  # fmt: skip


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def comparison(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Tabulate runs, a row each, and the mean of those that differ in their seeds only.

    Returns:
        The columns' names and the rows; the standard error after ± is over held-out problems in a run's row, over runs
        in that of a mean.
    """
    each, groups, differing = [Figures.of(run) for run in runs], groups_of(runs), differences(runs)
    rows = [(run.name, differs, figures) for run, differs, figures in zip(runs, differing, each, strict=True)]
    for group in range(max(groups) + 1):
        members = [k for k, own in enumerate(groups) if own == group]
        if len(members) > 1:
            named = " and ".join(runs[k].name for k in members)
            rows.append((f"mean of {len(members)} seeds", f"of {named}", Figures.mean([each[k] for k in members])))
    stages = list(dict.fromkeys(stage for figures in each for stage in figures.stages))
    columns = [
        "run",
        "differs in" if any(differing) else "",
        "steps",
        "accuracy at step 0",
        "held-out accuracy",
        "reward",
    ]
    return [*columns, "seconds per step", *stages, "tokens"], [
        [
            name, differs, f"{one.steps:g}", _text(one.accuracy_before, "{:.1%}"),
            _text(one.accuracy, "{:.1%}") + _text(one.accuracy_error, " ± {:.1%}", ""), _text(one.reward, "{:.3f}"),
            _text(one.step_time, "{:.3g}"), *(_text(one.stages.get(stage), "{:.3g}") for stage in stages),
            _text(one.tokens, "{:,.0f}"),
        ]
        for name, differs, one in rows
    ]  # fmt: skip


def _text(value: float | None, form: str, absent: str = "-") -> str:
    return absent if value is None else form.format(value)
