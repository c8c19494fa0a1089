"""Write one page of HTML: a run's figures and curves, and completions shaded by the credit of their tokens.

The page is one file that loads nothing: style and scripts of `assets/` are copied into it. Its data
is JSON without `<`, from which the scripts make text, never HTML.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..disk import write_whole
from .runs import Sample, figures, read_metrics, read_samples, read_settings, written

_MOST = 10_000
"""Completions that a page holds; of more it holds every second, every third and so on."""

_ASSETS = Path(__file__).with_name("assets")


def page_of(samples: Iterable[Sample], title: str, **data: Any) -> str:
    """Make the page of completions, and of a run by its `data`."""
    page = (_ASSETS / "page.html").read_text("utf-8")
    for name in ("page.css", "page.js", "curves.js"):
        page = page.replace(f"{{{name}}}", (_ASSETS / name).read_text("utf-8"))
    head, tail = page.split("{data}")
    entries = Counter(map(_json, samples))  # equal ones are folded
    completions = ",".join(f'{entry[:-1]},"times":{times}}}' for entry, times in entries.items())
    return f'{head}{_json({"title": title, **data})[:-1]},"completions":[{completions}]}}{tail}'


def write_run_page(path: Path, folder: Path, title: str) -> None:
    """Write the page of the run in `folder`, whole or not at all; `ValueError` names a line that is not a run's."""
    metrics, settings, file = read_metrics(folder), read_settings(folder), folder / "completions.jsonl"
    samples = [*read_samples(file)] if file.is_file() else []
    every = max(1, math.ceil(len(samples) / _MOST))
    shown = {name: written(value) for name, value in figures(metrics).items()}
    low, high = shown.pop("low"), shown.pop("high")
    shown["held-out accuracy, %"] += "" if "-" in (low, high) else f" ({low}-{high})"
    run = {
        "steps": metrics.index.tolist(), "max_steps": settings.get("max_steps"), "figures": shown,
        "metrics": metrics.astype(object).where(metrics.notna(), None).to_dict("list"),
        "settings": (folder / "config.yaml").read_text("utf-8") if settings else "",
    }  # fmt: skip
    notes = "Of the completions logged in a step half are the first with spans, the others are spread over the batch. "
    notes += f"One in {every} of the completions in {file} is on this page. " * (every > 1)
    if all(subject := [str(settings.get(name, "")) for name in ("model", "dataset")]):
        title += f": {' on '.join(Path(part).name for part in subject)}"
    write_whole(path, page_of(samples[::every], title, run=run, notes=notes))


def _json(value: Any) -> str:
    """Write JSON that no HTML can be read from."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
