"""Read what runs have written: metrics, settings, and completions with their credit (docs/analysis.md)."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from ..cli import read_mapping

KINDS = ("weights", "advantages", "importances")
"""Kinds of an estimator's numbers: factors of the tokens' losses, advantages to train on, importances."""
_CORRECT = 0.5  # least reward of a correct completion

Sample = dict[str, Any]
"""Completion of T tokens with all fields that docs/analysis.md lists, spans and credit among them."""
_PLAIN = {
    "advantage": None, "truncated": False, "counted": True, "uncredited": None, "step": None, "problem": None,
    "question": None, "reference": None, "drops_unit": "nats", "reward": None,
}  # fmt: skip
"""Fields that are taken as they are, and their values where a file has none."""


def read_metrics(folder: Path) -> pandas.DataFrame:
    """Read a run's metrics: a row a step, a column a metric, nan without a value; `ValueError` names folder or line."""
    file = folder / "metrics.jsonl"
    try:
        entries = pandas.DataFrame([entry for _, entry in json_lines(file)])
        frame = entries.astype(float).astype({"step": int}).groupby("step").last()  # evaluation has its own line
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"{file}: each line of a run must hold a step and numbers ({problem!r})") from problem
    return frame.where(np.isfinite(frame))


def read_settings(folder: Path) -> dict[str, Any]:
    """Read a run's settings, those inside a part by their path; none without their file."""
    file = folder / "config.yaml"
    settings = read_mapping(file) if file.exists() else {}
    flat: dict[str, Any] = {}
    for name, value in settings.items():  # a part that is named by itself is the same as one with its name inside
        options = value if isinstance(value, dict) else {"name": value} if name in ("estimator", "weights") else {}
        flat |= {f"{name}.{option}": one for option, one in options.items()} or {name: value}
    return flat


def figures(metrics: pandas.DataFrame) -> dict[str, float]:
    """Sum a run up; nan without a value. Reward is over the last tenth of the steps, times are means, shares in %."""
    last, means = metrics.ffill().iloc[-1], metrics.mean()
    rewards = metrics.get("reward", pandas.Series(dtype=float)).dropna()
    return {
        "steps": metrics.index[-1],
        "accuracy at step 0, %": 100 * metrics.iloc[0].get("eval_accuracy", math.nan),
        "held-out accuracy, %": 100 * last.get("eval_accuracy", math.nan),
        "low": 100 * last.get("eval_accuracy_low", math.nan),
        "high": 100 * last.get("eval_accuracy_high", math.nan),
        "reward": rewards.tail(max(1, len(rewards) // 10)).mean(),
        "tokens": last.get("num_tokens", math.nan),
        "seconds per step": means.get("step_time", math.nan),
        **{name.replace("time/", "seconds, "): mean for name, mean in means.items() if name.startswith("time/")},
    }


def written(value: float) -> str:
    """Write a figure by three digits, or whole; "-" for nan."""
    return "-" if math.isnan(value) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def read_samples(path: Path) -> Iterator[Sample]:
    """Read the completions of a file, or of `completions.jsonl` in a run's folder.

    Raises `ValueError` with file, line and reason if there is no file or a line is not a completion.
    """
    file = path / "completions.jsonl" if path.is_dir() else path
    for number, entry in json_lines(file):
        try:
            sample = sample_of(entry)
            json.dumps(sample, allow_nan=False)  # as a page holds it
        except (LookupError, TypeError, ValueError, AttributeError) as problem:
            raise ValueError(f"{file}, line {number}: is not a completion with its credit ({problem!r})") from problem
        yield sample


def json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Read the numbers, from 1, and values of a file's lines that are not empty.

    A last line that no newline ends and that is not JSON was half-written by a run that was killed, and is omitted.
    """
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file")
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                yield number, json.loads(line)
        except (ValueError, RecursionError) as problem:
            if number < len(lines):
                raise ValueError(f"{file}, line {number}: is not JSON ({problem})") from problem


def sample_of(entry: dict[str, Any]) -> Sample:
    """Read a completion from its line; raises errors of every kind for what is none."""
    tokens, sample = [str(token) for token in entry["tokens"]], {**_PLAIN, **entry}
    own = [(entry.get("credit", "weights"), {"weights": entry["weights"]})] if "weights" in entry else []
    credit: dict[str, dict[str, Any]] = {}
    for name, numbers in [*own, *entry.get("estimators", {}).items()]:
        for kind in (kind for kind in KINDS if kind in numbers):
            values = [None if value is None else float(value) for value in numbers[kind]]
            if len(values) != len(tokens):
                raise ValueError(f"{name} has {len(values)} numbers for {len(tokens)} tokens")
            credit[f"{name}, {kind}" if name in credit else name] = {"kind": kind, "values": values}
    unit, reward = sample["drops_unit"], sample["reward"]
    correct = entry.get("correct", None if reward is None else reward >= _CORRECT)
    if correct not in (True, False, None) or not isinstance(unit, str):
        raise ValueError(f"correct is {correct!r} and drops_unit {unit!r}, not true or false and a text")
    spans = [
        dict(zip(("start", "end"), _within(span, tokens), strict=True))
        | {"text": span.get("text", "".join(tokens[span["start"] : span["end"]])), "drop": float(span["drop"])}
        for span in entry.get("spans", [])
    ]
    answer = _within(entry["answer"], tokens) if entry.get("answer") else None
    known = {name: sample[name] for name in _PLAIN}
    return {**known, "tokens": tokens, "spans": spans, "credit": credit, "answer": answer, "correct": correct}


def _within(span: dict[str, Any], tokens: Sequence[str]) -> tuple[int, int]:
    start, end = span["start"], span["end"]
    if not 0 <= start < end <= len(tokens):
        raise ValueError(f"span {start} to {end} of {len(tokens)} tokens")
    return start, end
