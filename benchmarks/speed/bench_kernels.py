"""Race tree attention and its gradients against flash attention."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from benchmarks.harness.race import Budget, Contender, Race, race, release_memory
from benchmarks.harness.workloads import Job, JobRollouts, gsm8k_job, gsm8k_rollouts, shaped_rollouts
from benchmarks.speed.attention_jobs import (
    DEFAULT,
    FLASH,
    OURS,
    attention_contenders,
    backward_contenders,
    make_attention_job,
)


@dataclass(frozen=True)
class Kernel:
    """A kernel on one shape.

    Attributes:
        contenders: to race.
        facts: sizes, for the record.
        flops: operations of a run; `flash_flops` those of flash attention's run.
    """

    contenders: list[Contender]
    facts: dict[str, Any]
    flops: float
    flash_flops: float


def attention(model: str, dtype: torch.dtype, job: Callable[[], Job], device: torch.device) -> Kernel:
    """Tree attention along the trees of a scoring job."""
    made = make_attention_job(model, dtype, job(), device)
    with torch.no_grad():
        return Kernel(attention_contenders(made), made.describe(), made.flops, made.flash_flops)


def backward(model: str, dtype: torch.dtype, rollouts: Callable[[], JobRollouts], device: torch.device) -> Kernel:
    """Its gradients along prompts and completions of a training step, without branches that are only scored."""
    job = rollouts().job
    made = make_attention_job(model, dtype, replace(job, spans=[[] for _ in job.spans]), device)
    # Five products, not two.
    return Kernel(backward_contenders(made), made.describe(), 2.5 * made.flops, 2.5 * made.flash_flops)


# Workloads

Make = Callable[[torch.device], Kernel]
"""Makes a kernel's race on a device."""


def _gpu() -> dict[str, Make]:
    half = torch.bfloat16
    made: dict[str, Make] = {}
    for model in ("Qwen3-1.7B", "Qwen2.5-3B", "Llama-3.2-3B"):
        made[f"attention {model}, 16 x 4"] = functools.partial(attention, model, half, functools.partial(gsm8k_job, 16))
    for model in ("Qwen3-1.7B", "Qwen2.5-3B"):
        made[f"attention backward {model}, 8 x 4"] = functools.partial(
            backward, model, half, functools.partial(gsm8k_rollouts, 8, mixed=True)
        )
    for problems, prompt, completion in ((8, 110, 220), (4, 512, 512)):
        rollouts = functools.partial(shaped_rollouts, problems, group=8, prompt=prompt, completion=completion, spans=1)
        made[f"attention backward Qwen3-1.7B {problems} x 8, P {prompt}, T {completion}"] = functools.partial(
            backward, "Qwen3-1.7B", half, rollouts
        )
    return made


def _cpu(model: str, problems: int, mixed: bool) -> dict[str, Make]:
    single = torch.float32
    return {
        f"attention {model}, {2 * problems} x 4": functools.partial(
            attention, model, single, functools.partial(gsm8k_job, 2 * problems)
        ),
        f"attention backward {model}, {problems} x 4": functools.partial(
            backward, model, single, functools.partial(gsm8k_rollouts, problems, mixed=mixed)
        ),
    }


WORKLOADS = {"smoke": _cpu("qwen3-tiny", 1, False), "cpu": _cpu("qwen3-40m", 2, True), "cuda": _gpu()}


NAMES = [OURS, FLASH, DEFAULT]


@pytest.fixture(scope="module")
def kernel_race(workload: str, chosen: Make, device: torch.device, budget: Budget) -> Iterator[tuple[Kernel, Race]]:
    kernel = chosen(device)
    with torch.set_grad_enabled("backward" in workload):
        laps = race(kernel.contenders, device=device, budget=budget, clock="device")
        yield kernel, Race(workload, laps, kernel.facts, OURS)
    del kernel
    release_memory(device)


def test_kernel(kernel_race: tuple[Kernel, Race], name: str, report: Callable[..., None]) -> None:
    kernel, outcome = kernel_race
    report(outcome, name, flops=kernel.flash_flops if name in (FLASH, DEFAULT) else kernel.flops)
