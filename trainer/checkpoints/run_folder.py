"""Find a run's folder, keep it for one process, and go on from its last good checkpoint.

A run folder holds `config.yaml`, what the report writes, the trained model at the end, and `checkpoints/`, one folder
for each step that was kept.
"""

import contextlib
import hashlib
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from cfa_kernels.hf.fsdp import is_piece
from trainer.checkpoints.files import (
    Damaged,
    DiskError,
    naming,
    remove_leftovers,
    require_whole,
    seal,
    whole_folder,
    write_whole,
)
from trainer.checkpoints.state import WEIGHTS, Tensors, read_json, read_state, tensors_of, write_state
from trainer.cli import to_yaml
from trainer.config import TrainConfig
from trainer.policy import require_finite_parameters
from trainer.processes import of_first
from trainer.state import Trainer

RUNS = Path("runs")
_SETTINGS, _SUMMARY, _METRICS = "config.yaml", "summary.json", "metrics.jsonl"
_LOCK, _CHECKPOINTS = ".lock", "checkpoints"
# Settings that a run may go on with changed: where it runs and writes, and how often it saves, tests and logs.
_MAY_CHANGE = frozenset({
    "output_dir", "resume", "save_steps", "eval_steps", "report_to", "log_completions", "device", "parallel",
    "vllm_server_base_url", "vllm_group_port", "vllm_server_timeout",
})  # fmt: skip
_KEPT = 2  # checkpoints
_FIRST = 256
_NEW = "--no_resume starts anew, in a new folder"


class Finished(Exception):
    """The run was carried to its end before; the message says where it is and how to begin another."""


class Refused(ValueError):
    """The run in a folder cannot be gone on with; the message says why and what to do."""


@dataclass
class RunFolder:
    """Folder of a run, in which no other process writes.

    Attributes:
        path: the folder.
        notes: checkpoints that were found damaged, for the run's log.
    """

    path: Path
    notes: list[str] = field(default_factory=list)
    _facts: dict[str, str] = field(default_factory=dict)

    def begin(self, trainer: Trainer) -> tuple[int, dict[str, Any]]:
        """Bring a trainer to the last good checkpoint; gives its step, and what the report kept then.

        Where no step was taken yet, that is step 0 and nothing.

        Raises:
            Refused: no checkpoint is good, or the run was begun with other settings, data or kind of device.
            DiskError: the settings cannot be written.
        """
        config, self._facts = trainer.config, _facts(trainer)
        step, kept = 0, dict[str, Any]()
        for step in of_first(lambda: sorted(_steps(self.path), reverse=True)):
            try:
                kept = self._read(trainer, step)
                break
            except Refused:
                if of_first(lambda: _is_begun(self.path)):
                    raise
            except (Damaged, OSError) as problem:
                self.notes.append(f"the checkpoint of step {step} is damaged and was left out: {problem}")
        else:
            if of_first(lambda: _is_begun(self.path)):
                raise Refused("; ".join([f"{self.path}: no checkpoint to go on from", *self.notes, _NEW]))
            step = 0
        if step > config.max_steps:
            raise Refused(f"max_steps: {self.path} is at step {step} already, got {config.max_steps}")
        of_first(lambda: write_whole(self.path / _SETTINGS, to_yaml(config)))
        return step, kept

    def _read(self, trainer: Trainer, step: int) -> dict[str, Any]:
        """Bring a trainer to the checkpoint of a step, which may be `Damaged`; gives what the report kept."""
        state = of_first(lambda: self._checked(trainer, step))
        read_state(trainer, self._checkpoint(step))
        return state["report"]

    def _checked(self, trainer: Trainer, step: int) -> dict[str, Any]:
        """Read a checkpoint but for its tensors, and raise unless it is whole and this run's."""
        folder = self._checkpoint(step)
        require_whole(folder)
        state = read_json(folder)
        if state["step"] != step:
            raise Damaged(f"{folder} holds step {state['step']}: it was copied or renamed")
        for name, then in state["files"].items():
            if (now := seal(self.path / name, then["bytes"]))["bytes"] < then["bytes"]:
                raise Damaged(
                    f"{self.path / name} is shorter than the {then['bytes']} bytes that it had at step {step}"
                )
            if now != then:
                raise Damaged(f"{self.path / name} is not as it was at step {step}: its SHA-256 is another")
        _require_same(self.path, state["settings"], trainer.config)
        for name, now in self._facts.items():
            if (then := state["facts"].get(name)) != now:
                raise Refused(f"{self.path}: {name} was {then} and is {now} now; {_NEW}")
        return state

    def save(self, trainer: Trainer, step: int, report: Callable[[], dict[str, Any]]) -> None:
        """Keep a checkpoint of a step, with what `report()` gives, then delete all but the newest two.

        Of several processes all call this, and the first writes.

        Raises:
            DiskError: it could not be written; those before it are untouched.
            FloatingPointError: a weight is not finite; nothing is written.
        """
        tensors = tensors_of(trainer)
        of_first(lambda: self._write(trainer, step, tensors, report()))

    def _write(self, trainer: Trainer, step: int, tensors: Tensors, report: dict[str, Any]) -> None:
        folder, config = self._checkpoint(step), trainer.config
        require_finite_parameters(trainer.policy, tensors[WEIGHTS])
        files = {name: seal(self.path / name, size) for name, size in report["bytes"].items()}
        state = {"step": step, "settings": asdict(config), "facts": self._facts, "report": report, "files": files}
        with whole_folder(folder, manifest=True) as aside:
            write_state(trainer, aside, tensors, state)
        kept = sorted(one for one in _steps(self.path) if one <= step)[-_KEPT:]
        for one in _steps(self.path) - {*kept}:  # those beyond this step were damaged
            shutil.rmtree(self._checkpoint(one), ignore_errors=True)
        remove_leftovers(folder.parent)

    def how_to_go_on(self) -> str:
        """Say what the same command will do."""
        if not (steps := _steps(self.path)):
            return "no checkpoint was kept yet"
        return f"{self.path} holds the checkpoint of step {max(steps)}: the same command goes on from there"

    def _checkpoint(self, step: int) -> Path:
        return self.path / _CHECKPOINTS / f"step-{step}"


@contextlib.contextmanager
def open_run(config: TrainConfig) -> Iterator[RunFolder]:
    """Within it a run has a folder to itself: one to go on in, or a new one, which goes if nothing is written to it.

    Of several processes the first chooses and locks it; all must see it under its path.

    The lock is the operating system's: it ends with the process, however that ends.

    Raises:
        Finished: the folder holds this run, finished.
        Refused: the folder holds a run with other settings, whose difference the message shows, or no run.
        DiskError: it cannot be written to, or another process has it.
    """
    with contextlib.ExitStack() as stack:
        yield of_first(lambda: RunFolder(_own_folder(config, stack)))


def _own_folder(config: TrainConfig, stack: contextlib.ExitStack) -> Path:
    """Choose a run's folder, and lock it until `stack` ends."""
    if config.output_dir is None:
        for path in _unfinished(config) if config.resume else []:
            with contextlib.suppress(DiskError):  # another process has it
                return _locked(path, stack)
        started = time.strftime("%Y%m%d-%H%M%S")
        return _locked(_free(RUNS / f"{started}-{Path(config.model).name}-{config.credit}-seed{config.seed}"), stack)
    path = Path(config.output_dir)
    if path.is_dir() and not (path / _SETTINGS).exists() and any(not _is_hidden(entry) for entry in path.iterdir()):
        raise Refused(f"output_dir: {path} is not empty and holds no run; name another folder or remove it")
    if not config.resume and _is_begun(path):
        return _locked(_free(path), stack)
    path = _locked(path, stack)
    try:
        _require_same(path, _settings(path), config)
    except Refused:
        if _is_begun(path):
            raise
        shutil.rmtree(path / _CHECKPOINTS, ignore_errors=True)  # of a start that failed
    if _is_finished(path, config):
        raise Finished(f"{path} is finished: it has its {config.max_steps} steps; {_NEW}")
    return path


def _locked(path: Path, stack: contextlib.ExitStack) -> Path:
    """Make a folder if it is not there, and lock it."""
    created = not path.exists()
    with naming(path, "output_dir: "):
        path.mkdir(parents=True, exist_ok=True)
        try:
            stack.enter_context(FileLock(path / _LOCK).acquire(blocking=False))
        except Timeout as held:
            raise DiskError(f"output_dir: another run is writing to {path}; name another folder") from held
    stack.callback(_remove_unused, path, created)
    return path


def _remove_unused(path: Path, created: bool) -> None:
    """Delete a folder's lock where nothing else was written, and the folder if this process made it."""
    with contextlib.suppress(OSError):
        if [entry.name for entry in path.iterdir()] == [_LOCK]:
            (path / _LOCK).unlink()
            if created:
                path.rmdir()


def _free(path: Path) -> Path:
    """Give `path`, or the first of `path-2`, `path-3`, ... that is not there."""
    names = itertools.chain([path], (path.with_name(f"{path.name}-{i}") for i in itertools.count(2)))
    return next(one for one in names if not one.exists())


def _unfinished(config: TrainConfig) -> list[Path]:
    """List folders under runs/ of the same command without an `output_dir` that can go on, the newest first."""
    found = []
    for path in sorted(file.parent for file in RUNS.glob(f"*/{_SETTINGS}")):
        saved = _settings(path)
        if saved.get("output_dir", "") is None and not _differences(saved, config) and not _is_finished(path, config):
            found.append(path)
    return [path for path in reversed(found) if _steps(path) or not _is_begun(path)]


def _require_same(path: Path, settings: dict[str, Any], config: TrainConfig) -> None:
    """Raise `Refused` that shows in which settings a run differs from the one in `path`."""
    if changed := _differences(settings, config):
        raise Refused(f"{path} was begun with other settings: {', '.join(changed)}. Give the same ones, or {_NEW}")


def _differences(settings: dict[str, Any], config: TrainConfig) -> list[str]:
    """Say which settings of a run have changed that may not; one that is not there had its default."""
    then, changed = {**asdict(type(config)()), **settings}, []
    for name, value in asdict(config).items() if settings else []:
        if name in _MAY_CHANGE or then[name] == value:
            continue
        why = ""
        if name == "max_steps":
            if config.lr_scheduler_type == "constant":
                continue
            why = f"; lr_scheduler_type={config.lr_scheduler_type} spreads the learning rate over it"
        changed.append(f"{name} ({then[name]!r} then, {value!r} now{why})")
    return changed


def _facts(trainer: Trainer) -> dict[str, str]:
    """Name what a run depends on beside its settings: device, types of numbers, problems, weights as they were loaded.

    Of weights, those that are not in a checkpoint. All processes call this.
    """
    precision, reference = trainer.config.precision, trainer.reference
    problems = [[trainer.prompts, trainer.rows], [trainer.held_out_prompts, trainer.held_out]]
    loaded = [p for p in trainer.policy.parameters() if not p.requires_grad]
    loaded += reference.copy.parameters() if reference and reference.copy else []
    weights = hashlib.sha256()
    for weight in loaded:
        whole = weight.full_tensor() if is_piece(weight) else weight  # type: ignore[attr-defined]
        weights.update(whole.flatten()[:_FIRST].float().cpu().numpy().tobytes())
    seals = [hashlib.sha256(json.dumps(part, default=str).encode()) for part in problems]
    return {
        "kind of device": precision.device.type,
        "types of weights and products": f"{precision.weights} and {precision.products}".replace("torch.", ""),
        "SHA-256 of the training problems": seals[0].hexdigest()[:12],
        "SHA-256 of the held-out problems": seals[1].hexdigest()[:12],
        f"SHA-256 of the first {_FIRST} values of each of the model's own weights": weights.hexdigest()[:12],
    }


def _settings(path: Path) -> dict[str, Any]:
    """Read the settings that a run in `path` was begun with; none where there is no run."""
    try:
        saved = yaml.safe_load((path / _SETTINGS).read_text("utf-8"))
    except (OSError, yaml.YAMLError, ValueError, RecursionError):  # a ValueError: of a date like 2026-13-45
        return {}
    return saved if isinstance(saved, dict) else {}


def _is_begun(path: Path) -> bool:
    """Say whether `path` holds a run that took a step."""
    try:
        lines = (path / _METRICS).read_bytes().splitlines()
    except OSError:
        lines = []
    return any(_steps(path)) or (path / _SUMMARY).exists() or any(not line.startswith(b'{"step": 0,') for line in lines)


def _is_finished(path: Path, config: TrainConfig) -> bool:
    try:
        return json.loads((path / _SUMMARY).read_bytes())["steps"] >= config.max_steps
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _steps(path: Path) -> set[int]:
    """List the steps whose checkpoints are in `path`, good or damaged."""
    names = (entry.name.removeprefix("step-") for entry in (path / _CHECKPOINTS).glob("step-*"))
    return {int(name) for name in names if name.isdecimal()}


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".")
