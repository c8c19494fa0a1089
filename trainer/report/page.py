"""Write one page of HTML: completions shaded by the credit of their tokens, and runs with their curves.

The page is one file that loads nothing: style and scripts of `assets/` are copied into it. Its data
is JSON without `<`, from which the scripts make text, never HTML.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..disk import write_whole
from .runs import Run, Sample, comparison, groups_of, read_runs, read_samples

_MOST_BYTES = 16_000_000
"""Bytes of completions that a page holds; of more it holds every second, every third and so on."""

_ASSETS = Path(__file__).with_name("assets")


def page_of(samples: Iterable[Sample], title: str) -> str:
    """Make the page of completions."""
    return _page(((None, sample) for sample in samples), title, {})


def write_run_page(path: Path, folders: Sequence[Path], title: str) -> list[Run]:
    """Write the page of the runs in `folders`, whole or not at all, and return the runs.

    Raises `ValueError` that names a folder or line that is not a run's, `OSError` if `path` cannot be written.
    """
    runs = read_runs(folders)
    files = {run.name: run.folder / "completions.jsonl" for run in runs}
    sizes = {name: file.stat().st_size for name, file in files.items() if file.is_file()}
    every = {name: math.ceil(size * len(runs) / _MOST_BYTES) for name, size in sizes.items() if size}
    samples = (
        (name if len(runs) > 1 else None, sample)
        for name, n in every.items()
        for sample in read_samples(files[name], every=n)
    )
    drawn = [
        {
            "name": run.name, "group": group, "settings": run.written,
            "steps": run.metrics.index.tolist(), "max_steps": run.settings.get("max_steps"),
            "metrics": run.metrics.astype(object).where(run.metrics.notna(), None).to_dict("list"),
        }
        for run, group in zip(runs, groups_of(runs), strict=True)
    ]  # fmt: skip
    notes = [
        "Of the completions logged in a step half are the first with spans, the others are spread over the batch. "
    ]
    notes += [f"One in {n} of the completions in {files[name]} is on this page. " for name, n in every.items() if n > 1]
    subjects = {tuple(str(run.settings.get(name, "")) for name in ("model", "dataset")) for run in runs}
    if len(subjects) == 1 and all(subject := subjects.pop()):
        title += f": {' on '.join(Path(part).name for part in subject)}"
    write_whole(path, _page(samples, title, {"runs": drawn, "table": comparison(runs), "notes": "".join(notes)}))
    return runs


def _page(samples: Iterable[tuple[str | None, Sample]], title: str, data: Mapping[str, Any]) -> str:
    page = (_ASSETS / "page.html").read_text("utf-8")
    for name in ("page.css", "page.js", "curves.js"):
        page = page.replace(f"{{{name}}}", (_ASSETS / name).read_text("utf-8"))
    head, tail = page.split("{data}")
    entries = Counter(_json({**sample, "run": run}) for run, sample in samples)  # equal ones are folded
    completions = ",".join(f'{entry[:-1]},"times":{times}}}' for entry, times in entries.items())
    return f'{head}{_json({"title": title, **data})[:-1]},"completions":[{completions}]}}{tail}'


def _json(value: Any) -> str:
    """Write JSON that no HTML can be read from."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
