"""Measure what a training step did and how long its stages took, under TRL's names where TRL has one."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .rollouts.engine import Rollouts


class Averages:
    """Means of micro-batches, each weighted by the number of its values; `.../max` and `.../min` keep the extreme."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(
        self, metrics: Mapping[str, Tensor | float], count: float = 1.0, counts: Mapping[str, float] | None = None
    ) -> None:
        """Add the metrics of one micro-batch: means over `count` values, those named in `counts` over that many."""
        counts = counts or {}
        for name, value in metrics.items():
            weight = counts.get(name, count)
            extreme = {"max": max, "min": min}.get(name[-3:])
            if extreme:
                self._sums[name] = extreme(self._sums.get(name, float(value)), float(value))
                self._weights[name] = 1.0
            else:
                self._sums[name] = self._sums.get(name, 0.0) + float(value) * weight
                self._weights[name] = self._weights.get(name, 0.0) + weight

    def values(self) -> dict[str, float]:
        """Return the figures so far."""
        return {name: total / self._weights[name] for name, total in self._sums.items() if self._weights[name]}


def reward_metrics(
    rewards: Tensor, by_function: Mapping[str, list[float | None]], num_generations: int
) -> dict[str, float]:
    """Summarize (B,) rewards with groups side by side: mean, spread within groups, share of groups without any."""
    groups = rewards.view(-1, num_generations)
    metrics = {
        "reward": rewards.mean().item(),
        "reward_std": groups.std(1).mean().item(),
        "frac_reward_zero_std": (groups.amax(1) == groups.amin(1)).float().mean().item(),
    }
    for name, values in by_function.items():
        votes = torch.tensor([value for value in values if value is not None])
        if len(votes):
            metrics[f"rewards/{name}/mean"] = votes.mean().item()
            metrics[f"rewards/{name}/std"] = votes.std(correction=0).item()
    return metrics


def length_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Summarize tokens per completion, and the share cut off at the limit."""
    lengths = torch.tensor(rollouts.rows.lengths).float()
    return {
        "completions/mean_length": lengths.mean().item(),
        "completions/min_length": lengths.min().item(),
        "completions/max_length": lengths.max().item(),
        "completions/clipped_ratio": rollouts.truncated.float().mean().item(),
    }


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
