"""Read completions with their credit, one JSON object a line; `docs/analysis.md` has the fields."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("weights", "advantages", "importances")
"""Kinds of an estimator's numbers: factors of the tokens' losses, advantages to train on, importances."""
_CORRECT = 0.5  # least reward of a correct completion


@dataclass(frozen=True)
class MaskedSpan:
    """Span of tokens `[start, end)`, and by how much the answer's log-prob drops when it is masked."""

    start: int
    end: int
    text: str
    drop: float


@dataclass(frozen=True)
class TokenCredit:
    """Values of each token by one estimator: `kind` is one of `KINDS`."""

    kind: str
    values: list[float | None]


@dataclass(frozen=True)
class Sample:
    """Completion of T tokens; None for fields that the file does not have."""

    tokens: list[str]
    spans: list[MaskedSpan] = field(default_factory=list)
    credit: dict[str, TokenCredit] = field(default_factory=dict)
    answer: tuple[int, int] | None = None
    reward: float | None = None
    correct: bool | None = None
    advantage: float | None = None
    truncated: bool = False
    counted: bool = True  # by the loss
    uncredited: str | None = None  # why all its tokens weigh the same
    step: int | None = None
    problem: Any = None
    question: str | None = None
    reference: str | None = None
    drops_unit: str = "nats"


def read_samples(path: Path, *, every: int = 1) -> Iterator[Sample]:
    """Read the completions of a file, or of `completions.jsonl` in a run's folder; with `every=n`, every n-th of them.

    Raises `ValueError` with file, line and reason if there is no file or a line is not a completion.
    """
    file = path / "completions.jsonl" if path.is_dir() else path
    for number, entry in json_lines(file, every):
        try:
            yield _sample(entry)
        except (LookupError, TypeError, ValueError, AttributeError) as problem:
            reason = f"{type(problem).__name__}: {problem}"
            raise ValueError(f"{file}, line {number}: is not a completion with its credit ({reason})") from problem


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


def _sample(entry: dict[str, Any]) -> Sample:
    tokens = [str(token) for token in entry["tokens"]]
    judgements = [(entry.get("credit", "weights"), {"weights": entry["weights"]})] if "weights" in entry else []
    credit: dict[str, TokenCredit] = {}
    for name, judgement in [*judgements, *entry.get("estimators", {}).items()]:
        for kind in (kind for kind in KINDS if kind in judgement):
            values = [None if value is None else float(value) for value in judgement[kind]]
            credit[f"{name}, {kind}" if name in credit else name] = TokenCredit(kind, values)
    reward, answer = entry.get("reward"), entry.get("answer")
    for name, one in credit.items():
        if len(one.values) != len(tokens):
            raise ValueError(f"{name} has {len(one.values)} numbers for {len(tokens)} tokens")
    own = ("advantage", "truncated", "counted", "uncredited", "step", "problem", "question", "reference", "drops_unit")
    return Sample(
        tokens=tokens,
        spans=[_span(span, tokens) for span in entry.get("spans", [])],
        credit=credit,
        answer=(answer["start"], answer["end"]) if answer else None,
        reward=reward,
        correct=entry.get("correct", None if reward is None else reward >= _CORRECT),
        **{name: entry[name] for name in own if name in entry},
    )


def _span(span: dict[str, Any], tokens: list[str]) -> MaskedSpan:
    start, end = span["start"], span["end"]
    if not 0 <= start < end <= len(tokens):
        raise ValueError(f"span {start} to {end} of {len(tokens)} tokens")
    return MaskedSpan(start, end, span.get("text", "".join(tokens[start:end])), float(span["drop"]))
