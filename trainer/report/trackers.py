"""Log to optional back-ends, each by its own library, imported only on request."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

Log = Callable[[dict[str, float], int], object]


def tracker_library(name: str) -> Any:
    """Import the library of back-end `name`; raises `ImportError` that says what to install."""
    try:
        return importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
    except ImportError as problem:
        raise ImportError(f"report_to: {name} is not installed (pip install {name})") from problem


def open_tracker(
    name: str, folder: Path, settings: dict[str, Any], run: str, step: int | None
) -> tuple[Log, Callable[[], object]]:
    """Start back-end `name` for a run; returns `log(metrics, step)` and `close()`.

    `run` is the run's own id, `step` the last one that it recorded, from which it goes on; None for a new run.
    Raises `ImportError` that says what to install, `ConnectionError` if the back-end does not start.
    """
    library = tracker_library(name)
    if name == "tensorboard":
        writer = library.SummaryWriter(folder, purge_step=None if step is None else step + 1)
        return lambda metrics, at: [writer.add_scalar(key, value, at) for key, value in metrics.items()], writer.close
    resume = {"resume": "never" if step is None else "allow"} | ({"id": run} if name == "wandb" else {})
    try:
        library.init(project="cfa_kernels", name=folder.name, config=settings, **resume)
    except Exception as problem:  # each has errors of its own
        raise ConnectionError(f"report_to: {name} cannot start: {type(problem).__name__}: {problem}") from problem
    return lambda metrics, at: library.log(metrics, step=at), library.finish
