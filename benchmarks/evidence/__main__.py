"""`python -m benchmarks.evidence planted`: evidence on what credit finds, resumable, with tables beside the results.

The model is trained once and kept in the folder; so is every result. A run broken off goes on where it stopped.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import describe_environment
from benchmarks.evidence import ablation, fidelity, gradient_variance, planted, tables
from benchmarks.evidence.ledger import Ledger
from benchmarks.evidence.methods import METHODS
from benchmarks.evidence.models import MODELS, RANDOM, TRAINED, Recipe, load, train

LEDGER = "ledger.jsonl"
ABLATION = "evidence-ablation.jsonl"
"""Lies beside the tables: its runs take hours, and the next ones are paired with them."""
# What random weights happen to prefer is the same for all problems; several such models even it out.
COPIES = {TRAINED: 1, RANDOM: 10}


def main(argv: list[str] | None = None) -> int:
    """Run a command; what is wrong with its input is one line on stderr and exit code 1."""
    given = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(given)
    try:
        return options.run(options, f"python -m benchmarks.evidence {shlex.join(given)}")
    except (ValueError, OSError, FloatingPointError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, run, text in (
        ("planted", _planted, "which methods find planted truths"),
        ("fidelity", _fidelity, "agreement with exact masking and with the truths, against tokens fed"),
    ):
        _add_options(commands.add_parser(name, help=text, description=text), run)
    for name, run, text, settings in (
        ("ablation", _ablation, "the training program under every kind of credit, seed by seed", ablation.Settings),
        ("variance", _variance, "how much the gradient depends on the draw of the groups", gradient_variance.Settings),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--folder", type=Path, default=Path("runs") / name, help="default: %(default)s")
        command.add_argument("--results", type=Path, default=tables.RESULTS, help="folder of the tables")
        names = ", ".join(ablation.ARMS)
        command.add_argument("--arms", nargs="+", choices=ablation.ARMS, metavar="NAME", help=f"of: {names}")
        command.add_argument("--commit", help="what to record where git cannot tell")
        _add_fields(command, settings, "")
        command.set_defaults(run=run)
    return parser


def _add_options(command: argparse.ArgumentParser, run: Callable[[argparse.Namespace, str], int]) -> None:
    command.add_argument(
        "--folder", type=Path, default=Path("runs/evidence"), help="model and ledger; default: %(default)s"
    )
    command.add_argument("--results", type=Path, default=tables.RESULTS, help="folder of the tables")
    command.add_argument("--model", type=Path, help="a model folder, in place of one trained here")
    command.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    command.add_argument("--methods", nargs="+", choices=METHODS, metavar="NAME", help=f"of: {', '.join(METHODS)}")
    command.add_argument("--commit", help="what to record where git cannot tell")
    _add_fields(command, planted.Settings, "")
    _add_fields(command, Recipe, "train-")
    command.set_defaults(run=run)


def _add_fields(command: argparse.ArgumentParser, settings: type, prefix: str) -> None:
    for field in fields(settings):
        command.add_argument(
            f"--{prefix}{field.name.replace('_', '-')}", type=type(field.default), default=field.default, metavar="N",
            dest=prefix + field.name, help="default: %(default)s",
        )  # fmt: skip


def _filled(options: argparse.Namespace, settings: type, prefix: str) -> Any:
    return settings(**{field.name: getattr(options, prefix + field.name) for field in fields(settings)})


def _planted(options: argparse.Namespace, command: str) -> int:
    folder = _model(options)
    document = planted.run(
        {name: [load(folder, name, seed=i) for i in range(COPIES[name])] for name in options.models},
        Ledger(options.folder / LEDGER), _filled(options, planted.Settings, ""), methods=options.methods, say=_say,
    )  # fmt: skip
    document = _head(options, command) | document
    paths = tables.write(document, tables.planted_markdown(document), options.results, "evidence-planted")
    paths.append(tables.plot_planted(document, options.results / "evidence-planted.png"))
    return _told(paths)


def _fidelity(options: argparse.Namespace, command: str) -> int:
    document = fidelity.run(
        load(_model(options), TRAINED), Ledger(options.folder / LEDGER), _filled(options, planted.Settings, ""),
        methods=options.methods, say=_say,
    )  # fmt: skip
    document = _head(options, command) | document
    paths = tables.write(document, tables.fidelity_markdown(document), options.results, "evidence-fidelity")
    paths.append(tables.plot_fidelity(document, options.results / "evidence-fidelity.png"))
    return _told(paths)


def _ablation(options: argparse.Namespace, command: str) -> int:
    settings = _filled(options, ablation.Settings, "")
    document = _head(options, command) | ablation.run(
        Ledger(options.results / ABLATION), options.folder, settings, arms=options.arms, say=_say
    )
    paths = tables.write(document, ablation.markdown(document), options.results, "evidence-ablation")
    paths.append(ablation.plot(document, options.results / "evidence-ablation.png"))
    return _told(paths)


def _variance(options: argparse.Namespace, command: str) -> int:
    settings = _filled(options, gradient_variance.Settings, "")
    found = gradient_variance.run(Ledger(options.folder / LEDGER), settings, arms=options.arms, say=_say)
    document = _head(options, command) | found
    return _told(tables.write(document, gradient_variance.markdown(document), options.results, "evidence-variance"))


def _model(options: argparse.Namespace) -> Path:
    return options.model or train(options.folder, _filled(options, Recipe, "train-"))


def _head(options: argparse.Namespace, command: str) -> dict[str, Any]:
    environment = describe_environment(torch.device("cpu"), options.commit)
    return {"schema": 1, "command": command, "environment": environment}


def _told(paths: Sequence[Path]) -> int:
    for path in paths:
        print(f"== {path}")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
