"""Find a run's folder, keep it for one process, and go on from its last checkpoint.

A run folder holds `config.yaml`, what the report writes, the trained model at the end, and `checkpoints/`, one folder
for each step that was kept: `state.pt`, and `run.json` with what the run depends on and how far its files were written.
A folder has its name only once all of it is on the disk.
"""

import contextlib
import hashlib
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from ..checks import sampling_gap_limit
from ..cli import read_mapping, to_yaml
from ..config import TrainConfig
from ..data import question_instruction
from ..disk import DiskError, naming, whole_folder, write_whole
from ..policy import require_finite_weights
from ..processes import on_first
from ..provenance import made_by
from ..state import Trainer
from .state import collect, restore

RUNS = Path("runs")
_SETTINGS, _SUMMARY, _LOCK = "config.yaml", "summary.json", ".lock"
# Settings that a run may go on with changed: where it runs and writes, and how often it saves, tests and logs.
_MAY_CHANGE = frozenset({
    "output_dir", "resume", "save_steps", "eval_steps", "report_to", "log_completions", "device", "parallel",
    "vllm_server_base_url", "page_steps",
})  # fmt: skip
_CHECKPOINTS = 2  # that are kept
_NEW = "--no_resume starts anew, in a new folder"


class Finished(Exception):
    """The run has all its steps; the message says where it is and how to begin another."""


class Refused(ValueError):
    """The run in a folder cannot go on; the message says why and what to do."""


@dataclass
class RunFolder:
    """Folder of a run, in which no other process writes."""

    path: Path
    started: datetime = field(default_factory=lambda: datetime.now())
    """When the run began: the date in prompts whose chat template writes one."""
    _facts: dict[str, str] = field(default_factory=dict)

    def begin(self, trainer: Trainer) -> tuple[int, dict[str, Any]]:
        """Bring a trainer to the last checkpoint; gives its step and the report's state, or step 0 and nothing.

        Raises:
            Refused: the checkpoint cannot be read, or the run was begun with other data or another kind of device.
            DiskError: the settings cannot be written.
        """
        self._facts, self.started, config = _facts(trainer), trainer.started, trainer.config
        step, report = on_first(self._last)
        if step is None:
            step = 0
        else:
            with self._reading(step):
                state = torch.load(self._checkpoint(step) / "state.pt", "cpu", weights_only=True)
            restore(trainer, state)
        if step > config.max_steps:
            raise Refused(f"max_steps: {self.path} is at step {step} already, got {config.max_steps}")
        on_first(lambda: write_whole(self.path / _SETTINGS, to_yaml(config, made_by(), _resolved(trainer))))
        return step, report

    def _last(self) -> tuple[int | None, dict[str, Any]]:
        """Read the last checkpoint but for its tensors, and raise unless it is this run's."""
        if not (steps := _steps(self.path)):
            if _is_begun(self.path):
                raise Refused(f"{self.path}: no checkpoint to go on from; {_NEW}")
            return None, {}
        with self._reading(step := max(steps)):
            content: dict[str, Any] = json.loads((self._checkpoint(step) / "run.json").read_bytes())
            for name, size in content["report"]["bytes"].items():
                if (now := (self.path / name).stat().st_size) < size:
                    raise ValueError(f"{self.path / name} has {now} bytes, and had {size} at step {step}")
        for name, fact in self._facts.items():
            if (then := content["facts"].get(name)) != fact:
                if step == 0:  # nothing is lost
                    return None, {}
                raise Refused(f"{self.path}: {name} was {then} and is {fact} now; {_NEW}")
        return step, content["report"]

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Name a checkpoint that cannot be read; it was whole when it got its name, so nothing else is tried."""
        try:
            yield
        except Exception as problem:  # a file that was changed fails in as many ways as it has bytes
            said = f"{self._checkpoint(step)} cannot be read: {type(problem).__name__}: {problem}"
            raise Refused(f"{said}; remove it to go on from the one before, or {_NEW}") from problem

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
            content = {"step": step, "facts": self._facts, "report": report, "started": self.started.isoformat()}
            (aside / "run.json").write_text(json.dumps(content), encoding="utf-8")
        newest = {f"step-{one}" for one in sorted(_steps(self.path))[-_CHECKPOINTS:]}
        for other in folder.parent.iterdir():  # also what a killed process left half written
            if other.name not in newest:
                shutil.rmtree(other, ignore_errors=True)

    def how_to_go_on(self) -> str:
        """Say what the same command will do."""
        if not (steps := _steps(self.path)):
            return "no checkpoint was kept yet"
        return f"{self.path} holds the checkpoint of step {max(steps)}: the same command goes on from there"

    def _checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step}"


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
        yield on_first(lambda: _opened(_own_folder(config, stack)))


def _opened(path: Path) -> RunFolder:
    folder = RunFolder(path)
    if any(steps := _steps(path)):
        with contextlib.suppress(OSError, ValueError, KeyError):  # `begin` says what is wrong with it
            content = json.loads((folder._checkpoint(max(steps)) / "run.json").read_bytes())
            folder.started = datetime.fromisoformat(content["started"])
    return folder


def _own_folder(config: TrainConfig, stack: contextlib.ExitStack) -> Path:
    """Choose a run's folder, and lock it until `stack` ends."""
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
    if path.is_dir() and not (path / _SETTINGS).exists() and any(entry.name[0] != "." for entry in path.iterdir()):
        raise Refused(f"output_dir: {path} is not empty and holds no run; name another folder or remove it")
    if not config.resume and _is_begun(path):
        return _locked(_free(path), stack)
    path = _locked(path, stack)
    if _is_begun(path) and (changed := _differences(_mapping(path / _SETTINGS), config)):
        raise Refused(f"{path} was begun with other settings: {', '.join(changed)}. Give the same ones, or {_NEW}")
    if _is_done(path, config):
        raise Finished(f"{path} is finished: it has its {config.max_steps} steps; {_NEW}")
    return path


def _locked(path: Path, stack: contextlib.ExitStack) -> Path:
    """Make a folder if it is not there, and lock it until `stack` ends; then delete it if nothing was written."""

    def remove_unused() -> None:
        with contextlib.suppress(OSError):
            if [entry.name for entry in path.iterdir()] == [_LOCK]:
                shutil.rmtree(path)

    # A file lock, and not a file that is there: it ends with the process, however that ends.
    with naming(path, "output_dir: "):
        path.mkdir(parents=True, exist_ok=True)
        try:
            stack.enter_context(FileLock(path / _LOCK).acquire(blocking=False))
        except Timeout as held:
            raise DiskError(f"output_dir: another run is writing to {path}; name another folder") from held
    stack.callback(remove_unused)
    return path


def _free(path: Path) -> Path:
    """Give `path`, or the first of `path-2`, `path-3`, ... that is not there."""
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
    """Name what a run depends on in addition to its settings: kind of device, problems, prompts."""
    texts = "prompts (instruction, chat template, tokenizer)"
    parts = {
        "training problems": trainer.rows, f"training {texts}": trainer.prompts,
        "held-out problems": trainer.held_out, f"held-out {texts}": trainer.held_out_prompts,
    }  # fmt: skip
    return {"kind of device": trainer.config.precision.device.type} | {
        f"SHA-256 of the {name}": hashlib.sha256(json.dumps(part, default=str).encode()).hexdigest()[:12]
        for name, part in parts.items()
    }


def _resolved(trainer: Trainer) -> dict[str, Any]:
    """Give what settings came to that were left to the program."""
    config, precision, credit = trainer.config, trainer.config.precision, trainer.config.counterfactual()
    options = {"units": credit.units, "weights": getattr(credit.weights, "name", None)}
    for part in filter(None, (credit.estimator, credit.weights, credit.spans, credit.answers)):
        options |= vars(part)
    return {
        "device": str(precision.device),
        "dtype": f"weights {precision.weights}, products {precision.products}".replace("torch.", ""),
        "train_problems": len(trainer.rows),
        "eval_problems": len(trainer.held_out),
        "eval_reward": config.grader,
        "instruction": question_instruction(config),
        "max_sampling_gap": sampling_gap_limit(config, trainer.policy),
        "credit_options": ", ".join(f"{name}={value}" for name, value in options.items() if value is not None),
    }


def _mapping(file: Path) -> dict[str, Any]:
    """Read a mapping from a file; it is empty where there is none."""
    with contextlib.suppress(OSError, ValueError):
        return read_mapping(file)
    return {}


def _is_begun(path: Path) -> bool:
    """Whether `path` holds a checkpoint beyond step 0, or the result of a run."""
    return any(_steps(path)) or (path / _SUMMARY).exists()


def _is_done(path: Path, config: TrainConfig) -> bool:
    return bool(_mapping(path / _SUMMARY).get("steps", 0) >= config.max_steps)


def _steps(path: Path) -> set[int]:
    """List the steps whose checkpoints are in `path`, good or damaged."""
    names = (entry.name.removeprefix("step-") for entry in (path / "checkpoints").glob("step-*"))
    return {int(name) for name in names if name.isdecimal()}
