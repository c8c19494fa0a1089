"""Print the settings of the training program and what they mean, or its version."""

import ast
import inspect
import itertools
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cfa_kernels import __version__

from . import settings
from .extras import program

DESCRIPTION = """Train a language model by reinforcement with counterfactual credit assignment. With no setting it
trains the embedded model on generated word problems in a few minutes on a CPU; with --model <hub name or folder> and
--dataset <hub name or file> it is the CF paper's run."""
_FIRST = (
    "model", "dataset", "reward_funcs", "output_dir", "max_steps", "learning_rate", "generation_batch_size",
    "num_generations", "max_completion_length", "credit", "estimator", "seed",
)  # fmt: skip
"""Settings that people set, which `--help` shows."""


def documented(part: type) -> dict[str, str]:
    """Read the string under each field of a dataclass, on one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
    pairs = itertools.pairwise(body.body)  # type: ignore[attr-defined]
    return {
        ast.unparse(entry.target): " ".join(ast.literal_eval(text.value).split())
        for entry, text in pairs if isinstance(entry, ast.AnnAssign) and isinstance(text, ast.Expr)
    }  # fmt: skip


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

    print(f"usage: {program('trainer')} [--SETTING VALUE ...]\n\n{textwrap.fill(DESCRIPTION, width)}\n")
    presets = ", ".join(settings.preset_names())
    show("config", f"YAML file of settings, or one that ships: {presets}. Flags win over it.")
    kind, groups = settings.TrainSettings, dict(_groups())
    hints, texts = get_type_hints(kind), documented(settings.DataSettings) | documented(kind)
    for entry in fields(kind):
        text, default = texts[entry.name], entry.default
        if isinstance(default, str | int | float):
            text += f" [{str(default).lower() if isinstance(default, bool) else default}]"
        if every:
            if entry.name in groups:
                print(f"\n{groups[entry.name]}")
            show(entry.name, text + _choices(hints[entry.name]))
        elif entry.name in _FIRST:
            first, dot, _ = texts[entry.name].partition(". ")
            show(entry.name, first + dot.strip() + text[len(texts[entry.name]) :])
    print()
    show("help-all", "Every setting: data, run, model, credit, loss, rollouts, devices.")
    show("version", "Version of the package.")


def _groups() -> Iterator[tuple[str, str]]:
    """Yield the first setting of each group, and the comment above it, which names the group."""
    lines = inspect.getsource(settings).splitlines()
    for heading, entry in itertools.pairwise(lines):
        if heading.startswith("    # "):
            yield entry.split(":")[0].strip(), heading.removeprefix("    # ")


def _choices(hint: Any) -> str:
    """Write out the choices of a type that has some."""
    parts = (part for part in (hint, *get_args(hint)) if get_origin(part) is Literal)
    return next((f" One of {', '.join(get_args(part))}." for part in parts), "")
