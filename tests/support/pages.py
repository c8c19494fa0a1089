"""Run folders made up by hand, and what a page holds before any script runs."""

import json
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import yaml

from tests.support.tiny import jsonl
from trainer.report.runs import Sample, read_samples

HOSTILE = [
    "</script><script>alert(1)</script>", "<!--", "\"'><img src=x onerror=alert(2)>", "&lt;b&gt;",
    "👩‍👩 é", "\u202eevil\u2066", "a\u061c\u200b\ufeff\U000e0041b",
    "\u05e9\u05dc\u05d5\u05dd", "\x00", "\x1b[31m\x85\r", "\n\t", "\ud800", "", "]]>", "${x}`",
]  # fmt: skip


class Page(HTMLParser):
    """Every element of a page, and the data that its scripts show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self._text = ""
        self.feed(text)
        self.data = json.loads(self._text)

    def handle_starttag(self, tag, attrs) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data) -> None:
        if self.elements and self.elements[-1][1].get("id") == "data":
            self._text += data


def write_lines(file: Path, entries: Sequence[object]) -> Path:
    file.write_text(jsonl(*entries), encoding="utf-8")
    return file


def completion(step: int, reward: float, **more: object) -> dict:
    """A completion of ten tokens with two masked spans, as a run logs it."""
    return {
        "step": step, "problem": 7, "reward": reward, "advantage": reward - 0.5, "tokens": list("Step1=2+3."),
        "answer": {"start": 9, "end": 10}, "weights": [1, 1, 1, 1, 4, 4, 4, 2, 0.5, 1.5], "credit": "masking",
        "spans": [{"start": 0, "end": 2, "drop": -0.5}, {"start": 4, "end": 7, "drop": 4.25}],
    } | more  # fmt: skip


def write_run(folder: Path, seed: int = 0, steps: int = 4, completions: Sequence[object] = (), **settings) -> Path:
    """Write the folder of a run that evaluated before its first step and after its last one."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed": seed, "output_dir": str(folder), **settings}))
    entries: list[dict] = [{"step": 0, "eval_accuracy": 0.25, "eval_accuracy_low": 0.2, "eval_accuracy_high": 0.35}]
    for step in range(1, steps + 1):
        times = {"generate": 1.0 + seed, "credit": 0.1 * step, "update": 0.7, "other": 0.01}
        entry = {"step": step, "reward": 0.1 * step + 0.01 * seed, "entropy": 1 / 3, "num_tokens": 100 * step}
        entry |= {"step_time": sum(times.values())} | {f"time/{name}": value for name, value in times.items()}
        entries.append(entry)
    ends = {"low": 0.45, "": 0.5, "high": 0.55}
    entries.append(
        {"step": steps, **{f"eval_accuracy_{end}".rstrip("_"): value + 0.1 * seed for end, value in ends.items()}}
    )
    write_lines(folder / "metrics.jsonl", entries)
    write_lines(folder / "completions.jsonl", completions)
    return folder


def hostile(folder: Path) -> list[Sample]:
    """A completion of hostile tokens, spans and names."""
    entry = {
        "tokens": HOSTILE, "spans": [{"start": 0, "end": 3, "drop": -1.0, "text": "</details><script>"}],
        "drops_unit": "</th><script>", "problem": "</p><i>", "answer": {"start": 0, "end": 3},
        "estimators": {name: {"weights": [1.0] * len(HOSTILE)} for name in ("</div><b>", '" onclick="x')},
    }  # fmt: skip
    return list(read_samples(write_lines(folder / "hostile.jsonl", [entry])))
