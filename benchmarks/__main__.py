"""`python -m benchmarks COMMAND ...`: measure, gather evidence, judge models and draw.

Without a command the options are those of `speed`. `python -m benchmarks COMMAND --help` lists each command's options.
"""

import argparse
import importlib
import sys

from trainer.extras import needed_by

COMMANDS = {
    "speed": ("benchmarks.speed.command", "check and time everything on a device, by pytest-benchmark"),
    "launches": ("benchmarks.launches", "count what a compiled layer launches and moves on a GPU, without one"),
    "evidence": ("benchmarks.research.command", "what credit finds and what it is good for, NAME by NAME"),
    "models": ("benchmarks.models.table", "which model types are scored and trained exactly, for docs/models.md"),
}
"""The module of each command, imported only for it, and what it does; `main` there returns the exit status."""


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["speed", *arguments]
    module, _ = COMMANDS[_parser().parse_args(arguments[:1]).command]
    with needed_by("python -m benchmarks", "bench"):
        return int(importlib.import_module(module).main(arguments[1:]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


if __name__ == "__main__":
    sys.exit(main())
