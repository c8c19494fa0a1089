"""Keep a run's folder for one process, write checkpoints into it, and resume from the last one.

A run folder holds `config.yaml`, what the report writes, the trained model at the end, and `checkpoints/step-N/`:
`state.pt` with tensors, by the names they have in the model however it is sharded, and `run.json` with plain values.
Weights that do not train come from the model's own checkpoint.
"""

import contextlib
import hashlib
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
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

from .cli import read_settings, to_yaml
from .config import TrainConfig
from .disk import whole_folder, write_whole
from .policy import WHOLE, require_finite_weights, trained_state
from .processes import gather, on_first
from .provenance import made_by
from .settings import CHANGE_NO_RESULT
from .state import Trainer

_SETTINGS, _SUMMARY, _LOCK = "config.yaml", "summary.json", ".lock"
# Settings that may change when a run resumes: where it runs and writes, and how often it saves, tests and logs.
_MAY_CHANGE = CHANGE_NO_RESULT | {"eval_steps", "device", "parallel", "vllm_server_base_url", "vllm_weights"}
_NEW = "--no_resume starts again, in a new folder"


class Finished(Exception):
    """The run has all its steps; the message says where it is and how to begin another."""


class Refused(ValueError):
    """The run in a folder cannot resume; the message says why and what to do."""


@dataclass
class RunFolder:
    """Folder of a run, in which no other process writes; `started` is the date that prompts may write."""

    path: Path
    started: datetime
    _digest: str = ""

    def begin(self, trainer: Trainer) -> tuple[int, dict[str, Any]]:
        """Bring a trainer to the last checkpoint; gives its step and the report's state, or step 0 and nothing."""
        config, self._digest = trainer.config, _digest(trainer)
        step, report = on_first(lambda: _last_step(self.path)), dict[str, Any]()
        if step is not None:
            folder = self._checkpoint(step)
            try:
                content = json.loads((folder / "run.json").read_bytes())
                digest, report = content["digest"], content["report"]
                sizes = {file.name: file.stat().st_size for file in self.path.iterdir()}
                short = [name for name, size in report["bytes"].items() if sizes.get(name, 0) < size]
                state = torch.load(folder / "state.pt", "cpu", weights_only=True)
            except Exception as problem:  # a damaged file fails in as many ways as it has bytes
                what = f"{folder} cannot be read ({type(problem).__name__}: {problem})"
                raise Refused(f"{what}; remove it to resume from the one before; {_NEW}") from problem
            if digest != self._digest:
                raise Refused(f"{self.path} was begun with other base weights, problems, prompts or device; {_NEW}")
            if short:  # it would be filled up with zeros
                raise Refused(f"{self.path / short[0]} is shorter than it was at step {step}; {_NEW}")
            if step > config.max_steps:
                raise Refused(f"max_steps: {self.path} is at step {step} already, got {config.max_steps}")
            gather(None)  # none of the processes has failed before this
            restore(trainer, state)
        on_first(lambda: (self.path / _SUMMARY).unlink(missing_ok=True))  # else killed at its last step it is finished
        on_first(lambda: write_whole(self.path / _SETTINGS, to_yaml(config, made_by())))
        return step or 0, report

    def save(self, trainer: Trainer, step: int, report: Callable[[], dict[str, Any]]) -> None:
        """Keep a checkpoint of a step, with what `report()` gives, and the one before it; all processes call this."""
        policy, optimizer = trainer.policy, trainer.optimizer
        state = {
            "weights": trained_state(policy),
            # torch would take a step to make the state of an optimizer that has none.
            "optimizer": get_optimizer_state_dict(policy, optimizer, options=WHOLE) if optimizer.state else {},
            "scheduler": trainer.scheduler.state_dict(),
        }
        on_first(lambda: self._write(step, state, report()))

    def _write(self, step: int, state: dict[str, Any], report: dict[str, Any]) -> None:
        require_finite_weights(state["weights"])
        content = {"digest": self._digest, "report": report, "started": self.started.isoformat()}
        folder = self._checkpoint(step)
        with whole_folder(folder) as aside:
            with (aside / "state.pt").open("wb") as file:  # to which torch says what the disk said
                torch.save(state, file)
            (aside / "run.json").write_text(json.dumps(content), encoding="utf-8")
        newest = {self._checkpoint(one) for one in sorted(_steps(self.path))[-2:]}
        for other in {*folder.parent.iterdir()} - newest:
            shutil.rmtree(other, ignore_errors=True)

    def how_to_go_on(self, config: TrainConfig) -> str:
        """Say which command resumes."""
        if (step := _last_step(self.path)) is None:
            return "no checkpoint was kept yet"
        flags = f" with --output_dir={self.path}{'' if config.resume else ' in place of --no_resume'}"
        return f"{self.path} holds the checkpoint of step {step}: the same command{flags} resumes from there"

    def _checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step}"


def restore(trainer: Trainer, state: dict[str, Any]) -> None:
    """Bring a run that was just set up to where it was when `state` was saved."""
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

    The first process chooses and locks it, until it ends. Raises `Finished`, or `Refused` for another's folder.
    """
    with contextlib.ExitStack() as stack:
        yield on_first(lambda: _opened(config, stack))


def _opened(config: TrainConfig, stack: contextlib.ExitStack) -> RunFolder:
    credit = config.credit_name.partition(",")[0]
    started = f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(config.model).name}-{credit}-seed{config.seed}"
    path = Path(config.output_dir or Path("runs") / started)
    if config.output_dir is None or (_is_begun(path) and not config.resume):
        names = itertools.chain([path], (path.with_name(f"{path.name}-{i}") for i in itertools.count(2)))
        path = next(one for one in names if not one.exists())
    is_run = _is_begun(path) or (path / _SETTINGS).exists()
    if path.is_dir() and not is_run and any(entry.name[0] != "." for entry in path.iterdir()):
        raise Refused(f"output_dir: {path} is not empty and holds no run; name another folder or remove it")
    path.mkdir(parents=True, exist_ok=True)
    try:
        stack.enter_context(FileLock(path / _LOCK).acquire(blocking=False))
    except Timeout as held:
        raise Refused(f"output_dir: another run is writing to {path}; name another folder") from held
    stack.callback(lambda: shutil.rmtree(path) if [*path.iterdir()] == [path / _LOCK] else None)
    run = RunFolder(path, datetime.now())
    if not _is_begun(path):  # which another run may have written by now
        return run
    if changed := _differences(read_settings(path / _SETTINGS), config):
        raise Refused(f"{path} was begun with other settings: {', '.join(changed)}. Give the same ones, or {_NEW}")
    last = _last_step(path)  # none where a finished run's checkpoints were removed
    if (path / _SUMMARY).exists() and (last is None or last >= config.max_steps):
        raise Finished(f"{path} is finished; {_NEW}")
    with contextlib.suppress(Exception):  # `begin` says what is wrong with the checkpoint
        content = json.loads((run._checkpoint(last or 0) / "run.json").read_bytes())
        run.started = datetime.fromisoformat(content["started"])
    return run


def _differences(settings: dict[str, Any], config: TrainConfig) -> list[str]:
    # A setting that a run did not know had its default.
    then, now = {**asdict(type(config)()), **settings}, asdict(config)
    may_change = _MAY_CHANGE | ({"max_steps"} if config.lr_scheduler_type == "constant" else set())
    changed = [name for name in now if name not in may_change and then[name] != now[name]]
    return [f"{name} ({then[name]!r} then, {now[name]!r} now)" for name in changed]


def _digest(trainer: Trainer) -> str:
    # What a run depends on and neither settings nor checkpoints hold.
    data = [trainer.rows, trainer.held_out, trainer.prompts, trainer.held_out_prompts]
    digest = hashlib.sha256(json.dumps([trainer.config.precision.device.type, data], default=str).encode())
    for model in filter(None, (trainer.policy, trainer.reference)):
        for weight in (p for p in model.parameters() if not p.requires_grad):
            whole = weight.full_tensor() if is_piece(weight) else weight  # type: ignore[attr-defined]
            digest.update(whole.detach().flatten()[:256].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _is_begun(path: Path) -> bool:
    return bool(_steps(path)) or (path / _SUMMARY).exists()


def _last_step(path: Path) -> int | None:
    return max(_steps(path), default=None)


def _steps(path: Path) -> set[int]:
    names = (entry.name.removeprefix("step-") for entry in (path / "checkpoints").glob("step-*"))
    return {int(name) for name in names if name.isdecimal()}
