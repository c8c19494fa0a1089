"""Read runs and completions with their credit, and sum runs up side by side; `docs/analysis.md` has the fields."""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from ..cli import read_mapping
from ..settings import CHANGE_NO_RESULT

_FORMS = {
    "steps": "{:g}", "accuracy at step 0": "{:.1%}", "held-out accuracy": "{:.1%}", "reward": "{:.3f}",
    "tokens": "{:,.0f}", "low": "{:.3g}", "high": "{:.3g}",
}  # fmt: skip
KINDS = ("weights", "advantages", "importances")
"""Kinds of an estimator's numbers: factors of the tokens' losses, advantages to train on, importances."""
_CORRECT = 0.5  # least reward of a correct completion

Sample = dict[str, Any]
"""Completion of T tokens with all fields that docs/analysis.md lists, spans and credit among them."""
_PLAIN = {
    "advantage": None, "truncated": False, "counted": True, "uncredited": None, "step": None, "problem": None,
    "question": None, "reference": None, "drops_unit": "nats",
}  # fmt: skip
"""Fields that are taken as they are, and their values where a file has none."""


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
            "low": 100 * last.get("eval_accuracy_low", math.nan),
            "high": 100 * last.get("eval_accuracy_high", math.nan),
            "reward": rewards.tail(max(1, len(rewards) // 10)).mean(),
            "tokens": last.get("num_tokens", math.nan),
            "seconds per step": means.get("step_time", math.nan),
            **{name.replace("time/", "seconds, "): mean for name, mean in means.items() if name.startswith("time/")},
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
    file = folder / "config.yaml"
    return (read_mapping(file), file.read_text("utf-8")) if file.exists() else ({}, "")


def groups_of(runs: Sequence[Run]) -> list[int]:
    """Number the groups of runs that differ in seeds and in where and how often they log only, by their first run."""
    own = CHANGE_NO_RESULT | {"seed"}
    keys = [repr(sorted(repr(item) for item in run.settings.items() if item[0] not in own)) for run in runs]
    keys = [key if run.settings else run.name for run, key in zip(runs, keys, strict=True)]
    return pandas.factorize(np.array(keys, dtype=object))[0].tolist()


def comparison(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Tabulate runs, a row each, and the mean of those that differ in their seeds only; returns columns and rows.

    Each setting that differs has a column. Behind an accuracy is its 95 % interval over held-out problems, behind that
    of a mean the lowest and the highest run.
    """
    settings = [_flat(run.settings) for run in runs]
    names = dict.fromkeys(name for own in settings for name in own if name != "output_dir")
    differing = [name for name in names if len({repr(own.get(name)) for own in settings}) > 1]
    heads = [
        [run.name, *(str(own.get(name, "-")) for name in differing)] for run, own in zip(runs, settings, strict=True)
    ]
    table = pandas.DataFrame([run.figures() for run in runs])
    for _, part in [*table.groupby(groups_of(runs))]:
        if len(part) > 1:
            seeds = [str(runs[k].settings.get("seed")) for k in part.index]
            twice, accuracies = len({*seeds}) < len(seeds), part["held-out accuracy"]
            is_spread = not twice and accuracies.min() < accuracies.max()
            ends = [100 * accuracies.min(), 100 * accuracies.max()] if is_spread else [math.nan, math.nan]
            mean = part.mean()
            mean["low"], mean["high"] = ends
            table.loc[len(table)] = mean
            name = "same seed twice" if twice else f"mean of {len(part)} seeds"
            columns = zip(*(heads[k][1:] for k in part.index), strict=True)
            shared = {one: ", ".join(dict.fromkeys(cells)) for one, cells in zip(differing, columns, strict=True)}
            shared["seed"] = ", ".join(seeds)
            heads.append([name, *(shared[one] for one in differing)])
    forms = {name: _FORMS.get(name, "{:.3g}") for name in table}
    cells = {name: ["-" if math.isnan(value) else forms[name].format(value) for value in table[name]] for name in table}
    lows, highs = cells.pop("low"), cells.pop("high")
    cells["held-out accuracy"] = [
        accuracy if "-" in (low, high) else f"{accuracy} ({low}-{high})"
        for accuracy, low, high in zip(cells["held-out accuracy"], lows, highs, strict=True)
    ]
    rows = [[*head, *row] for head, row in zip(heads, zip(*cells.values(), strict=True), strict=True)]
    return ["run", *differing, *cells], rows


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Give each option of a setting that holds several its own name, as flags do."""
    inside = [value for value in settings.values() if isinstance(value, dict)]
    single = {name: value for name, value in settings.items() if not isinstance(value, dict)}
    return {**single, **{name: value for options in inside for name, value in options.items()}}


def read_samples(path: Path, *, every: int = 1) -> Iterator[Sample]:
    """Read the completions of a file, or of `completions.jsonl` in a run's folder; with `every=n`, every n-th of them.

    Raises `ValueError` with file, line and reason if there is no file or a line is not a completion.
    """
    file = path / "completions.jsonl" if path.is_dir() else path
    for number, entry in json_lines(file, every):
        try:
            sample = sample_of(entry)
            json.dumps(sample, allow_nan=False)  # as a page holds it
        except (LookupError, TypeError, ValueError, AttributeError) as problem:
            reason = f"{type(problem).__name__}: {problem}"
            raise ValueError(f"{file}, line {number}: is not a completion with its credit ({reason})") from problem
        yield sample


def json_lines(file: Path, every: int = 1) -> Iterator[tuple[int, Any]]:
    """Read the numbers, from 1, and values of a file's lines; with `every=n`, of every n-th line that is not empty.

    A last line that no newline ends and that is not JSON was half-written by a run that was killed, and is omitted.
    """
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file")
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    for number, line in itertools.islice(numbered, 0, None, every):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as problem:
            if number == len(lines):
                return
            raise ValueError(f"{file}, line {number}: is not JSON ({problem})") from problem
        yield number, value


def sample_of(entry: dict[str, Any]) -> Sample:
    """Read a completion from its line; raises errors of every kind for what is none."""
    tokens = [str(token) for token in entry["tokens"]]
    judgements = [(entry.get("credit", "weights"), {"weights": entry["weights"]})] if "weights" in entry else []
    credit: dict[str, dict[str, Any]] = {}
    for name, judgement in [*judgements, *entry.get("estimators", {}).items()]:
        for kind in (kind for kind in KINDS if kind in judgement):
            values = [None if value is None else float(value) for value in judgement[kind]]
            if len(values) != len(tokens):
                raise ValueError(f"{name} has {len(values)} numbers for {len(tokens)} tokens")
            credit[f"{name}, {kind}" if name in credit else name] = {"kind": kind, "values": values}
    reward, answer, plain = entry.get("reward"), entry.get("answer"), {**_PLAIN, **entry}
    correct = entry.get("correct", None if reward is None else reward >= _CORRECT)
    if correct not in (True, False, None) or not isinstance(plain["drops_unit"], str):
        raise ValueError(f"correct is {correct!r} and drops_unit {plain['drops_unit']!r}, not true or false and a text")
    if answer and not 0 <= answer["start"] <= answer["end"] <= len(tokens):
        raise ValueError(f"answer {answer['start']} to {answer['end']} of {len(tokens)} tokens")
    return {
        "tokens": tokens,
        "spans": [_span(span, tokens) for span in entry.get("spans", [])],
        "credit": credit,
        "answer": (answer["start"], answer["end"]) if answer else None,
        "reward": reward,
        "correct": correct,
        **{name: plain[name] for name in _PLAIN},
    }


def _span(span: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    start, end = span["start"], span["end"]
    if not 0 <= start < end <= len(tokens):
        raise ValueError(f"span {start} to {end} of {len(tokens)} tokens")
    text = span.get("text", "".join(tokens[start:end]))
    return {"start": start, "end": end, "text": text, "drop": float(span["drop"])}
