"""Read completions with their credit, one JSON object a line, as `trainer.analyze.records` makes them.

`docs/analysis.md` has the fields; other programs may write such files, too. Only `tokens` must be there.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Torn = Callable[[str], object] | None
"""What is told of a file's last line where it is half-written, as by a run that was killed; None: that is an error."""

KINDS = ("weights", "advantages", "importances")
"""What an estimator may say of tokens: what multiplies their loss, what is added to it, how much they matter."""


@dataclass(frozen=True)
class MaskedSpan:
    """Span of tokens `[start, end)` of a completion, and how the answer's log-prob moves when they are masked; of other
    estimators, minus their importance."""

    start: int
    end: int
    text: str
    drop: float


@dataclass(frozen=True)
class TokenCredit:
    """Judgement of each token by one estimator: `kind` is one of `KINDS`."""

    kind: str
    values: list[float | None]


@dataclass(frozen=True)
class Sample:
    """Completion of T tokens; None for fields that the file does not have."""

    line: int
    tokens: list[str]
    spans: list[MaskedSpan] = field(default_factory=list)
    credit: dict[str, TokenCredit] = field(default_factory=dict)
    gradient_norms: list[float] | None = None
    answer: tuple[int, int] | None = None
    reward: float | None = None
    correct: bool | None = None
    advantage: float | None = None
    truncated: bool = False
    step: int | None = None
    problem: Any = None
    drops_unit: str = "nats"
    run: str | None = None


def read_samples(path: Path, *, correct_threshold: float = 0.5, every: int = 1) -> list[Sample]:
    """Read the completions of a run folder or of a file.

    Args:
        path: a run's folder, whose `completions.jsonl` is read, or a file of that form.
        correct_threshold: a completion without `correct` counts as correct if its reward is at least this.
        every: 2 reads every second completion, and so on.

    Returns:
        The samples in the order of the file, at least one.

    Raises:
        ValueError: no such file, no completion in it, or a field that is not what it should be; names the file, the
            line, the field and the value.
    """
    samples = list(each_sample(path, correct_threshold=correct_threshold, every=every))
    if not samples:
        file = _file(path)
        raise ValueError(f"{file}: holds no completion; was log_completions 0, or did the run end in its first step?")
    return samples


def each_sample(path: Path, *, correct_threshold: float = 0.5, every: int = 1, torn: Torn = None) -> Iterator[Sample]:
    """Read completions as `read_samples`, one at a time; there may be none. `torn` is as in `json_lines`."""
    file = _file(path)
    for number, entry in json_lines(file, every, torn):
        try:
            yield _sample(number, entry, correct_threshold)
        except ValueError as problem:
            raise ValueError(f"{file}, line {number}: {problem}") from problem


def _file(path: Path) -> Path:
    return path / "completions.jsonl" if path.is_dir() else path


def json_lines(file: Path, every: int = 1, torn: Torn = None) -> Iterator[tuple[int, Any]]:
    """Read a file with a JSON value a line, or of `every` so many lines that are not empty the first.

    A last line that no newline ends and that is not JSON is half-written. Where there is `torn`, that is told of it, by
    file and line, and the line is left out.

    Yields:
        The number of a line, from 1, and its value.

    Raises:
        ValueError: no such file, or a line that is not JSON in UTF-8; names the file and the line.
    """
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file")
    lines = _text(file, torn).split("\n")
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    for number, line in itertools.islice(numbered, 0, None, every):
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as problem:
            if torn and number == len(lines):
                torn(f"{file}, line {number}: is half-written, as by a run that was killed, and is left out")
                return
            raise ValueError(f"{file}, line {number}: is not JSON ({problem})") from problem


def _text(file: Path, torn: Torn) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        read = file.read_bytes()
        if not torn or b"\n" in read[problem.start :]:
            raise ValueError(f"{file}: is not text in UTF-8 ({problem})") from problem
        return read[: problem.start].decode() + "\ufffd"  # a character is half-written, too


def _sample(line: int, entry: Any, correct_threshold: float) -> Sample:
    if not isinstance(entry, dict):
        raise ValueError(f"must be an object, got {_shown(entry)}")
    tokens = entry.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ValueError(f"tokens must be a list of strings, got {_shown(tokens)}")
    length = len(tokens)
    credit = {}
    if entry.get("weights") is not None:
        values = _numbers("weights", entry["weights"], length)
        credit[str(entry.get("credit", "weights"))] = TokenCredit("weights", values)
    for name, found in _mapping("estimators", entry.get("estimators")).items():
        kinds = [kind for kind in KINDS if kind in _mapping(f"estimators.{name}", found)]
        if not kinds:
            raise ValueError(f"estimators.{name} must hold one of {', '.join(KINDS)}, got {_shown(found)}")
        for kind in kinds:
            label = name if kind == kinds[0] and name not in credit else f"{name}, {kind}"
            values = _numbers(f"estimators.{name}.{kind}", found[kind], length, gaps=True)
            credit[label] = TokenCredit(kind, values)
    for name, given in credit.items():
        if given.kind == "weights" and any(value is not None and value < 0 for value in given.values):
            i = next(i for i, value in enumerate(given.values) if value is not None and value < 0)
            raise ValueError(f"{name}[{i}]: a weight must not be negative, got {given.values[i]}")
    norms = entry.get("gradient_norms")
    reward, correct = _number("reward", entry.get("reward")), entry.get("correct")
    if correct is None and reward is not None:
        correct = reward >= correct_threshold
    return Sample(
        line=line,
        tokens=tokens,
        spans=_spans(entry, tokens),
        credit=credit,
        gradient_norms=None if norms is None else [value or 0.0 for value in _numbers("gradient_norms", norms, length)],
        answer=None if entry.get("answer") is None else _bounds("answer", entry["answer"], length),
        reward=reward,
        correct=None if correct is None else bool(correct),
        advantage=_number("advantage", entry.get("advantage")),
        truncated=bool(entry.get("truncated")),
        step=entry.get("step"),
        problem=entry.get("problem"),
        drops_unit=str(entry.get("drops_unit", "nats")),
    )


def _spans(entry: dict[str, Any], tokens: list[str]) -> list[MaskedSpan]:
    spans, drops = entry.get("spans") or [], entry.get("drops")
    if not isinstance(spans, list):
        raise ValueError(f"spans must be a list, got {_shown(spans)}")
    if drops is not None and (not isinstance(drops, list) or len(drops) != len(spans)):
        raise ValueError(f"drops must hold one number per span, got {_shown(drops)} for {len(spans)} spans")
    found = []
    for k, span in enumerate(spans):
        start, end = _bounds(f"spans[{k}]", span, len(tokens))
        given = drops[k] if drops is not None else span.get("drop") if isinstance(span, dict) else None
        drop = _number(f"drop of spans[{k}]", given)
        if drop is None:
            raise ValueError(f"drop of spans[{k}] must be a finite number, got {_shown(given)}")
        text = span.get("text") if isinstance(span, dict) else None
        found.append(MaskedSpan(start, end, text if isinstance(text, str) else "".join(tokens[start:end]), drop))
    return found


def _bounds(name: str, value: Any, length: int) -> tuple[int, int]:
    pair = [value.get("start"), value.get("end")] if isinstance(value, dict) else value
    if not isinstance(pair, list) or len(pair) != 2 or not all(type(edge) is int for edge in pair):
        raise ValueError(f"{name} must have a start and an end, got {_shown(value)}")
    if not 0 <= pair[0] < pair[1] <= length:
        raise ValueError(f"{name} must be a non-empty span inside the {length} tokens, got {pair}")
    return pair[0], pair[1]


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, got {_shown(value)}")
    return value


def _numbers(name: str, values: Any, length: int, *, gaps: bool = False) -> list[float | None]:
    if not isinstance(values, list) or len(values) != length:
        raise ValueError(f"{name} must hold one number per token, got {_shown(values)} for {length} tokens")
    found = [_number(f"{name}[{i}]", value) for i, value in enumerate(values)]
    if not gaps and None in found:
        raise ValueError(f"{name}[{found.index(None)}] must be a finite number, got null")
    return found


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) and name.startswith("estimators"):
        return float(value)  # a mask
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{name} must be a finite number, got {_shown(value)}")
    return float(value)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = "an integer too large" if isinstance(value, int) and abs(value) > 10**60 else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
