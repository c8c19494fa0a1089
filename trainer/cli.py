"""trainer/cli.py."""

import ast
import difflib
import inspect
import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from transformers import HfArgumentParser

from trainer.config import DEFAULTS_FILE, PRESETS, model_path

Config = TypeVar("Config")


def parse(kind: type[Config], argv: Sequence[str], *, prog: str, description: str) -> Config:
    """Fill the dataclass `kind` from, in rising order: its defaults, the model folder's, `--config`, flags.

    Unknown settings, values of the wrong type or outside their range end the program with exit code 2 and a
    message that names them.
    """
    # A short usage line: with sixty settings the full one would bury the error it is printed with.
    parser = HfArgumentParser(
        kind,  # type: ignore[arg-type]
        prog=prog,
        description=description,
        allow_abbrev=False,
        usage=f"{prog} [--setting value ...]",
    )
    parser.add_argument(
        "--config",
        default=None,
        help="YAML file of settings, or one that ships with the program: "
        f"{', '.join(preset_names())}. Flags win over it.",
    )
    texts = field_docs(kind)
    for action in parser._actions:
        if action.dest in texts:
            negated = any(option.startswith("--no_") for option in action.option_strings)
            action.help = f"Same as --{action.dest} false." if negated else texts[action.dest].replace("%", "%%")

    def read(layers: dict[str, Any]) -> Any:
        values, unknown = parser.parse_known_args([*_as_flags(layers), *argv])
        for flag in unknown:
            name = flag.split("=")[0]
            close = difflib.get_close_matches(name, parser._option_string_actions, n=1)
            parser.error(f"unknown option {name!r}" + (f"; did you mean {close[0]}?" if close else ""))
        return values

    try:
        given = read({}).config
        settings = _read_yaml(_config_file(given), kind) if given else {}
        model = getattr(read(settings), "model", None)
        if model is not None:
            suited = Path(model_path(model)) / DEFAULTS_FILE
            if suited.is_file():
                settings = _read_yaml(suited, kind) | settings
        values = vars(read(settings))
        values.pop("config")
        return kind(**values)
    except (ValueError, OSError) as problem:
        parser.error(str(problem))


def preset_names() -> list[str]:
    """Names that `--config` takes beside files."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def _config_file(given: str) -> Path:
    preset = PRESETS / f"{given}.yaml"
    return preset if given in preset_names() and not Path(given).exists() else Path(given)


def field_docs(kind: type) -> dict[str, str]:
    """The string under each field of a dataclass, on one line: its documentation and `--help` text."""
    texts = {}
    for base in [base for base in kind.__mro__ if is_dataclass(base)]:
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for entry, following in itertools.pairwise(body):
            if isinstance(entry, ast.AnnAssign) and isinstance(following, ast.Expr):
                texts[entry.target.id] = " ".join(following.value.value.split())  # type: ignore[union-attr, attr-defined]
    return texts


def to_yaml(config: Any) -> str:
    """The settings of a dataclass as a YAML document that `--config` reads back."""
    return yaml.safe_dump(asdict(config), sort_keys=False)


def _read_yaml(path: Path, kind: type) -> dict[str, Any]:
    settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: must hold settings as 'name: value', got {type(settings).__name__}")
    names = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
    for name in settings:
        if name not in names:
            close = difflib.get_close_matches(str(name), names, n=1)
            raise ValueError(f"{path}: unknown setting {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    return settings


def _as_flags(settings: dict[str, Any]) -> list[str]:
    """Settings as flags, so that types and choices are checked in one place; null and [] mean the class default."""
    flags = []
    for name, value in settings.items():
        if isinstance(value, list):
            flags += [f"--{name}", *map(str, value)] if value else []
        elif value is not None:
            flags.append(f"--{name}={value}")
    return flags
