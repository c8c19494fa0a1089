"""Print the settings that people set, or the version; `--help-all` is tyro's help, of every setting."""

import ast
import inspect
import itertools
import shutil
import textwrap
from collections.abc import Sequence

from cfa_kernels import __version__
from cfa_kernels.credit.presets import DEFAULT_PRESET, PRESETS

from .cli import config_names, read_mapping
from .extras import program
from .settings import TrainSettings

DESCRIPTION = """Train a language model by reinforcement with counterfactual credit assignment. With no setting it
trains the embedded model on generated word problems in a few minutes on a CPU; with --config cf,
--model <hub name or folder> and --dataset <hub name or file> it is the CF paper's run."""
_FIRST = (
    "model", "dataset", "reward_funcs", "output_dir", "max_steps", "learning_rate", "generation_batch_size",
    "num_generations", "max_completion_length", "credit", "estimator", "seed",
)  # fmt: skip


def documented(part: type) -> dict[str, str]:
    """Read the string under each field of a dataclass, on one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
    pairs = itertools.pairwise(body.body)  # type: ignore[attr-defined]
    return {
        ast.unparse(entry.target): " ".join(ast.literal_eval(text.value).split())
        for entry, text in pairs if isinstance(entry, ast.AnnAssign) and isinstance(text, ast.Expr)
    }  # fmt: skip


def print_help(argv: Sequence[str]) -> bool:
    """Print the version, or the settings that people set, if `argv` asks for one of these."""
    if "--version" in argv:
        print(f"cfa_kernels {__version__}")
    elif not {"-h", "--help"}.isdisjoint(argv):
        _print_settings()
    else:
        return False
    return True


def _print_settings() -> None:
    width = min(shutil.get_terminal_size().columns, 110)

    def show(name: str, text: str) -> None:
        head = f"  --{name:<24} "
        print(textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * 29, break_on_hyphens=False))

    print(f"usage: {program('trainer')} [--SETTING VALUE ...]\n\n{textwrap.fill(DESCRIPTION, width)}\n")
    names = ", ".join(config_names())
    show("config", f"YAML file of settings, or one that ships: {names}. Flags win over it. [{DEFAULT_PRESET}]")
    texts = {name: text for part in TrainSettings.__mro__[-2::-1] for name, text in documented(part).items()}
    defaults = vars(TrainSettings(**read_mapping(PRESETS / f"{DEFAULT_PRESET}.yaml")))
    for name in _FIRST:
        first, dot, _ = texts[name].partition(". ")
        default = defaults[name]
        show(name, first + dot.strip() + (f" [{default}]" if isinstance(default, str | int | float) else ""))
    print()
    show("help-all", "Every setting: data, run, model, credit, loss, rollouts, devices.")
    show("version", "Version of the package.")
