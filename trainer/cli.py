"""Fill a dataclass of settings from its defaults, the model folder's file, `--config` and flags, by tyro."""

import argparse
import contextlib
import difflib
import io
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
import yaml

from trainer.config import DEFAULTS_FILE, EMBEDDED, PRESETS, model_path

FOREIGN_NAMES = {
    "resume_from_checkpoint": "the same command with the same --output_dir goes on from its last good checkpoint",
    "num_train_epochs": "a run is as long as --max_steps says",
    "bf16": "take --dtype bfloat16 or mixed",
    "fp16": "take --dtype bfloat16 or mixed",
    "use_vllm": "take --rollout_engine vllm",
    "logging_steps": "every step is logged",
}
"""What to do instead of settings that other trainers have."""


OF_MODELS = (
    "temperature", "top_p", "max_completion_length", "instruction", "enable_thinking", "use_peft", "learning_rate",
    "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "eval_batch_size", "eval_steps",
)  # fmt: skip
"""Settings that a model folder may bring, which runs no code: how it samples, is prompted and trains best."""


class _Yaml(yaml.SafeLoader):
    """Reader of plain values that refuses a name that comes twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Read a mapping."""
        names = [name.value for name, _ in node.value]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]!r} is set twice")
        return super().construct_mapping(node, deep)


def parse(kind: Any, argv: Sequence[str], *, prog: str, description: str) -> Any:
    """Fill the dataclass `kind` from, in rising order: its defaults, the model folder's, `--config`, flags.

    Unknown settings, values of the wrong type or outside their range end the program with exit code 2 and a
    message that names them.
    """
    where = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    where.add_argument("--config")
    where.add_argument("--model")
    text = f"YAML file of settings, or one that ships with the program: {', '.join(preset_names())}. Flags win over it."
    settings_flags, file_flag = Annotated[kind, tyro.conf.arg(name="")], Annotated[str | None, tyro.conf.arg(help=text)]
    command = make_dataclass("Command", [("settings", settings_flags), ("config", file_flag, None)])
    try:
        for flag in argv:
            if flag.startswith("--") and (hint := _foreign(flag.lstrip("-").partition("=")[0].replace("-", "_"), kind)):
                raise ValueError(hint)
        found, _ = where.parse_known_args(argv)
        settings = _read_yaml(_config_file(found.config), kind) if found.config else {}
        model = found.model or settings.get("model") or getattr(kind, "model", None)
        if model is not None and (suited := Path(model_path(model)) / DEFAULTS_FILE).is_file():
            settings = _of_model(_read_yaml(suited, kind), suited, model) | settings
        flags = [*_as_flags(settings), *_as_switches(argv, kind)]
        with contextlib.redirect_stderr(io.StringIO()) as refusal:  # tyro's is a box of several lines
            given: Any = tyro.cli(
                command, args=flags, prog=prog, description=description, use_underscores=True,
                config=(tyro.conf.OmitArgPrefixes,),
            )  # fmt: skip
    except (ValueError, OSError, argparse.ArgumentError) as problem:
        print(f"{prog}: error: {' '.join(str(problem).split())}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as ended:
        if ended.code:
            print(f"{prog}: error: {_in_one_line(refusal.getvalue())}", file=sys.stderr)
        raise
    return given.settings


def _in_one_line(box: str) -> str:
    """Give the words of one of tyro's refusals, without its frame, its title and what it says of `--help`."""
    inside = " ".join(line.strip("│| ") for line in box.splitlines()[1:-1])
    return re.sub(r"\s*[─-]{4,}\s*", "; ", " ".join(inside.split())).partition("; For full helptext")[0]


def _of_model(settings: dict[str, Any], path: Path, model: str) -> dict[str, Any]:
    if others := sorted(settings.keys() - {*OF_MODELS}):
        raise ValueError(f"{path}: a model may set {', '.join(OF_MODELS)}, not {others[0]}; take --config for that")
    if model != EMBEDDED:
        print(
            f"note: {path} sets {', '.join(f'{name}={value!r}' for name, value in settings.items())}", file=sys.stderr
        )
    return settings


def preset_names() -> list[str]:
    """List the names that `--config` takes beside files."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def _config_file(given: str) -> Path:
    presets = preset_names()
    if Path(given).exists():
        return Path(given)
    if given in presets:
        return PRESETS / f"{given}.yaml"
    close = difflib.get_close_matches(given, presets, n=1)
    near = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(f"--config {given}: there is no such file, and what ships is {', '.join(presets)}{near}")


def to_yaml(config: Any) -> str:
    """Write the settings of a dataclass as a YAML document that `--config` reads back."""
    return yaml.safe_dump(asdict(config), sort_keys=False)


def _read_yaml(path: Path, kind: type) -> dict[str, Any]:
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), _Yaml) or {}
    except UnicodeDecodeError as problem:
        raise ValueError(f"{path}: is not UTF-8 text: {problem}; save it as UTF-8") from problem
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise ValueError(f"{path}: is not YAML of plain values: {problem}") from problem
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: must hold settings as 'name: value', got {type(settings).__name__}")
    names = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
    named = {}
    for name, value in settings.items():
        if hint := _foreign(str(name), kind):
            raise ValueError(f"{path}: {hint}")
        flags = [one for one in value if str(one).startswith("--")] if isinstance(value, list) else []
        if flags:
            raise ValueError(f"{path}: {name} must be a list of values, got {flags[0]!r}, a flag")
        if isinstance(value, dict):
            raise ValueError(f"{path}: {name} must be a value or a list of values, got dict")
        if name not in names:
            close = difflib.get_close_matches(str(name), names, n=1)
            raise ValueError(f"{path}: unknown setting {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
        named[name] = value
    return named


def _foreign(name: str, kind: type) -> str | None:
    """Say what to do instead of a setting of another trainer; None for a name of our own or of nobody."""
    if name not in FOREIGN_NAMES or name in {entry.name for entry in fields(kind)}:  # type: ignore[arg-type]
        return None
    return f"there is no setting {name}: {FOREIGN_NAMES[name]}"


def _as_switches(argv: Sequence[str], kind: type) -> list[str]:
    """Write `--name true` and `--name=false`, which other trainers take, as `--name` and `--no_name`."""
    switches = {entry.name for entry in fields(kind) if isinstance(entry.default, bool)}  # type: ignore[arg-type]
    written, flags, left = {"true": "--{}", "false": "--no_{}"}, list[str](), list(argv)
    while left:
        flag = left.pop(0)
        name, equals, value = flag.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and key in switches:
            if not equals and left and left[0].lower() in written:
                value = left.pop(0)
            flag = written.get(value.lower(), flag).format(key)
        flags.append(flag)
    return flags


def _as_flags(settings: dict[str, Any]) -> list[str]:
    """Write settings as flags, so that types are checked in one place; null and [] mean the class default."""
    flags = []
    for name, value in settings.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no_{name}")
        elif isinstance(value, list):
            flags += [f"--{name}", *map(str, value)] if value else []
        elif value is not None:
            flags.append(f"--{name}={value}")
    return flags
