"""`python -m benchmarks evidence NAME`: gather evidence on what credit finds, with tables beside the results.

The model is trained once and kept in the folder; so is every result. An interrupted run resumes where it stopped.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence import ablation, demo, fidelity, gradient_variance, placeholders, planted, planted_tables
from benchmarks.evidence.methods import METHODS
from benchmarks.evidence.models import MODELS, RANDOM, TRAINED, Recipe, load, train
from benchmarks.harness.ledger import Ledger
from benchmarks.harness.provenance import Source, code_digest, describe_source, document_head
from benchmarks.harness.tables import RESULTS, write

LEDGER = "ledger.jsonl"
ABLATION = "evidence-ablation.jsonl"
"""Stands beside the tables and holds their lines: its runs take hours, and the next are paired with them."""
# What random weights happen to prefer is the same for all problems; several such models even it out.
COPIES = {TRAINED: 1, RANDOM: 10}


def main(argv: list[str] | None = None) -> int:
    """Run a command; wrong input gives one line on stderr and exit code 1."""
    given = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(given)
    torch.set_num_threads(1)
    try:
        made = describe_source(shlex.join(["python", "-m", "benchmarks", "evidence", *given]), options.commit)
        return int(options.run(options, made))
    except (ValueError, OSError, FloatingPointError, RuntimeError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks evidence", description=__doc__)
    commands = parser.add_subparsers(metavar="NAME", required=True)
    for name, run, text in (
        ("planted", _planted, "which methods find planted truths"),
        ("fidelity", _fidelity, "agreement with exact masking and with the truths, against tokens fed"),
    ):
        command = _command(commands, name, run, text, "evidence", resumes=True)
        command.add_argument("--model", type=Path, help="a model folder, in place of one trained here")
        command.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
        command.add_argument("--methods", nargs="+", choices=METHODS, metavar="NAME", help=f"of: {', '.join(METHODS)}")
        _add_fields(command, planted.Settings, "")
        _add_fields(command, Recipe, "train-")
    for name, run, text, settings in (
        ("ablation", _ablation, "the training program under every kind of credit, seed by seed", ablation.Settings),
        ("variance", _variance, "how much the gradient depends on the draw of the groups", gradient_variance.Settings),
    ):
        command = _command(commands, name, run, text, name, resumes=True)
        names = ", ".join(ablation.ARMS)
        command.add_argument("--arms", nargs="+", choices=ablation.ARMS, metavar="NAME", help=f"of: {names}")
        _add_fields(command, settings, "")
    command = _command(commands, "demo", _demo, "the demo's run analysed, and its policy judged by estimators", "demo")
    _add_fields(command, demo.Settings, "")
    command = _command(commands, "placeholders", _placeholders, "how far the choice of placeholder matters", None)
    _add_fields(command, placeholders.Settings, "")
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace, Source], int], text: str, folder: str | None,
    *, resumes: bool = False,
) -> argparse.ArgumentParser:  # fmt: skip
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    if folder is not None:
        command.add_argument("--folder", type=Path, default=Path("runs") / folder, help="default: %(default)s")
    command.add_argument("--results", type=Path, default=RESULTS, help="folder of the tables")
    command.add_argument("--commit", help="what to record where git cannot tell")
    if resumes:
        command.add_argument(
            "--mixed", action="store_true",
            help="use what other code or another machine left in the ledger, and say so in the table",
        )  # fmt: skip
    command.set_defaults(run=run)
    return command


def _add_fields(command: argparse.ArgumentParser, settings: type, prefix: str) -> None:
    for field in fields(settings):
        command.add_argument(
            f"--{prefix}{field.name.replace('_', '-')}", type=type(field.default), default=field.default, metavar="N",
            dest=prefix + field.name, help="default: %(default)s",
        )  # fmt: skip


def _filled(options: argparse.Namespace, settings: type, prefix: str = "") -> Any:
    return settings(**{field.name: getattr(options, prefix + field.name) for field in fields(settings)})


def _planted(options: argparse.Namespace, made: Source) -> int:
    settings, ledger, folder = _filled(options, planted.Settings), _ledger(options, made), _model(options)
    models = {name: [load(folder, name, seed=i) for i in range(COPIES[name])] for name in options.models}
    found = planted.run(models, ledger, settings, methods=options.methods, say=_say)
    document = document_head(made, ledger.used) | found
    paths = write(document, planted_tables.markdown(document), options.results, "evidence-planted")
    paths.append(planted_tables.plot(document, options.results / "evidence-planted.png"))
    return _told(paths)


def _fidelity(options: argparse.Namespace, made: Source) -> int:
    settings, ledger = _filled(options, planted.Settings), _ledger(options, made)
    found = fidelity.run(load(_model(options), TRAINED), ledger, settings, methods=options.methods, say=_say)
    document = document_head(made, ledger.used) | found
    paths = write(document, fidelity.markdown(document), options.results, "evidence-fidelity")
    paths.append(fidelity.plot(document, options.results / "evidence-fidelity.png"))
    return _told(paths)


def _ablation(options: argparse.Namespace, made: Source) -> int:
    def unchanged() -> None:
        """A run reads the tree as it is when it starts: a line must not name another."""
        if code_digest() != made["code"]:
            raise RuntimeError(
                "the code has changed since this ablation began; start it again to go on with what it is now"
            )

    settings, beside = _filled(options, ablation.Settings), options.results / ABLATION
    ledger = _ledger(options, made, also=[beside])
    found = ablation.run(ledger, options.folder, settings, arms=options.arms, before_and_after=unchanged, say=_say)
    document = document_head(made, ledger.used) | found
    paths = write(document, ablation.markdown(document), options.results, "evidence-ablation")
    paths.append(ablation.plot(document, options.results / "evidence-ablation.png"))
    ledger.write_used(beside)
    return _told([*paths, beside])


def _variance(options: argparse.Namespace, made: Source) -> int:
    settings, ledger = _filled(options, gradient_variance.Settings), _ledger(options, made)
    found = gradient_variance.run(ledger, settings, arms=options.arms, say=_say)
    document = document_head(made, ledger.used) | found
    return _told(write(document, gradient_variance.markdown(document), options.results, "evidence-variance"))


def _demo(options: argparse.Namespace, made: Source) -> int:
    return _told(demo.run(options.folder, _filled(options, demo.Settings), document_head(made), options.results))


def _placeholders(options: argparse.Namespace, made: Source) -> int:
    document = document_head(made) | placeholders.run(_filled(options, placeholders.Settings))
    return _told(write(document, placeholders.markdown(document), options.results, "evidence-placeholders"))


def _ledger(options: argparse.Namespace, made: Source, also: Sequence[Path] = ()) -> Ledger:
    ledger = Ledger(options.folder / LEDGER, made, mixed=options.mixed, also=also)
    if ledger.others:
        what = "used where there is none of this code" if options.mixed else "left aside (--mixed takes them)"
        _say(f"{ledger.others} lines of other code, versions or machines are {what}")
    return ledger


def _model(options: argparse.Namespace) -> Path:
    return options.model or train(options.folder, _filled(options, Recipe, "train-"))


def _told(paths: Sequence[Path]) -> int:
    for path in paths:
        print(f"== {path}")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)
