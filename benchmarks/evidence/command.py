"""`python -m benchmarks evidence NAME`: gather evidence on what credit finds, with tables beside the results.

Results are kept in the folder, piece by piece, and an interrupted run resumes from them.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence import ablation, alignment, arms, demo, planted, programs
from benchmarks.evidence.models import MODELS, RANDOM, TRAINED, load, train
from benchmarks.harness.results import RESULTS, Document, Pieces, document_head, write

# A preference of random weights is the same for all problems; several such models even it out.
COPIES = {TRAINED: 1, RANDOM: 10}

Head = Document
"""The beginning of a document."""


def main(argv: list[str] | None = None) -> int:
    """Run a command; wrong input gives one line on stderr and exit code 1."""
    arguments = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    try:
        head = document_head(["python", "-m", "benchmarks", "evidence", *arguments], options.commit)
        for path in options.run(options, head):
            print(f"== {path}")
    except (ValueError, OSError, FloatingPointError, RuntimeError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks evidence", description=__doc__)
    commands = parser.add_subparsers(metavar="NAME", required=True)
    planted_command = _command(
        commands, "planted", _planted, planted.PlantedSettings, "which methods find planted truths"
    )
    planted_command.add_argument("--model", type=Path, help="a model folder, in place of one trained here")
    planted_command.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    _add_names(planted_command, "methods", list(planted.METHODS))
    text = "the training program under every kind of credit, seed by seed"
    ablation_command = _command(commands, "ablation", _ablation, ablation.AblationSettings, text)
    ablation_command.add_argument("--name", default="evidence-ablation", help="of the result files")
    _add_names(ablation_command, "arms", [*ablation.SETS, *ablation.ARMS])
    text = "how well a small batch's step points at the true gradient, by kind of credit"
    settings = alignment.AlignmentSettings
    alignment_command = _command(commands, "alignment", _alignment, settings, text)
    alignment_command.add_argument("--name", default="evidence-alignment", help="of the result files")
    known = ", ".join([*arms.SETS, *arms.ARMS])
    alignment_command.add_argument("--arms", nargs="+", metavar="NAME", help=f"sets, arms or module:name, of: {known}")
    text = "which lines of a small program get the credit for the value that it returns"
    _command(commands, "programs", _programs, programs.ProgramsSettings, text)
    _command(commands, "demo", _demo, demo.DemoSettings, "the demo's run analysed, and its policy judged by estimators")
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace, Head], Sequence[Path]], settings: type, text: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.add_argument("--folder", type=Path, default=Path("runs") / name, help="default: %(default)s")
    command.add_argument("--results", type=Path, default=RESULTS, help="folder of the tables")
    command.add_argument("--commit", help="what to record where git cannot tell")
    command.set_defaults(run=run)
    _add_fields(command, settings)
    return command


def _add_names(command: argparse.ArgumentParser, what: str, names: Sequence[str]) -> None:
    command.add_argument(f"--{what}", nargs="+", choices=names, metavar="NAME", help=f"of: {', '.join(names)}")


def _add_fields(command: argparse.ArgumentParser, settings: type) -> None:
    for field in fields(settings):
        command.add_argument(
            f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default, metavar="N",
            dest=field.name, help="default: %(default)s",
        )  # fmt: skip


def _filled(options: argparse.Namespace, settings: type) -> Any:
    return settings(**{field.name: getattr(options, field.name) for field in fields(settings)})


def _pieces(options: argparse.Namespace, settings: Any, head: Head) -> Pieces:
    return Pieces(options.folder / "pieces", asdict(settings), head)


def _planted(options: argparse.Namespace, head: Head) -> list[Path]:
    settings = _filled(options, planted.PlantedSettings)
    folder = options.model or train(options.folder)
    models = {name: [load(folder, name, seed=i) for i in range(COPIES[name])] for name in options.models}
    document = head | planted.run(models, _pieces(options, settings, head), settings, options.methods)
    return write(document, planted.markdown(document), options.results, "evidence-planted")


def _ablation(options: argparse.Namespace, head: Head) -> list[Path]:
    settings = _filled(options, ablation.AblationSettings)
    document = head | ablation.run(_pieces(options, settings, head), options.folder, settings, arms=options.arms)
    return write(document, ablation.markdown(document), options.results, options.name)


def _alignment(options: argparse.Namespace, head: Head) -> list[Path]:
    settings = _filled(options, alignment.AlignmentSettings)
    pieces = Pieces(options.folder / "pieces", {**asdict(settings), "arms": options.arms}, head)
    document = head | alignment.run(pieces, options.folder, settings, arms=options.arms)
    return write(document, alignment.markdown(document), options.results, options.name)


def _programs(options: argparse.Namespace, head: Head) -> list[Path]:
    settings = _filled(options, programs.ProgramsSettings)
    document = head | programs.run(_pieces(options, settings, head), options.folder, settings)
    return write(document, programs.markdown(document), options.results, "evidence-programs")


def _demo(options: argparse.Namespace, head: Head) -> list[Path]:
    return demo.run(options.folder, _filled(options, demo.DemoSettings), head, options.results)
