"""Print the settings of the training program from the text of `config.py`, as its imports take seconds."""

import ast
import importlib
import itertools
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import cfa_kernels
from cfa_kernels import __version__

from .extras import program

PRESETS = Path(cfa_kernels.__file__).parent / "credit/presets"
_DESCRIPTION = """Train a language model by reinforcement with counterfactual credit assignment. With no setting it
trains the embedded model on generated word problems in a few minutes on a CPU; with --model <hub name or folder> and
--dataset <hub name or file> it is the CF paper's run."""
_FIRST = (
    "model", "dataset", "reward_funcs", "output_dir", "max_steps", "learning_rate", "generation_batch_size",
    "num_generations", "max_completion_length", "credit", "estimator", "seed",
)  # fmt: skip
"""Settings that people set, which `--help` shows."""


def preset_names() -> list[str]:
    """List the names that `--config` takes beside files."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def documented(part: ast.ClassDef) -> Iterator[tuple[ast.AnnAssign, str]]:
    """Yield the fields of a class, each with the string under it, on one line."""
    for entry, following in itertools.pairwise(part.body):
        if isinstance(entry, ast.AnnAssign) and isinstance(following, ast.Expr):
            yield entry, " ".join(ast.literal_eval(following.value).split())


def print_help(argv: Sequence[str]) -> bool:
    """Print the version, the settings that people set, or all of them by group, if `argv` asks for one of these."""
    if "--version" in argv:
        print(f"cfa_kernels {__version__}")
    elif not {"-h", "--help", "--help-all"}.isdisjoint(argv):
        _print_settings(every="--help-all" in argv)
    else:
        return False
    return True


def _print_settings(*, every: bool) -> None:
    width = min(shutil.get_terminal_size().columns, 110)

    def show(name: str, text: str) -> None:
        head = f"  --{name:<24} "
        print(textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * 29, break_on_hyphens=False))

    print(f"usage: {program('trainer')} [--SETTING VALUE ...]\n\n{textwrap.fill(_DESCRIPTION, width)}\n")
    show("config", f"YAML file of settings, or one that ships: {', '.join(preset_names())}. Flags win over it.")
    source, group = Path(__file__).with_name("config.py").read_text("utf-8"), ""
    lines, tree = source.split("\n"), ast.parse(source)
    hints = get_type_hints(importlib.import_module(f"{__package__}.config").TrainConfig) if every else {}  # seconds
    for entry, text in (row for part in tree.body if isinstance(part, ast.ClassDef) for row in documented(part)):
        name, default = ast.unparse(entry.target), entry.value
        if every and (heading := re.fullmatch(r" {4}# (.+)", lines[entry.lineno - 2])) and heading[1] != group:
            group = heading[1]
            print(f"\n{group}")
        if isinstance(default, ast.Name) or (isinstance(default, ast.Constant) and default.value is not None):
            text += f" [{default.id.lower() if isinstance(default, ast.Name) else default.value!s}]"
        if every:
            show(name, text + _choices(hints[name]))
        elif name in _FIRST:
            show(name, re.sub(r"(?<=\.) [^[].*?(?= \[|$)", "", text))
    print()
    show("help-all", "Every setting: data, run, model, credit, loss, rollouts, devices.")
    show("version", "Version of the package.")


def _choices(hint: Any) -> str:
    """Write out the choices of a type that has some."""
    parts = (part for part in (hint, *get_args(hint)) if get_origin(part) is Literal)
    return next((f" One of {', '.join(get_args(part))}." for part in parts), "")
