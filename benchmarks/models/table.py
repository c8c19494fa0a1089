"""`python -m benchmarks models`: find which model types are scored and trained exactly, and why others are refused.

Builds every causal model type of the installed transformers small (`small_models.py`), scores ragged batches and
compares with one full forward per span; takes log-probs as the trainer does and compares them, and every gradient,
with the model's own forwards of each row. Each type has a process and a time limit of its own and leaves a line in a
file, so that an interrupted run resumes where it was. Writes `docs/models.md` and `benchmarks/results/models.json`.
"""

import argparse
import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import json
import logging
import math
import multiprocessing
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import cfa_kernels
from benchmarks.harness.results import RESULTS
from benchmarks.harness.workloads import REPOSITORY
from benchmarks.models import small_models
from benchmarks.models import verdicts as model_verdicts
from benchmarks.models.small_models import WINDOW, Case, build, cases, layer_kinds, model_types, what_is_missing
from benchmarks.models.small_models import case as case_of_name
from benchmarks.models.verdicts import (
    EXACT,
    GRADIENT_TOLERANCE,
    MEANINGS,
    MOST,
    NOT_BUILDABLE,
    NOT_JUDGED,
    NOT_RUNNABLE,
    ROUNDINGS,
    TOLERANCE,
    UNCLEAR,
    WRONG,
    Plain,
    Verdict,
    judge_scores,
    judge_training,
    ragged_batch,
)

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    model_type: str
    variant: str
    model_class: str
    layers: list[str]
    scores: Verdict
    trains: Verdict
    median_drop: float | None = None  # |nats| that masking a span moves an answer by: far above the tolerance

    @property
    def name(self) -> str:
        return f"{self.model_type}, {self.variant}" if self.variant else self.model_type

    @staticmethod
    def from_json(entry: dict[str, Any]) -> "Row":
        return Row(**{**entry, "scores": Verdict(**entry["scores"]), "trains": Verdict(**entry["trains"])})


def judge(of: Case, seeds: Sequence[int] = SEEDS, *, complete: bool = True) -> Row:
    """Build the case and compare. `complete` also asks that the small model has all that the default has."""
    try:
        model = build(of)
        missing = what_is_missing(of, model) if complete and not of.variant else []
    except Exception as error:
        return _row(of, None, Verdict(NOT_BUILDABLE, _brief(error)))
    if missing:
        return _row(of, model, Verdict(NOT_BUILDABLE, f"the small model lacks {', '.join(missing)}"))
    with contextlib.suppress(ValueError):  # a model with one implementation, its own
        model.set_attn_implementation("eager")
    batches = [ragged_batch(seed) for seed in seeds]
    try:
        plain = Plain(model)
        plain.logprobs(torch.cat([batches[0].prompts[0], batches[0].completions[0]]))
    except Exception as error:
        return _row(of, model, Verdict(NOT_RUNNABLE, _brief(error)))
    scores, median = judge_scores(model, plain, batches)
    trains = judge_training(model, plain, batches)
    return _row(of, model, scores, trains, median)


def _row(
    of: Case, model: PreTrainedModel | None, scores: Verdict, trains: Verdict | None = None, *rest: float | None
) -> Row:
    name = type(model).__name__ if model is not None else of.model_class
    layers = layer_kinds(model.config) if model is not None else []
    return Row(of.model_type, of.variant, name, layers, scores, trains or scores, *rest)


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# Running


def judge_in_child(name: str, pipe: Connection) -> None:
    """Judge one case quietly on one thread and send its row."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    pipe.send(asdict(judge(case_of_name(name))))


def run(
    todo: Sequence[Case],
    lines: Path,
    *,
    processes: int,
    seconds: float,
    source: str,
    worker: Callable[[str, Connection], None] = judge_in_child,
    start_method: str = "forkserver",
) -> None:
    """Judge each case by `worker` in a process of its own and append a line for each to `lines`."""
    context: Any = multiprocessing.get_context(start_method)
    context.set_forkserver_preload(["benchmarks.models.small_models", "trainer.policy"])  # what takes seconds to import
    waiting = list(reversed(todo))
    running: dict[Connection, tuple[Case, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            of = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=worker, args=(of.name, theirs), daemon=True)
            process.start()
            theirs.close()
            running[ours] = (of, process, time.monotonic() + seconds)
        soonest = min(deadline for *_, deadline in running.values())
        ready = wait(list(running), timeout=max(0.0, soonest - time.monotonic()))
        for pipe, (of, process, deadline) in list(running.items()):
            if pipe in ready:
                row = _received(of, pipe, process)
            elif time.monotonic() >= deadline:
                row = _row(of, None, Verdict(NOT_JUDGED, f"took longer than {seconds:g} s"))
            else:
                continue
            del running[pipe]
            process.kill()
            process.join()
            append(lines, row, source)
            print(f"{row.name}: {row.scores.status} / {row.trains.status}  {row.scores.why}"[:200], flush=True)


def _received(of: Case, pipe: Connection, process: Any) -> Row:
    try:
        return Row.from_json(pipe.recv())
    except EOFError:
        process.join()
        return _row(of, None, Verdict(NOT_JUDGED, f"its process ended with {process.exitcode}"))


def append(lines: Path, row: Row, source: str) -> None:
    """Add a row to the file that a later run goes on from."""
    lines.parent.mkdir(parents=True, exist_ok=True)
    torn = lines.exists() and not lines.read_text().endswith("\n")
    with lines.open("a") as file:
        file.write("\n" * torn + json.dumps({"source": source, **asdict(row)}) + "\n")


def finished(lines: Path, source: str) -> dict[str, Row]:
    """The rows in the file that were judged with these sources, by name; the last of a name counts.

    A line that a broken run left half-written is passed over.
    """
    rows: dict[str, Row] = {}
    for line in lines.read_text().splitlines() if lines.exists() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if entry.pop("source") == source:
            row = Row.from_json(entry)
            rows[row.name] = row
    return rows


@functools.cache
def versions() -> dict[str, str]:
    """Versions of what the table is about."""
    libraries = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "triton")}
    return libraries | {"cfa_kernels": cfa_kernels.__version__}


def source_digest() -> str:
    """A name for the code that is judged, what judges it and the libraries; rows of another are made anew."""
    files = sorted((REPOSITORY / "cfa_kernels").rglob("*.py"))
    files += [
        REPOSITORY / "trainer" / "policy.py",
        *(Path(m.__file__) for m in (small_models, model_verdicts)),
        Path(__file__),
    ]
    digest = hashlib.sha256(json.dumps(versions()).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


# Writing


def document(rows: Sequence[Row], date: str) -> dict[str, Any]:
    """The machine-readable result."""
    return {
        "schema": 2,
        "date": date,
        "versions": versions(),
        "tolerance_nats": TOLERANCE,
        "compared": COMPARED,
        "types": len({row.model_type for row in rows}),
        "counts": {column: _counts(rows, column) for column in ("scores", "trains")},
        "rows": [asdict(row) for row in sorted(rows, key=lambda row: row.name)],
    }


def _counts(rows: Iterable[Row], column: str) -> dict[str, int]:
    found = Counter(getattr(row, column).status for row in rows)
    return {status: found[status] for status in MEANINGS}


# What the columns compare, kept in the result: a page tells of the run that it was written from.
COMPARED = f"""\
"Scores" compares `score_counterfactuals` with one full forward of the model per span, over ragged batches of shared
prompts and prefixes, pieces of one token, equal completions and some that begin alike; "trains" compares what the
trainer differentiates with the model's own forward and backward of each row: log-probs, and the gradient of every
parameter by value. That may be off by {GRADIENT_TOLERANCE:g} of its norm, or by {ROUNDINGS} times what the model's own
moves by when every weight goes to a neighbouring float32 number, at most by {MOST:g}."""
INTRODUCTION = """\
# Which models

Written by `python -m benchmarks models`; edit that, not this. Every causal model type of transformers, built
small with random weights, on the CPU in float32: at least a whole period of the layers of its default
configuration, windows of {window} tokens under sequences of up to {longest}. A row with
a comma is the type with something switched on that its default leaves off.

{compared}

{date}: torch {torch}, transformers {transformers}, triton {triton}, cfa_kernels {cfa_kernels}. {types} types,
{rows} rows.

| | scores | trains | |
|---|--:|--:|---|
{counts}

A model of your own answers for itself, before any work is done:

```python
from cfa_kernels import check_model

check_model(model)  # NotImplementedError names the model and the reason
```

| Type | Model | Layers | Scores | Trains | Off by less than, nats | Gradients, of their norm | Why |
|---|---|---|---|---|--:|--:|---|
"""


def markdown(result: dict[str, Any]) -> str:
    """`docs/models.md` for a `document`."""
    counts = "\n".join(
        f"| {status} | {result['counts']['scores'][status]} | {result['counts']['trains'][status]} | {meaning} |"
        for status, meaning in MEANINGS.items()
        if result["counts"]["scores"][status] or result["counts"]["trains"][status]
    )
    longest = max(len(prompt) + len(completion) for prompt, completion, *_ in ragged_batch(SEEDS[-1]))
    introduction = INTRODUCTION.format(
        window=WINDOW, longest=longest, date=result["date"], **result["versions"], types=result["types"],
        rows=len(result["rows"]), counts=counts, compared=result["compared"],
    )  # fmt: skip
    return introduction + "".join(_line(Row.from_json(entry)) for entry in result["rows"])


def _line(row: Row) -> str:
    errors = [verdict.error for verdict in (row.scores, row.trains) if verdict.status == EXACT and verdict.error]
    cells = [
        row.name, row.model_class, ", ".join(row.layers), row.scores.status, row.trains.status,
        _power_of_ten(max(errors)) if errors else "",
        _power_of_ten(row.trains.gradient_error) if row.trains.status == EXACT and row.trains.gradient_error else "",
        _why(row),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |\n"


def _power_of_ten(error: float) -> str:
    """The next power of ten: the digits of a rounding error differ from machine to machine."""
    return f"1e{math.ceil(math.log10(error))}"


def _why(row: Row) -> str:
    """Reasons of both columns in one cell; the same reason once."""
    scores, trains = (_short(verdict.why) for verdict in (row.scores, row.trains))
    if not trains or trains == scores:
        return scores
    return f"{scores}; trains: {trains}" if scores else f"trains: {trains}"


def _short(why: str, most: int = 200) -> str:
    """A reason that fits a cell."""
    text = re.sub(r"^NotImplementedError: (model: )?", "", why).replace("|", "\\|")
    return text if len(text) <= most else text[:most].rsplit(" ", 1)[0] + " …"


def main(argv: list[str] | None = None) -> int:
    """Judge what is not judged yet and write the table once all of it is; 1 if there is a defect in it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks models", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="judge these again, by type or by row")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0, help="most that one row may take")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs judged")
    parser.add_argument("--date", default=datetime.datetime.now(datetime.UTC).date().isoformat())
    parser.add_argument("--lines", type=Path, default=REPOSITORY / "build" / "models.jsonl", help="rows so far")
    parser.add_argument("--json", type=Path, default=RESULTS / "models.json")
    parser.add_argument("--markdown", type=Path, default=REPOSITORY / "docs" / "models.md")
    options = parser.parse_args(argv)
    if options.fresh:
        options.lines.unlink(missing_ok=True)
    source = source_digest()
    every = [of for model_type in model_types() for of in cases(model_type)]
    if options.only:
        todo = [of for of in every if {of.name, of.model_type} & set(options.only)]
        if unknown := set(options.only) - {name for of in todo for name in (of.name, of.model_type)}:
            parser.error(f"--only: no such type or row: {', '.join(sorted(unknown))}")
    else:
        done = finished(options.lines, source)
        todo = [of for of in every if of.name not in done]
    run(todo, options.lines, processes=options.processes, seconds=options.seconds, source=source)
    rows = finished(options.lines, source)
    if missing := [of.name for of in every if of.name not in rows]:
        print(f"{len(missing)} rows are not judged yet, so the table is not written: {', '.join(missing[:5])}, ...")
        return 0
    result = document([rows[of.name] for of in every], options.date)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    options.markdown.write_text(markdown(result), encoding="utf-8")
    print(json.dumps(result["counts"]))
    defects = [row.name for row in rows.values() if {row.scores.status, row.trains.status} & {WRONG, UNCLEAR}]
    return 1 if defects else 0
