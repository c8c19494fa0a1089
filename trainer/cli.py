"""Fill a dataclass of settings from its defaults, the model folder's file, `--config` and flags, by tyro.

It imports torch only for flags that put other parts in the place of a preset's, as seconds of imports come after this.
"""

import argparse
import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import tyro
import yaml

from .rewards.built_in import require_rewards
from .settings import (
    CREDIT_OPTIONS,
    DEFAULTS_FILE,
    EMBEDDED,
    PRESETS,
    TrainSettings,
    model_path,
    preset_names,
    require_files,
    require_ranges,
)  # fmt: skip

MODEL_SETTINGS = (
    "temperature", "top_p", "max_completion_length", "instruction", "use_peft", "learning_rate",
    "max_steps", "generation_batch_size", "eval_steps",
)  # fmt: skip
"""Settings that a model folder may bring, which runs no code: how it samples, is prompted and trains best."""


def parse(kind: Any, argv: Sequence[str], *, prog: str, description: str = "") -> Any:
    """Fill the dataclass `kind` from, in rising order: its defaults, the model folder's, `--config`, flags.

    A file of `--config` that ships with the program is a paper's run of another model: the model folder wins over it.
    A setting that is wrong ends the program with exit code 2 and one line that names it.
    """
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    before.add_argument("--config")
    before.add_argument("--model", default=argparse.SUPPRESS)
    before.add_argument("--estimator", default=argparse.SUPPRESS)
    before.add_argument("--credit_options", nargs=2, action="append", default=[])
    known = {entry.name for entry in fields(kind)}
    options = {*CREDIT_OPTIONS} - known if "credit_options" in known else set()
    for name in options:
        before.add_argument(f"--{name}", default=argparse.SUPPRESS)
    with refusing(prog):
        chosen, flags = before.parse_known_args(argv)
        file = _config_file(chosen.config) if chosen.config else None
        settings = _read_yaml(file, kind) if file else {}
        settings |= {name: value for name, value in vars(chosen).items() if name in ("model", "estimator")}
        preset = file if file and file.resolve().parent == PRESETS.resolve() else None
        model = settings.get("model", getattr(kind, "model", None))
        if model is not None and (suited := Path(model_path(model)) / DEFAULTS_FILE).is_file():
            suits = _model_settings(_read_yaml(suited, kind), suited, model)
            settings = settings | suits if preset else suits | settings
        pairs = [*chosen.credit_options, *((name, value) for name, value in vars(chosen).items() if name in options)]
        unknown = [flag for flag in re.findall(r"(?<!\S)--(?:no_)?(\w+)", " ".join(flags)) if flag not in known]
        if preset and (pairs or "estimator" in vars(chosen)) and not unknown:
            _drop_unread(preset.stem, settings, {name: yaml.safe_load(value) for name, value in pairs})
        written = {"true": "True", "false": "False"}  # as YAML and Hydra have them, and as tyro does
        flags += [word for k, v in pairs for word in ("--credit_options", k, written.get(v, v))]
        args = [*_as_flags(settings), *flags]
        box = io.StringIO()  # several lines
        try:
            with contextlib.redirect_stderr(box):
                return tyro.cli(kind, args=args, prog=prog, description=description, use_underscores=True)
        except SystemExit as ended:
            if not ended.code:
                raise
            raise ValueError(_in_one_line(box.getvalue())) from None


def of_rank(argv: Sequence[str], *, prog: str) -> TrainSettings:
    """Fill the settings of a run whose files are there, in each process of a launcher; the first one prints."""
    with contextlib.redirect_stderr(sys.stderr if _is_first() else io.StringIO()), refusing(prog):
        settings: TrainSettings = parse(TrainSettings, argv, prog=prog)
        require_ranges(settings)
        require_rewards([*settings.reward_funcs, *filter(None, [settings.eval_reward])])
        require_files(settings)
        return settings


@contextlib.contextmanager
def refusing(prog: str) -> Iterator[None]:
    """End the program with exit code 2 and one line for settings that are wrong."""
    try:
        yield
    except (ValueError, OSError, argparse.ArgumentError) as problem:
        if _is_first():
            print(f"{prog}: error: {' '.join(str(problem).split())}", file=sys.stderr)
        else:
            time.sleep(30)  # the launcher ends this one when the first has said why it ends
        sys.exit(2)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _in_one_line(box: str) -> str:
    """Give the words of a refusal of tyro's, without its frame, its title and the advice to try `--help`."""
    inside = " ".join(line.strip("│| ") for line in box.splitlines()[1:-1])
    return re.sub(r"\s*[─-]{4,}\s*", "; ", " ".join(inside.split())).partition("; For full helptext")[0].lstrip("; ")


def _model_settings(settings: dict[str, Any], path: Path, model: str) -> dict[str, Any]:
    if others := sorted(settings.keys() - {*MODEL_SETTINGS}):
        raise ValueError(f"{path}: a model may set {', '.join(MODEL_SETTINGS)}, not {others[0]}; use --config")
    if model != EMBEDDED:
        values = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        print(f"note: {path} sets {values}", file=sys.stderr)
    return settings


def _drop_unread(preset: str, settings: dict[str, Any], own: dict[str, Any]) -> None:
    """Drop the options of a preset that no part reads which flags with `own` options choose in its place; say so."""
    from cfa_kernels.credit.config import CounterfactualConfig, UnreadOptions

    options, dropped = {k: v for k, v in settings.get("credit_options", {}).items() if k not in own}, list[str]()
    settings["credit_options"] = options
    with contextlib.suppress(ValueError):  # which tyro reports
        while True:
            try:
                CounterfactualConfig.from_flat({"estimator": settings.get("estimator"), **options, **own})
                break
            except UnreadOptions as problem:
                if not (names := [name for name in problem.names if name in options]):
                    break
                dropped += [f"{name}={options.pop(name)}" for name in names]
    if dropped:
        print(f"note: --config {preset} without {', '.join(dropped)}, which the flags leave unread", file=sys.stderr)


def _config_file(name: str) -> Path:
    file = Path(name) if Path(name).exists() else PRESETS / f"{name}.yaml"
    if not file.exists():
        raise ValueError(f"--config {name}: there is no such file; the names that ship are {', '.join(preset_names())}")
    return file


def to_yaml(config: Any, made_by: str = "", resolved: Mapping[str, Any] | None = None) -> str:
    """Write settings as YAML that `--config` reads back; comments say what made it, and what settings came to."""
    lines = [f"# {made_by}\n"] if made_by else []
    for name, value in asdict(config).items():
        lines.append(yaml.safe_dump({name: value}, sort_keys=False))
        if (actual := (resolved or {}).get(name, value)) != value:
            lines[-1] = f"{lines[-1][:-1]}  # {actual}\n"
    return "".join(lines)


def _read_yaml(path: Path, kind: type) -> dict[str, Any]:
    settings, entries = read_mapping(path), {entry.name: entry for entry in fields(kind)}
    for name, value in settings.items():
        if name not in entries:
            raise ValueError(f"{path}: unknown setting {name!r}")
        if isinstance(value, dict) and entries[name].default_factory is not dict:
            raise ValueError(f"{path}: {name} must be a value or a list of values, got dict")
    return settings


def _as_flags(settings: dict[str, Any]) -> list[str]:
    """Write settings as flags, so that types are checked in one place; null and [] mean the class default."""
    flags = []
    for name, value in settings.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no_{name}")
        elif isinstance(value, dict):
            for option in value.items():
                flags += [f"--{name}", *map(str, option)]
        elif isinstance(value, list):
            flags += [f"--{name}", *map(str, value)] if value else []
        elif value is not None:
            flags.append(f"--{name}={value}")
    return flags


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a mapping from YAML or JSON, nothing from an empty file; raises `ValueError` naming another file."""
    try:
        content = yaml.safe_load(path.read_text("utf-8")) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as problem:  # a ValueError: of a date like 2026-13-45
        raise ValueError(f"{path}: is not YAML of plain values: {problem}") from problem
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold settings as 'name: value', got {type(content).__name__}")
    return content
