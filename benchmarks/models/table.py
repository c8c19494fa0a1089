"""`python -m benchmarks models`: find which model types are scored and trained exactly, and why others are refused.

Builds every causal model type of the installed transformers small (`small_models.py`), scores ragged batches and
compares with one full forward per span; takes log-probs as the trainer does and compares them, and every gradient,
with the model's own forwards of each row. Each row has a process and a time limit of its own and is kept, so that an
interrupted run goes on where it was. Writes `docs/models.md` and `benchmarks/results/models.json`.
"""

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
import json
import logging
import math
import multiprocessing
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import cfa_kernels
from benchmarks.harness.environment import REPOSITORY
from benchmarks.harness.results import RESULTS, Pieces, write_json
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
from trainer.provenance import find_commit

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class ModelRow:
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
    def from_json(entry: dict[str, Any]) -> "ModelRow":
        return ModelRow(**{**entry, "scores": Verdict(**entry["scores"]), "trains": Verdict(**entry["trains"])})


def judge(of: Case, seeds: Sequence[int] = SEEDS, *, complete: bool = True) -> ModelRow:
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
        plain.logprobs(torch.cat([batches[0].rows.prompts[0], batches[0].rows.completions[0]]))
    except Exception as error:
        return _row(of, model, Verdict(NOT_RUNNABLE, _brief(error)))
    scores, median = judge_scores(model, plain, batches)
    trains = judge_training(model, plain, batches)
    return _row(of, model, scores, trains, median)


def _row(
    of: Case, model: PreTrainedModel | None, scores: Verdict, trains: Verdict | None = None, *rest: float | None
) -> ModelRow:
    name = type(model).__name__ if model is not None else of.model_class
    layers = layer_kinds(model.config) if model is not None else []
    return ModelRow(of.model_type, of.variant, name, layers, scores, trains or scores, *rest)


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# Running


def judge_quietly(name: str) -> dict[str, Any]:
    """Judge one case on one thread, as JSON."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    return asdict(judge(case_of_name(name)))


def judged(
    todo: Sequence[Case],
    pieces: Pieces | None,
    *,
    processes: int,
    seconds: float,
    worker: Callable[[str], dict[str, Any]] = judge_quietly,
    start_method: str = "forkserver",
) -> Iterator[ModelRow]:
    """Yield the row of each case: the one in `pieces`, or what `worker` finds in a process of its own."""
    context: Any = multiprocessing.get_context(start_method)
    context.set_forkserver_preload(["benchmarks.models.small_models", "trainer.policy"])  # what takes seconds to import
    with context.Pool(processes, maxtasksperchild=1) as pool:
        result = {of.name: pool.apply_async(worker, (of.name,)) for of in todo if not pieces or of.name not in pieces}

        def row(of: Case) -> dict[str, Any]:
            try:
                return dict(result[of.name].get(seconds))
            except multiprocessing.TimeoutError:
                why = f"its process died, or took longer than {seconds:g} s"
                return asdict(_row(of, None, Verdict(NOT_JUDGED, why)))

        for of in todo:
            entry = ModelRow.from_json(pieces.get(of.name, functools.partial(row, of)) if pieces else row(of))
            print(f"{entry.name}: {entry.scores.status} / {entry.trains.status}  {entry.scores.why}"[:200], flush=True)
            yield entry


@functools.cache
def versions() -> dict[str, str]:
    """Versions of what the table is about."""
    libraries = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "triton")}
    return libraries | {"cfa_kernels": cfa_kernels.__version__}


# Writing


def document(rows: Sequence[ModelRow], date: str) -> dict[str, Any]:
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


def _counts(rows: Iterable[ModelRow], column: str) -> dict[str, int]:
    result = Counter(getattr(row, column).status for row in rows)
    return {status: result[status] for status in MEANINGS}


# Description of the columns, kept in the result: a page tells of the run that it was written from.
COMPARED = f"""\
"Scores" compares `score_counterfactuals` with one full forward of the model per span. Batches are ragged: shared
prompts and prefixes, pieces of one token, equal completions and some that begin alike. "Trains" compares the
trainer's log-probs, and the gradient of every parameter by value, with the model's own forward and backward of each
row. A gradient may be off by {GRADIENT_TOLERANCE:g} of its norm, or by more where rounding explains the difference.
The limit is then {ROUNDINGS} times the change of the model's own gradient when every weight moves to a neighbouring
float32 number. No limit is above {MOST:g} of the norm."""
INTRODUCTION = """\
# Which models

`cfa_kernels.check_model(model)` checks your own model before any work is done. The table counts {types} causal
model types of transformers in {rows} rows. A row with a comma is the type with an option that is off by default.

| | scores | trains | |
|---|--:|--:|---|
{counts}

Measured {date} with torch {torch}, transformers {transformers}, triton {triton} and cfa_kernels {cfa_kernels}.
[models.json](../benchmarks/results/models.json) has the layers, the model class and the full reason of each row.

| your model | what to do |
|---|---|
| a vision-language class | scored and trained on text as it is (`tests/model/test_vision_language.py`) |
| Llama 4's class, which has no head | pass `model.language_model` |
| a quantised base | see [its page](quantised.md) |
| layers that carry a state, gradient checkpointing | nothing: checkpointing works as for all other layers |

## How it was measured

`python -m benchmarks models` writes this page; edit the command, not the page. The command builds every type small,
with random weights, on the CPU in float32. A model has at least one period of its default layers, and windows of
{window} tokens under sequences of up to {longest}.

{compared}
"""


def markdown(result: dict[str, Any]) -> str:
    """`docs/models.md` for a `document`."""
    counts = "\n".join(
        f"| {status} | {result['counts']['scores'][status]} | {result['counts']['trains'][status]} | {meaning} |"
        for status, meaning in MEANINGS.items()
        if result["counts"]["scores"][status] or result["counts"]["trains"][status]
    )
    longest = max(len(row.tokens) for row in ragged_batch(SEEDS[-1]).scored_rows)
    introduction = INTRODUCTION.format(
        window=WINDOW, longest=longest, date=result["date"], **result["versions"], types=result["types"],
        rows=len(result["rows"]), counts=counts, compared=result["compared"],
    )  # fmt: skip
    rows = [ModelRow.from_json(entry) for entry in result["rows"]]
    exact = [row for row in rows if row.scores.status == row.trains.status == EXACT]
    errors = [[*key, types] for key, types in _types_by(_errors, exact)]
    reasons = [[why, types] for why, types in _types_by(_why, (row for row in rows if row not in exact))]
    return f"""{introduction}
## Exact

{_table(["log-probs off by less than, nats", "gradients, of their norm", "types"], errors)}
## Refused or not buildable

{_table(["why", "types"], reasons)}"""


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def _types_by(key: Callable[[ModelRow], Any], rows: Iterable[ModelRow]) -> list[tuple[Any, str]]:
    """The names of rows with equal keys, the most frequent key first."""
    names: dict[Any, list[str]] = {}
    for row in rows:
        names.setdefault(key(row), []).append(row.name)
    return [(value, " · ".join(each)) for value, each in sorted(names.items(), key=lambda item: -len(item[1]))]


def _errors(row: ModelRow) -> tuple[str, str]:
    error, gradient = max(row.scores.error or 0, row.trains.error or 0), row.trains.gradient_error
    return _power_of_ten(error) if error else "0", _power_of_ten(gradient) if gradient else "0"


def _power_of_ten(error: float) -> str:
    """The next power of ten: the digits of a rounding error differ from machine to machine."""
    return f"1e{math.ceil(math.log10(error))}"


def _why(row: ModelRow) -> str:
    """Reasons of both columns in one cell, without the model's class and figures; the same reason once."""
    scores, trains = (_short(verdict.why, row.model_class) for verdict in (row.scores, row.trains))
    if not trains or trains == scores:
        return scores
    return f"{scores}; trains: {trains}" if scores else f"trains: {trains}"


def _short(why: str, model_class: str, most: int = 200) -> str:
    """A reason that fits a cell and that other types may have too."""
    text = re.sub(r"^NotImplementedError: (model: )?", "", why).replace("|", "\\|")
    text = text.replace(f"{model_class}: ", "").replace(model_class, "the model")
    text = re.sub(r" \([^()]* nats\)|, so it can.*$", "", text)
    return text if len(text) <= most else text[:most].rsplit(" ", 1)[0] + " …"


def main(argv: list[str] | None = None) -> int:
    """Judge every type and write the table, or only some and print them; 1 if there is a defect among them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks models", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="types or rows to judge and print; writes no table")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of a row")
    parser.add_argument("--date", default=datetime.datetime.now(datetime.UTC).date().isoformat())
    parser.add_argument(
        "--folder", type=Path, default=REPOSITORY / "build" / "models", help="folder of the rows so far"
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "models.json")
    parser.add_argument("--markdown", type=Path, default=REPOSITORY / "docs" / "models.md")
    options = parser.parse_args(argv)
    todo = [of for model_type in model_types() for of in cases(model_type)]
    pieces = None
    if options.only:
        todo = [of for of in todo if {of.name, of.model_type} & set(options.only)]
        if unknown := set(options.only) - {name for of in todo for name in (of.name, of.model_type)}:
            parser.error(f"--only: no such type or row: {', '.join(sorted(unknown))}")
    else:
        pieces = Pieces(options.folder, versions(), {"environment": {"commit": find_commit()[0] or "unknown"}})
    rows = list(judged(todo, pieces, processes=options.processes, seconds=options.seconds))
    if pieces:
        result = document(rows, options.date)
        write_json(options.json, result)
        options.markdown.write_text(markdown(result), encoding="utf-8")
        print(json.dumps(result["counts"]))
    return 1 if any({row.scores.status, row.trains.status} & {WRONG, UNCLEAR} for row in rows) else 0
