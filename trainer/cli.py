"""Fill the settings from their defaults, the model folder's file, `--config` and flags, by tyro; print help.

This imports no torch. Flags and keys that name no setting are options of credit by path, which the library checks.
"""

import argparse
import contextlib
import difflib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import tyro
import yaml

from cfa_kernels import __version__
from cfa_kernels.credit.presets import NONE, preset_names
from cfa_kernels.options import check_fields

from .extras import program
from .rewards.built_in import BUILT_IN, require_rewards
from .settings import CONFIGS, DEFAULTS_FILE, EMBEDDED, TrainSettings, model_path, require_data, require_model

MODEL_SETTINGS = (
    "temperature", "top_p", "max_completion_length", "instruction", "use_peft", "learning_rate",
    "max_steps", "generation_batch_size", "eval_steps",
)  # fmt: skip
"""Settings that a model folder may bring, which runs no code: how it samples, is prompted and trains best."""

SHIPPED = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
"""Names that `--config` takes for a file that ships."""

HELP = """usage: {prog} [--SETTING VALUE ...]

Train a language model by GRPO or DAPO, with counterfactual credit where --credit or --estimator names it. With no
setting it trains the embedded model on generated word problems in a few minutes on a CPU; with --config cf,
--model <hub name or folder> and --dataset <hub name or file> it is the CF paper's run.

  --config                  YAML file of settings, or a run that ships: {configs}. Flags win.
  --model                   Model folder or hub name [{model}]
  --dataset                 Worked problems: a .json, .jsonl or .parquet file, or a hub name [{dataset}]
  --reward_funcs            {rewards}, or your "module:function" of TRL's form
  --output_dir              Run folder; the same command resumes the run in it
  --max_steps               Steps of the run; 0 evaluates only [{max_steps}]
  --learning_rate           Peak learning rate of AdamW [{learning_rate}]
  --generation_batch_size   Completions that a step samples [{generation_batch_size}]
  --num_generations         Completions per problem (G) [{num_generations}]
  --max_completion_length   Maximum tokens sampled per completion [{max_completion_length}]
  --credit                  Credit of tokens: a preset that docs/papers.md lists, or none [{credit}]
  --seed                    Seed of everything drawn at random [{seed}]

  --help-all                Every setting: data, run, model, credit, loss, rollouts, devices
  --version                 Version of the package"""


class _Yaml(yaml.SafeLoader):
    """Plain values; unlike YAML 1.1 it reads 1e-6, without a point, as a number."""


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+\Z"), [*"-+0123456789"]
)


def parse(argv: Sequence[str], *, prog: str) -> TrainSettings:
    """Fill the settings from, in rising order: their defaults, the model folder's, `--config`, flags."""
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    before.add_argument("--config")
    before.add_argument("--model")
    with refusing(prog):
        given, flags = before.parse_known_args(argv)
        settings: dict[str, Any] = {}
        if given.config:
            file = Path(given.config) if Path(given.config).is_file() else CONFIGS / f"{given.config}.yaml"
            if not file.exists():
                raise ValueError(f"--config {given.config}: there is no such file; {', '.join(SHIPPED)} ship")
            settings = read_settings(file)
        model = settings["model"] = given.model or settings.get("model") or EMBEDDED
        if (suited := Path(model_path(model)) / DEFAULTS_FILE).is_file():
            own = read_mapping(suited)
            if others := sorted(own.keys() - {*MODEL_SETTINGS}):
                raise ValueError(f"{suited}: a model may set {', '.join(MODEL_SETTINGS)}, not {others[0]}")
            if model != EMBEDDED:
                values = ", ".join(f"{name}={value!r}" for name, value in own.items())
                print(f"note: {suited} sets {values}", file=sys.stderr)
            settings = own | settings
        defaults = TrainSettings(**{name: value for name, value in settings.items() if value is not None})
        check_fields(defaults)
        result, others = tyro.cli(
            TrainSettings, args=flags, default=replace(defaults, credit_options={}), prog=prog, description="",
            use_underscores=True, return_unknown_args=True,
        )  # fmt: skip
        check_fields(result)
        result.credit_options = defaults.credit_options | _by_path(others)
        names = [entry.name for entry in fields(result) if entry.name != "credit_options"]
        for path in result.credit_options:
            if near := difflib.get_close_matches(path, names, n=1, cutoff=0.9):
                raise ValueError(f"{path} is no setting; did you mean {near[0]}?")
        return result


def _by_path(flags: Sequence[str]) -> dict[str, Any]:
    """Read `--path value` and `--path=value`; numbers, true, false and null are what YAML takes them for."""
    options, words = {}, iter(flags)
    for flag in words:
        path, equals, value = flag.removeprefix("--").partition("=")
        if not flag.startswith("--") or (not equals and (value := next(words, "--")).startswith("--")):
            raise ValueError(f"{flag}: is no setting and no option of credit with a value; --help-all lists them")
        with contextlib.suppress(yaml.YAMLError, ValueError):
            plain = yaml.load(value, _Yaml)
            value = value if isinstance(plain, str | list | dict) or value.lower() in ("on", "off") else plain
        options[path] = value
    return options


def parse_checked(argv: Sequence[str], *, prog: str) -> TrainSettings:
    """Parse a run's settings, and check that the files that they name exist."""
    with refusing(prog):
        settings = parse(argv, prog=prog)
        require_rewards([*settings.reward_funcs, *filter(None, [settings.eval_reward])])
        for name in filter(None, (settings.dataset, settings.eval_dataset)):
            require_data(name)
        require_model(settings.model)
        if settings.credit == NONE and not settings.credit_options and os.environ.get("RANK", "0") == "0":
            names = ", ".join(preset_names())
            print(f"note: no credit; --credit takes {names}, and docs/credit.md says when it helps", file=sys.stderr)
        return settings


@contextlib.contextmanager
def refusing(prog: str) -> Iterator[None]:
    """End the program with exit code 2 and one line for settings that are wrong; tyro has a box for wrong flags."""
    try:
        yield
    except (ValueError, TypeError, OSError, argparse.ArgumentError) as problem:
        print(f"{prog}: error: {' '.join(str(problem).split())}", file=sys.stderr)
        sys.exit(2)


def to_yaml(config: Any, made_by: str) -> str:
    """Write settings as YAML that `--config` reads back, behind a comment that says what made it."""
    settings = asdict(config)
    return f"# {made_by}\n{yaml.safe_dump(settings | settings.pop('credit_options'), sort_keys=False)}"


def read_settings(path: Path) -> dict[str, Any]:
    """Read a file of settings; keys that name none are options of credit."""
    settings, known = read_mapping(path), {entry.name for entry in fields(TrainSettings)} - {"credit_options"}
    own = {name: settings.pop(name) for name in known & settings.keys()}
    return {**own, "credit_options": settings}


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a mapping from YAML or JSON, nothing from an empty file; raises `ValueError` naming another file."""
    try:
        content = yaml.load(path.read_text("utf-8"), _Yaml) or {}
    except (yaml.YAMLError, ValueError) as problem:  # a ValueError: of a date like 2026-13-45
        raise ValueError(f"{path}: is not YAML of plain values: {problem}") from problem
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold settings as 'name: value', got {type(content).__name__}")
    return content


def print_help(argv: Sequence[str]) -> bool:
    """Print the version, or a screen of settings with their values beside the other flags, if `argv` asks for one."""
    if "--version" in argv:
        print(f"cfa_kernels {__version__}")
        return True
    if others := {"-h", "--help"} & {*argv}:
        prog = program("trainer")
        values = vars(parse([flag for flag in argv if flag not in others], prog=prog))
        print(HELP.format(prog=prog, configs=", ".join(SHIPPED), rewards=", ".join(BUILT_IN), **values))
    return bool(others)
