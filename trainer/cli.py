"""Fill the settings from their defaults, the model folder's file, `--config` and flags, by tyro; print help.

It imports torch only for flags that put other parts in the place of a preset's, as seconds of imports come after this.
"""

import argparse
import ast
import contextlib
import inspect
import io
import itertools
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import tyro
import yaml

from cfa_kernels import __version__
from cfa_kernels.credit.presets import DEFAULT_PRESET, PRESETS, preset_names
from cfa_kernels.options import check_fields

from .extras import program
from .rewards.built_in import require_rewards
from .settings import (
    ASSETS,
    CREDIT_OPTIONS,
    DEFAULTS_FILE,
    EMBEDDED,
    TrainSettings,
    model_path,
    require_data,
    require_model,
)

MODEL_SETTINGS = (
    "temperature", "top_p", "max_completion_length", "instruction", "use_peft", "learning_rate",
    "max_steps", "generation_batch_size", "eval_steps",
)  # fmt: skip
"""Settings that a model folder may bring, which runs no code: how it samples, is prompted and trains best."""

DESCRIPTION = """Train a language model by reinforcement with counterfactual credit assignment. With no setting it
trains the embedded model on generated word problems in a few minutes on a CPU; with --config cf,
--model <hub name or folder> and --dataset <hub name or file> it is the CF paper's run."""
_FIRST = (
    "model", "dataset", "reward_funcs", "output_dir", "max_steps", "learning_rate", "generation_batch_size",
    "num_generations", "max_completion_length", "credit", "estimator", "seed",
)  # fmt: skip


def config_names() -> list[str]:
    """List the names that `--config` takes for a file that ships."""
    return sorted([*preset_names(), "calculator"])


class _Yaml(yaml.SafeLoader):
    """Plain values; unlike YAML 1.1 it reads 1e-6, without a point, as a number."""


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+\Z"), [*"-+0123456789"]
)


def parse(argv: Sequence[str], *, prog: str) -> TrainSettings:
    """Fill the settings from, in rising order: their defaults, the model folder's, `--config`, flags.

    A file of `--config` that ships with the program is another model's run: the model folder wins over it. Credit is by
    the default one of these unless `--config` or `--estimator` name another.
    A setting that is wrong ends the program with exit code 2 and a message that names it.
    """
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    before.add_argument("--config")
    before.add_argument("--credit_options", nargs=2, action="append", default=[])
    for name in ("model", "estimator", *(name for name in CREDIT_OPTIONS if not hasattr(TrainSettings, name))):
        before.add_argument(f"--{name}", default=argparse.SUPPRESS)
    with refusing(prog):
        chosen, flags = before.parse_known_args(argv)
        given = vars(chosen)
        source, pairs = given.pop("config"), given.pop("credit_options")
        early = {name: given.pop(name) for name in ("model", "estimator") if name in given}
        source = source or (DEFAULT_PRESET if _names_no_credit(argv) else None)
        file = _config_file(source) if source else None
        preset = file if file and file.resolve().parent == PRESETS.resolve() else None
        settings = (_read_settings(file) if file else {}) | early
        model = settings.get("model") or EMBEDDED
        if (suited := Path(model_path(model)) / DEFAULTS_FILE).is_file():
            suits = _model_settings(suited, model)
            settings = settings | suits if preset else suits | settings
        defaults = TrainSettings(**{name: value for name, value in settings.items() if value is not None})
        check_fields(defaults)
        written = {"true": "True", "false": "False"}  # as YAML and Hydra have them, and as tyro does
        for name, value in [*pairs, *given.items()]:
            flags += ["--credit_options", name, written.get(value, value)]
        # tyro takes the keys of a dictionary's default for the only ones.
        bare = replace(defaults, credit_options={})
        result = tyro.cli(TrainSettings, args=flags, default=bare, prog=prog, description="", use_underscores=True)
        check_fields(result)
        # A preset is a whole: what another estimator or rule does not read would otherwise be refused.
        options, own = dict(defaults.credit_options), result.credit_options
        if preset and (own or "estimator" in early):
            _drop_unread(preset.stem, result.estimator, options, own)
        result.credit_options = options | own
        return result


def of_rank(argv: Sequence[str], *, prog: str) -> TrainSettings:
    """Parse a run's settings and check that its files exist, in each process of a launcher; the first prints."""
    with contextlib.redirect_stderr(sys.stderr if _is_first() else io.StringIO()), refusing(prog):
        settings = parse(argv, prog=prog)
        require_rewards([*settings.reward_funcs, *filter(None, [settings.eval_reward])])
        for name in filter(None, (settings.dataset, settings.eval_dataset)):
            require_data(name)
        require_model(settings.model)
        if _names_no_credit(argv) and settings.credit != "uniform":
            others = ", ".join(name for name in preset_names() if name != DEFAULT_PRESET)
            print(
                f"note: credit by {DEFAULT_PRESET}, the default preset; --config also takes {others}; --credit uniform "
                "assigns none, and `python -m benchmarks evidence own` of a checkout measures which is better for a "
                "model",
                file=sys.stderr,
            )
        return settings


def _names_no_credit(argv: Sequence[str]) -> bool:
    return not any(flag.partition("=")[0] in ("--config", "--estimator") for flag in argv)


@contextlib.contextmanager
def refusing(prog: str) -> Iterator[None]:
    """End the program with exit code 2 and one line for settings that are wrong; tyro has a box for wrong flags."""
    try:
        yield
    except (ValueError, OSError, argparse.ArgumentError, SystemExit) as problem:
        if not _is_first():
            time.sleep(30)  # the launcher ends all when one ends, and the first one has to say why before that
        if isinstance(problem, SystemExit):  # tyro's, which has said it
            raise
        print(f"{prog}: error: {' '.join(str(problem).split())}", file=sys.stderr)
        sys.exit(2)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _model_settings(path: Path, model: str) -> dict[str, Any]:
    settings = _read_settings(path)
    if others := sorted(settings.keys() - {*MODEL_SETTINGS}):
        raise ValueError(f"{path}: a model may set {', '.join(MODEL_SETTINGS)}, not {others[0]}; use --config")
    if model != EMBEDDED:
        values = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        print(f"note: {path} sets {values}", file=sys.stderr)
    return settings


def _drop_unread(preset: str, estimator: str, options: dict[str, Any], own: dict[str, Any]) -> None:
    """Drop the options of a preset that no part reads which flags with `own` options choose in its place; say so."""
    from cfa_kernels.credit.config import CounterfactualConfig, UnreadOptions

    dropped = list[str]()
    with contextlib.suppress(ValueError):  # of another kind: the settings' own check names it
        while True:  # an error names the options of one part
            try:
                CounterfactualConfig.from_flat({"estimator": estimator, **options, **own})
                break
            except UnreadOptions as problem:
                if not (names := [name for name in problem.names if name in options and name not in own]):
                    break
                dropped += [f"{name}={options.pop(name)}" for name in names]
    if dropped:
        print(f"note: --config {preset} without {', '.join(dropped)}, which the flags leave unread", file=sys.stderr)


def _config_file(name: str) -> Path:
    folder = PRESETS if name in preset_names() else ASSETS
    file = Path(name) if Path(name).exists() else folder / f"{name}.yaml"
    if not file.exists():
        raise ValueError(f"--config {name}: there is no such file; the names that ship are {', '.join(config_names())}")
    return file


def to_yaml(config: Any, made_by: str) -> str:
    """Write settings as YAML that `--config` reads back, behind a comment that says what made it."""
    return f"# {made_by}\n{yaml.safe_dump(asdict(config), sort_keys=False)}"


def _read_settings(path: Path) -> dict[str, Any]:
    settings, known = read_mapping(path), {entry.name for entry in fields(TrainSettings)}
    if unknown := [name for name in settings if name not in known]:
        raise ValueError(f"{path}: unknown setting {unknown[0]!r}")
    return settings


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a mapping from YAML or JSON, nothing from an empty file; raises `ValueError` naming another file."""
    try:
        content = yaml.load(path.read_text("utf-8"), _Yaml) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as problem:  # a ValueError: of a date like 2026-13-45
        raise ValueError(f"{path}: is not YAML of plain values: {problem}") from problem
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold settings as 'name: value', got {type(content).__name__}")
    return content


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
