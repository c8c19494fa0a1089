"""Time the stages of a training step: on a GPU by the device's own clock, without a wait; elsewhere by the host's."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

STAGES = ("generate", "credit", "update", "other")
"""Stages of every step: sampling, scoring credit, losses with their backward and the optimizer, all else."""


class StageTimes:
    """Seconds of one step by stage; time outside of `during` is `other`."""

    # On a GPU a stage lasts from one event in the queue of kernels to the next, as the host is done long before them.
    # The update ends in a wait, after which the events before it are read; `update` is what all others leave of the
    # step, so it takes in what the last optimizer step left in the queue.

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._marks: list[tuple[str, float, Any]] = []
        self._begin("other")

    def _begin(self, stage: str) -> None:
        event = None
        if self._device is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
        self._marks.append((stage, time.perf_counter(), event))

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """Count the body as `stage`, and not as the stage around it."""
        around = self._marks[-1][0]
        self._begin(stage)
        try:
            yield
        finally:
            self._begin(around)

    def metrics(self) -> dict[str, float]:
        """Return `step_time` so far, and as `time/STAGE` seconds that add up to it; asks nothing of the device."""
        self._begin(self._marks[-1][0])
        seconds = dict.fromkeys(STAGES, 0.0)
        for (stage, began, start), (_, ended, end) in zip(self._marks, self._marks[1:], strict=False):
            is_reached = end is not None and end.query()  # else the host's time
            elapsed = start.elapsed_time(end) / 1000 if is_reached else ended - began
            seconds[stage] = seconds.get(stage, 0.0) + elapsed
        total = self._marks[-1][1] - self._marks[0][1]
        seconds["update"] = total - sum(value for stage, value in seconds.items() if stage != "update")
        return {"step_time": total, **{f"time/{stage}": value for stage, value in seconds.items()}}
