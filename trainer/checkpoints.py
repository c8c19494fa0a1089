"""Find a run's folder, keep it for one process, and resume from its last checkpoint.

A run folder holds `config.yaml`, what the report writes, the trained model at the end, and `checkpoints/`, one folder
for each step that was kept: `state.pt`, and `run.json` with what the run depends on and how far its files were written.
A folder has its name only once all of it is on the disk. Tensors go by the names they have in the model however it is
sharded, so that another number of processes reads them. Weights that do not train come from the model's own checkpoint.
"""

import contextlib
import hashlib
import itertools
import json
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from cfa_kernels.model.sharded.fsdp import is_piece

from .cli import read_mapping, to_yaml
from .config import TrainConfig
from .disk import DiskError, naming, whole_folder, write_whole
from .policy import WHOLE, require_finite_weights, trained_state
from .processes import gather, on_first
from .provenance import made_by
from .settings import CHANGE_NO_RESULT
from .state import Trainer

RUNS = Path("runs")
_SETTINGS, _SUMMARY, _LOCK = "config.yaml", "summary.json", ".lock"
# Settings that may change when a run resumes: where it runs and writes, and how often it saves, tests and logs.
_MAY_CHANGE = CHANGE_NO_RESULT | {"eval_steps", "device", "parallel", "vllm_server_base_url"}
_CHECKPOINTS = 2  # that are kept
_TRAINED = "SHA-256 of the first 256 values of each weight that trains"  # as loaded, which step 0 alone depends on
_NEW = "--no_resume starts again, in a new folder"


class Finished(Exception):
    """The run has all its steps; the message says where it is and how to begin another."""


class Refused(ValueError):
    """The run in a folder cannot resume; the message says why and what to do."""


@dataclass
class RunFolder:
    """Folder of a run, in which no other process writes."""

    path: Path
    started: datetime = field(default_factory=lambda: datetime.now())
    """When the run began: the date in prompts whose chat template writes one."""
    _facts: dict[str, str] = field(default_factory=dict)

    def begin(self, trainer: Trainer) -> tuple[int, dict[str, Any]]:
        """Bring a trainer to the last checkpoint; gives its step and the report's state, or step 0 and nothing.

        That of step 0, where there is none after it, is dropped unless settings, data and weights are the same.

        Raises:
            Refused: it cannot be read, or the run was begun with other data, weights or kind of device.
            DiskError: the settings cannot be written.
        """
        config, self._facts = trainer.config, _facts(trainer)
        is_begun, step = on_first(lambda: (_is_begun(self.path), max(_steps(self.path), default=0)))
        report, state, changed = dict[str, Any](), None, list[str]()
        try:
            if is_begun or not on_first(lambda: self._is_other(config)):
                content = on_first(lambda: self.read(step))
                on_first(lambda: _require_unchanged(self._checkpoint(step) / "state.pt"))
                pairs = {name: (content["facts"].get(name), fact) for name, fact in self._facts.items()}
                changed = [f"{name} was {then} and is {now} now" for name, (then, now) in pairs.items() if then != now]
                state = torch.load(self._checkpoint(step) / "state.pt", "cpu", weights_only=True)
        except Exception as problem:  # a file that was changed fails in as many ways as it has bytes
            if is_begun:  # else nothing is lost
                said = problem if isinstance(problem, OSError | ValueError) else type(problem).__name__
                what = f"{self._checkpoint(step)} cannot be read ({said})"
                raise Refused(f"{what}; remove it to resume from the one before; {_NEW}") from problem
        if is_begun and (changed := [one for one in changed if not one.startswith(_TRAINED)]):
            raise Refused(f"{self.path}: {'; '.join(changed)}; {_NEW}")
        if not is_begun and not all(gather(state is not None and not changed)):  # in all processes or in none
            state = None  # and must not be taken for a checkpoint of the settings that are written next
            on_first(lambda: shutil.rmtree(self.path / "checkpoints", ignore_errors=True))
        if state is not None:
            restore(trainer, state)
            report = content["report"]
        if step > config.max_steps:
            raise Refused(f"max_steps: {self.path} is at step {step} already, got {config.max_steps}")
        on_first(lambda: write_whole(self.path / _SETTINGS, to_yaml(config, made_by())))
        return step, report

    def read(self, step: int) -> dict[str, Any]:
        """Read a checkpoint except its tensors; raises `ValueError` if the report's files are shorter than then."""
        content: dict[str, Any] = json.loads((self._checkpoint(step) / "run.json").read_bytes())
        if step and not content["report"].get("evaluations"):
            raise ValueError("run.json has no evaluation")
        for name, size in content["report"]["bytes"].items():
            if (now := (self.path / name).stat().st_size) < size:
                raise ValueError(f"{self.path / name} has {now} bytes, and had {size} at step {step}")
        return content

    def save(self, trainer: Trainer, step: int, report: Callable[[], dict[str, Any]]) -> None:
        """Keep a checkpoint of a step, with what `report()` gives, and the one before it; all processes call this.

        Raises:
            DiskError: it could not be written; those before it are untouched.
            FloatingPointError: a weight is not finite; nothing is written.
        """
        state = collect(trainer)
        on_first(lambda: self._write(step, state, report()))

    def _write(self, step: int, state: dict[str, Any], report: dict[str, Any]) -> None:
        require_finite_weights(state["weights"])
        folder = self._checkpoint(step)
        with whole_folder(folder) as aside:
            with (aside / "state.pt").open("wb") as file:
                torch.save(state, file)
            content = {"facts": self._facts, "report": report, "started": self.started.isoformat()}
            (aside / "run.json").write_text(json.dumps(content), encoding="utf-8")
        newest = sorted(_steps(self.path))[-_CHECKPOINTS:]
        for other in folder.parent.iterdir():
            if other.name not in {f"step-{one}" for one in newest}:
                shutil.rmtree(other, ignore_errors=True)

    def how_to_go_on(self, config: TrainConfig) -> str:
        """Say what the same command will do, or the one that resumes."""
        if not (steps := _steps(self.path)):
            return "no checkpoint was kept yet"
        with_path = "" if config.resume else f" with --output_dir={self.path} in place of --no_resume"
        return f"{self.path} holds the checkpoint of step {max(steps)}: the same command{with_path} resumes from there"

    def _is_other(self, config: TrainConfig) -> bool:
        """Whether what the folder holds is not to be resumed by a run of these settings."""
        settings = _mapping(self.path / _SETTINGS)
        return not (config.resume and settings) or bool(_differences(settings, config))

    def _checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step}"


def _require_unchanged(file: Path) -> None:
    """Raise `ValueError` for a changed byte, which torch reads without a word."""
    with zipfile.ZipFile(file) as parts:
        if (part := parts.testzip()) is not None:
            raise ValueError(f"{file.name}: the CRC of {part} is wrong")


def collect(trainer: Trainer) -> dict[str, Any]:
    """Collect tensors, whole and on the host of the first process, and plain values; all processes call this."""
    optimizer = trainer.optimizer
    return {
        "weights": trained_state(trainer.policy),
        # torch would take a step to make the state of an optimizer that has none.
        "optimizer": get_optimizer_state_dict(trainer.policy, optimizer, options=WHOLE) if optimizer.state else {},
        "scheduler": trainer.scheduler.state_dict(),
    }


def restore(trainer: Trainer, state: dict[str, Any]) -> None:
    """Bring a run that was just set up to where it was when `state` was collected."""
    policy, optimizer = trainer.policy, trainer.optimizer
    set_model_state_dict(policy, state["weights"], options=WHOLE)
    if state["optimizer"]:
        set_optimizer_state_dict(policy, optimizer, state["optimizer"], options=WHOLE)
        for name, parameter in trainer.trained.items():
            if name not in state["optimizer"]["state"]:  # it never had a gradient; torch gave it a state all the same
                optimizer.state.pop(parameter, None)
    trainer.scheduler.load_state_dict(state["scheduler"])
    for group, rate in zip(optimizer.param_groups, trainer.scheduler.get_last_lr(), strict=True):
        group |= {"lr": rate, "betas": tuple(group["betas"])}  # which torch has made a list
    trainer.engine.weights_changed()


@contextlib.contextmanager
def open_run(config: TrainConfig) -> Iterator[RunFolder]:
    """Give a run a folder to itself: its own from before, or a new one, which is removed if nothing is written to it.

    The first process chooses and locks it, by a lock that ends with the process, however that ends.

    Raises:
        Finished: the folder holds this run, finished.
        Refused: the folder holds a run with other settings, whose difference the message shows, or no run.
        DiskError: it cannot be written to, or another process has it.
    """
    with contextlib.ExitStack() as stack:
        yield on_first(lambda: _folder_of(_own_folder(config, stack)))


def _folder_of(path: Path) -> RunFolder:
    run = RunFolder(path)
    if _is_begun(path):
        with contextlib.suppress(Exception):  # `begin` finds what is wrong with it
            content = run.read(max(_steps(path)))
            run.started = datetime.fromisoformat(content["started"])
    return run


def _own_folder(config: TrainConfig, stack: contextlib.ExitStack) -> Path:
    if config.output_dir is None:
        for file in sorted(RUNS.glob(f"*/{_SETTINGS}"), reverse=True) if config.resume else []:
            path, settings = file.parent, _mapping(file)
            is_nameless = settings.get("output_dir", "") is None
            if is_nameless and not (_differences(settings, config) or _is_done(path, config)):
                with contextlib.suppress(DiskError):  # another process has it
                    return _locked(path, stack)
        started = time.strftime("%Y%m%d-%H%M%S")
        return _locked(_free(RUNS / f"{started}-{Path(config.model).name}-{config.credit}-seed{config.seed}"), stack)
    path = Path(config.output_dir)
    is_begun = _is_begun(path)
    is_run = is_begun or (path / _SETTINGS).exists()
    if path.is_dir() and not is_run and any(entry.name[0] != "." for entry in path.iterdir()):
        raise Refused(f"output_dir: {path} is not empty and holds no run; name another folder or remove it")
    if not config.resume and is_begun:
        return _locked(_free(path), stack)
    path, is_begun = _locked(path, stack), _is_begun(path)  # which another run may have written by now
    if is_begun and not (settings := _mapping(path / _SETTINGS)):
        raise Refused(
            f"{path / _SETTINGS} is missing or cannot be read, and the checkpoints beside it are of the settings that "
            f"it held; write it again, by a run of these settings in another folder if need be, or {_NEW}"
        )
    if is_begun and (changed := _differences(settings, config)):
        raise Refused(f"{path} was begun with other settings: {', '.join(changed)}. Give the same ones, or {_NEW}")
    if _is_done(path, config):
        raise Finished(f"{path} is finished: it has the {config.max_steps} steps that are asked for; {_NEW}")
    return path


def _locked(path: Path, stack: contextlib.ExitStack) -> Path:
    """Make a folder if it is not there, and lock it until `stack` ends; then delete it if nothing was written."""

    def remove_unused() -> None:
        with contextlib.suppress(OSError):
            if [entry.name for entry in path.iterdir()] == [_LOCK]:
                shutil.rmtree(path)

    with naming(path, "output_dir: "):
        path.mkdir(parents=True, exist_ok=True)
        try:
            stack.enter_context(FileLock(path / _LOCK).acquire(blocking=False))
        except Timeout as held:
            raise DiskError(f"output_dir: another run is writing to {path}; name another folder") from held
    stack.callback(remove_unused)
    return path


def _free(path: Path) -> Path:
    names = itertools.chain([path], (path.with_name(f"{path.name}-{i}") for i in itertools.count(2)))
    return next(one for one in names if not one.exists())


def _differences(settings: dict[str, Any], config: TrainConfig) -> list[str]:
    """Say which settings of a run have changed that may not; one that is not there had its default."""
    then, now = {**asdict(type(config)()), **settings}, asdict(config)
    changed = [name for name in now if name not in _MAY_CHANGE and then[name] != now[name]]
    if "max_steps" in changed and config.lr_scheduler_type == "constant":  # others spread the learning rate over it
        changed.remove("max_steps")
    return [f"{name} ({then[name]!r} then, {now[name]!r} now)" for name in changed]


def _facts(trainer: Trainer) -> dict[str, str]:
    """Name what a run depends on, settings apart: kind of device, problems and prompts, weights in no checkpoint."""
    weights = {trains: hashlib.sha256() for trains in (True, False)}
    for weight in [p for model in filter(None, (trainer.policy, trainer.reference)) for p in model.parameters()]:
        whole = weight.full_tensor() if is_piece(weight) else weight  # type: ignore[attr-defined]
        weights[weight.requires_grad].update(whole.detach().flatten()[:256].float().cpu().numpy().tobytes())
    parts = {
        "problems": [trainer.rows, trainer.held_out],
        "prompts (instruction, chat template, tokenizer)": [trainer.prompts, trainer.held_out_prompts],
    }
    return {
        "kind of device": trainer.config.precision.device.type,
        "SHA-256 of the first 256 values of each of the model's own weights": weights[False].hexdigest()[:12],
        _TRAINED: weights[True].hexdigest()[:12],
    } | {
        f"SHA-256 of the {name}": hashlib.sha256(json.dumps(part, default=str).encode()).hexdigest()[:12]
        for name, part in parts.items()
    }


def _mapping(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return read_mapping(file)
    return {}


def _is_begun(path: Path) -> bool:
    """Whether `path` holds a checkpoint beyond step 0, or the result of a run."""
    return any(_steps(path)) or (path / _SUMMARY).exists()


def _is_done(path: Path, config: TrainConfig) -> bool:
    steps = _mapping(path / _SUMMARY).get("steps")
    return isinstance(steps, int) and steps >= config.max_steps


def _steps(path: Path) -> set[int]:
    """List the steps whose checkpoints are in `path`."""
    names = (entry.name.removeprefix("step-") for entry in (path / "checkpoints").glob("step-*"))
    return {int(name) for name in names if name.isdecimal()}
