"""Measure what a training step did, under TRL's names where TRL has one; stop a run whose numbers cannot be trusted.

Checks come before a number changes a weight or is saved.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cfa_kernels import KeptTokens
from cfa_kernels.loss.off_policy import open_choice, sampling_gaps
from cfa_kernels.model.check.verify import check_supported, check_trainable
from cfa_kernels.model.limits import refuse_length_dependent_rope
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.model.run_inside import run_inside

from .config import TrainConfig
from .precision import rounding
from .rewards.calls import mixed_groups
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
        for name, value in metrics.items():
            if extreme := {"max": max, "min": min}.get(name[-3:]):
                self._sums[name], self._weights[name] = extreme(self._sums.get(name, float(value)), float(value)), 1.0
                continue
            weight = (counts or {}).get(name, count)
            self._sums[name] = self._sums.get(name, 0.0) + float(value) * weight
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def values(self) -> dict[str, float]:
        """Return the figures so far."""
        return {name: total / self._weights[name] for name, total in self._sums.items() if self._weights[name]}


def reward_metrics(
    rewards: Tensor, by_function: Mapping[str, list[float | None]], num_generations: int
) -> dict[str, float]:
    """Summarize (B,) rewards, nan for none, with groups side by side: mean, spread, share of groups without any."""
    rewards = rewards.double()  # squares of what float32 holds may be beyond it
    known = rewards[~rewards.isnan()]
    metrics = {
        "reward": known.mean().item(), "reward_std": known.std().item() if len(known) > 1 else torch.nan,
        "frac_reward_zero_std": 1 - mixed_groups(rewards.view(-1, num_generations)).float().mean().item(),
    }  # fmt: skip
    for name, values in by_function.items():
        votes = torch.tensor([value for value in values if value is not None], dtype=torch.float64)
        if len(votes):
            metrics[f"rewards/{name}/mean"] = votes.mean().item()
        if len(votes) > 1:
            metrics[f"rewards/{name}/std"] = votes.std().item()
    return metrics


def length_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Summarize tokens per completion, and the share cut off at the limit; of nuclei, the share that a server cut."""
    lengths, cut = torch.tensor(rollouts.rows.lengths).float(), rollouts.truncated.float().mean().item()
    ends = {f"{name}_length": getattr(lengths, name)().item() for name in ("mean", "min", "max")}
    figures = {f"completions/{name}": value for name, value in {**ends, "clipped_ratio": cut}.items()}
    if rollouts.most_kept is not None and rollouts.kept_tokens:
        counts = KeptTokens.joined(rollouts.kept_tokens).counts
        figures["sampling/nucleus_cut"] = (counts >= rollouts.most_kept).float().mean().item()
    return figures


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


def require_supported(policy: nn.Module, longest: int) -> None:
    """Raise `NotImplementedError` if the model gives wrong results for rows of up to `longest` tokens."""
    causal = causal_lm(policy)
    refuse_length_dependent_rope(causal, longest)

    def check() -> None:  # here, so that no step waits for it
        for is_training, check_mode in ((True, check_trainable), (False, check_supported)):
            policy.train(is_training)
            check_mode(causal)

    run_inside(policy, check)


def require_finite(index: Sequence[int], logprobs: Sequence[Tensor], norm: Tensor, policy: nn.Module) -> None:
    """Raise `FloatingPointError` naming the samples of `index` whose log-probs, or whose gradients, are not finite."""
    if bad := [b for b, row in zip(index, logprobs, strict=True) if not row.isfinite().all()]:
        raise FloatingPointError(f"samples {bad}: log-prob is not finite")
    if not norm.isfinite():
        names = [n for n, p in policy.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        where = f" of {names[0]}" if names else ""
        raise FloatingPointError(f"samples {index}: gradient{where} is not finite")


def check_sampling_gap(
    logprobs: Mapping[int, Tensor], rollouts: Rollouts, policy: nn.Module, config: TrainConfig
) -> float:
    """Measure how far log-probs are from those a batch was sampled with, nats, and hold it to `sampling_gap_limit`.

    `logprobs` are tensors (t,) by the number of their completion, before the first optimizer step on the batch, while
    `policy` is the one that sampled. The gap is the mean of the absolute difference over tokens that count, each
    weighed by how probably it could have come out otherwise. Raises `FloatingPointError` with the samples and the gap
    where rounding cannot explain it.
    """
    sampled, limit = rollouts.logprobs, sampling_gap_limit(config, policy)
    gaps = {b: float(sampling_gaps(sampled[b], row).sum()) for b, row in logprobs.items()}
    choices = {b: float(open_choice(sampled[b]).sum()) for b in logprobs}
    mean = sum(gaps.values()) / sum(choices.values())
    if mean <= limit:
        return mean
    raise FloatingPointError(  # no later step could be trusted more
        f"samples {sorted(b for b, gap in gaps.items() if not gap / choices[b] <= limit)}: their log-probs in the "
        f"update are not those they were sampled with, though no weight has changed: {mean:.3g} nats apart over the "
        f"batch, and max_sampling_gap is {limit:.3g}. The model computes something else over "
        "whole rows than token by token, so the update would follow a wrong gradient"
    )


def sampling_gap_limit(config: TrainConfig, model: nn.Module) -> float:
    """Give `max_sampling_gap`, or what the coarsest type of weights or products explains at this temperature, nats."""
    if config.max_sampling_gap is not None:
        return config.max_sampling_gap
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    dtypes.add(config.precision.products)
    return max(map(rounding, dtypes)) / min(config.temperature, 1.0)
