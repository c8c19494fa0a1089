"""`python -m benchmarks cost`: measure the cost of each estimator of credit, and of what a user would run instead.

    python -m benchmarks cost          # cost on real completions; tables beside the other results
    python -m benchmarks cost draws    # how many draws of noise the gradient takes; a table of its own

Every estimator is first held to its definition (`definitions.py`); a wrong answer ends the run without a figure.
Seconds are those of one processor thread, contenders in turns in one process. Finished pieces are kept in a ledger, so
that an interrupted run resumes where it stopped.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from benchmarks.evidence.cost_runs import CPU, Record, cheaper, gradients, masking, token_units
from benchmarks.evidence.cost_tables import compared, markdown
from benchmarks.evidence.gradient_draws import draws, draws_markdown
from benchmarks.harness.ledger import Ledger
from benchmarks.harness.provenance import describe_source, document_head
from benchmarks.harness.tables import RESULTS, write
from benchmarks.harness.workloads import gsm8k_job, policy, random_model


@dataclass(frozen=True)
class Settings:
    """Size of the measurement.

    Attributes:
        model: shape of the model, random weights.
        problems: problems of four completions each.
        stride: one in so many tokens is masked by a full forward; forwards of a completion are equally long, so the
            cost of all of them is scaled up from these.
        last: problems on which the outcome `last` is run too; its cost is that of `mean`.
        turns: rounds of the short runs. Masking every token takes one round, problem by problem.
    """

    model: str = "qwen3-40m"
    problems: int = 4
    stride: int = 24
    last: int = 1
    turns: int = 3


def run(settings: Settings, ledger: Ledger, say: Callable[[str], None]) -> Record:
    """Measure everything, piece by piece."""
    job = gsm8k_job(settings.problems)
    model = random_model(settings.model, device=CPU, dtype=torch.float32)

    def piece(name: str, *what: str | int, work: Callable[[], Record]) -> Record:
        say(f"{name} {' '.join(map(str, what))}".strip())
        return ledger.get((name, *what, settings.model, settings.problems), work)

    problems = [job.part(range(4 * i, 4 * i + 4)) for i in range(settings.problems)]
    tokens = [
        piece("tokens", i, settings.stride, *outcomes, work=lambda part=part, outcomes=outcomes: masking(
            model, part, token_units(part), outcomes, settings.stride
        ))
        for i, part in enumerate(problems)
        for outcomes in [("mean", "last") if i < settings.last else ("mean",)]
    ]  # fmt: skip
    spans = [
        piece("spans", i, work=lambda part=part: masking(model, part, part.spans, ("logprob",), 1))
        for i, part in enumerate(problems)
    ]
    trained = {
        name: piece("gradients", name, settings.turns, work=lambda lora=lora: gradients(
            policy(settings.model, lora=lora, device=CPU, dtype=torch.float32), job, settings.turns
        ))
        for name, lora in (("LoRA", True), ("full", False))
    }  # fmt: skip
    return {
        "settings": asdict(settings),
        "job": job.describe(),
        "tokens": tokens,
        "spans": spans,
        "gradients": trained,
        "cheaper": piece("cheaper", settings.turns, work=lambda: cheaper(model, job, settings.turns)),
    }


def main(argv: list[str] | None = None) -> int:
    """Print the tables and write them; a wrong answer is one line on stderr and exit code 1."""
    given = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(given)
    torch.set_num_threads(1)
    made = describe_source(shlex.join(["python", "-m", "benchmarks", "cost", *given]), options.commit)
    if options.what == "draws":
        document: Record = document_head(made) | draws(options.completions, options.sigma)
        return _told(write(document, draws_markdown(document), options.results, "evidence-draws"))
    settings = Settings(**{one.name: getattr(options, one.name) for one in fields(Settings)})
    ledger = Ledger(options.folder / "ledger.jsonl", made, mixed=options.mixed)
    try:
        found = run(settings, ledger, lambda line: print(line, flush=True))
    except AssertionError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 1
    document = document_head(made, ledger.used) | found | {"load": os.getloadavg()[0]}
    document["rows"] = compared(document)
    return _told(write(document, markdown(document), options.results, "evidence-cost"))


def _told(paths: Sequence[Path]) -> int:
    for path in paths:
        print(f"== {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks cost", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("cost", "draws"), default="cost")
    parser.add_argument("--folder", type=Path, default=Path("runs/cost"), help="of the ledger; default: %(default)s")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the tables")
    parser.add_argument("--commit", help="what to record where git cannot tell")
    parser.add_argument("--mixed", action="store_true", help="use what other code or machines left in the ledger")
    for one in fields(Settings):
        kind = type(one.default)
        parser.add_argument(f"--{one.name}", type=kind, default=one.default, help="default: %(default)s")
    parser.add_argument("--completions", type=int, default=64, help="completions of the embedded model, for draws")
    parser.add_argument("--sigma", type=float, default=1e-3, help="standard deviation of the noise, for draws")
    return parser
