"""Race the kernels: tree attention and its gradients against flash attention, log-probs against what is possible."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.race import Budget, Contender, Figures, Lap, race, release_memory, replay_clock, times_ours
from benchmarks.harness.workloads import (
    HEADS,
    SEED,
    Job,
    JobRollouts,
    gsm8k_job,
    gsm8k_rollouts,
    long_job,
    shaped_rollouts,
)
from benchmarks.speed.attention_jobs import (
    DEFAULT,
    FLASH,
    GATHERED,
    OURS,
    attention_contenders,
    backward_contenders,
    make_attention_job,
    wide_dtype,
)
from benchmarks.speed.command import workload_set
from benchmarks.speed.reference import ErrorBudget
from cfa_kernels import linear_logprob

WITH_ENTROPY, LOGITS, BOUND = "ours, with entropy", "logits, log_softmax", "bound"
NAMES = {
    "attention": (OURS, GATHERED, FLASH, DEFAULT),
    "attention backward": (OURS, GATHERED, FLASH, DEFAULT),
    "log-probs": (OURS, WITH_ENTROPY, LOGITS),
}
"""Contenders of each kernel."""

FLOORS = {
    "attention": {FLASH: 0.6, GATHERED: 1.0},
    "attention backward": {FLASH: 0.5},
    "log-probs": {BOUND: 0.85},
}
"""Ratios to reach on a GPU: of the rate of flash attention, FlashAttention 2 by name, on as many tokens and pairs in
equal causal sequences, and of what bandwidth and GEMM rate allow. Nothing is promised against SDPA's own choice."""


@dataclass(frozen=True)
class Kernel:
    """A kernel on one shape.

    Attributes:
        contenders: to race.
        facts: sizes, for the record.
        flops: operations of a run; `flash_flops` those of flash attention's run.
        moved: bytes of a run.
        bound: seconds that bandwidth and GEMM rate allow at best.
    """

    contenders: list[Contender]
    facts: dict[str, Any]
    flops: float
    flash_flops: float = 0.0
    moved: float = 0.0
    bound: float = 0.0


def attention(model: str, dtype: torch.dtype, job: Callable[[], Job], device: torch.device, _: Any) -> Kernel:
    """Tree attention along the trees of a scoring job."""
    made = make_attention_job(model, dtype, job(), device)
    with torch.no_grad():
        return Kernel(attention_contenders(made), made.describe(), made.flops, made.flash_flops)


def backward(
    model: str, dtype: torch.dtype, rollouts: Callable[[], JobRollouts], device: torch.device, _: Any
) -> Kernel:
    """Its gradients along prompts and completions of a training step, without branches that are only scored."""
    job = rollouts().job
    made = make_attention_job(model, dtype, replace(job, spans=[[] for _ in job.spans]), device)
    # Five products, not two.
    return Kernel(backward_contenders(made), made.describe(), 2.5 * made.flops, 2.5 * made.flash_flops)


def logprobs(
    rows: int, hidden: int, vocabulary: int, dtype: torch.dtype, device: torch.device, ceilings: Any
) -> Kernel:
    """Log-probs of rows from hidden states and a head."""
    flops = 2.0 * rows * hidden * vocabulary
    moved = float((rows + vocabulary) * hidden * dtype.itemsize)  # head and hidden states once; results are nothing
    bound = max(moved / (ceilings["copy_gb_per_s"] * 1e9), flops / (ceilings["gemm_tflop_per_s"] * 1e12))
    facts = {"rows": rows, "hidden": hidden, "vocabulary": vocabulary, "dtype": str(dtype).removeprefix("torch."),
             "bound_seconds": bound, "seed": SEED}  # fmt: skip
    with torch.no_grad():
        return Kernel(logprob_contenders(rows, hidden, vocabulary, dtype, device), facts, flops, 0.0, moved, bound)


def logits_logprob(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Log-probs (M,) from logits held as a whole."""
    logits = F.linear(hidden, head)
    return logits.to(wide_dtype(logits)).log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def logprob_contenders(
    rows: int, size: int, vocabulary: int, dtype: torch.dtype, device: torch.device
) -> list[Contender]:
    options: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(SEED), "device": device}
    hidden = torch.randn(rows, size, **options).to(dtype)
    head = (2 * torch.randn(vocabulary, size, **options) / size**0.5).to(dtype)
    targets = torch.randint(vocabulary, (rows,), **options)

    def reference(hidden: Tensor, head: Tensor) -> Tensor:
        parts = zip(hidden.split(512), targets.split(512), strict=True)
        return torch.cat([logits_logprob(some, head, ids) for some, ids in parts])

    def entropies(hidden: Tensor, head: Tensor) -> Tensor:
        parts = [F.linear(some, head) for some in hidden.split(512)]
        return torch.cat(
            [torch.distributions.Categorical(logits=part.to(wide_dtype(part))).entropy() for part in parts]
        )

    logprobs = ErrorBudget.of(reference, hidden, head)
    entropy = ErrorBudget.of(entropies, hidden, head)

    def check_both(result: tuple[Tensor, Tensor]) -> dict[str, float]:
        shares = logprobs.check(result[0]), entropy.check(result[1], "entropy")
        return {"error_over_budget": max(share["error_over_budget"] for share in shares)}

    return [
        Contender(OURS, lambda: linear_logprob(hidden, head, targets), logprobs.check),
        Contender(WITH_ENTROPY, lambda: linear_logprob(hidden, head, targets, return_entropy=True), check_both),
        Contender(LOGITS, lambda: logits_logprob(hidden, head, targets), logprobs.check),
    ]


# Workloads

Make = Callable[[torch.device, dict[str, Any]], Kernel]
"""Makes a kernel's race on a device, whose ceilings are measured."""


def _gpu() -> dict[str, Make]:
    half = torch.bfloat16
    made: dict[str, Make] = {}
    for model in ("Qwen3-1.7B", "Qwen2.5-3B", "Llama-3.2-3B"):
        made[f"attention {model} gsm8k"] = functools.partial(attention, model, half, functools.partial(gsm8k_job, 16))
    made["attention Qwen3-1.7B long"] = functools.partial(attention, "Qwen3-1.7B", half, functools.partial(long_job, 2))
    for model in ("Qwen3-1.7B", "Qwen2.5-3B"):
        made[f"attention backward {model} gsm8k"] = functools.partial(
            backward, model, half, functools.partial(gsm8k_rollouts, 8, mixed=True)
        )
    for problems, prompt, completion in ((8, 110, 220), (4, 512, 512)):
        rollouts = functools.partial(shaped_rollouts, problems, group=8, prompt=prompt, completion=completion, spans=1)
        made[f"attention backward Qwen3-1.7B {problems} x 8, P {prompt}, T {completion}"] = functools.partial(
            backward, "Qwen3-1.7B", half, rollouts
        )
    for model, (hidden, vocabulary) in HEADS.items():
        for rows in (16, 512, 6000):
            made[f"log-probs {model}, {rows} rows"] = functools.partial(logprobs, rows, hidden, vocabulary, half)
    return made


def _cpu(model: str, problems: int, mixed: bool, heads: list[tuple[int, int, int]]) -> dict[str, Make]:
    single = torch.float32
    return {
        f"attention {model}": functools.partial(attention, model, single, functools.partial(gsm8k_job, 2 * problems)),
        f"attention backward {model}": functools.partial(
            backward, model, single, functools.partial(gsm8k_rollouts, problems, mixed=mixed)
        ),
        **{
            f"log-probs {model}, {rows} rows": functools.partial(logprobs, rows, *sizes, single)
            for rows, *sizes in heads
        },
    }


KERNELS: dict[str, dict[str, Make]] = {
    "smoke": _cpu("qwen3-tiny", 1, False, [(5, 24, 160)]),
    "cpu": _cpu("qwen3-40m", 2, True, [(16, 512, 32_768), (512, 512, 32_768)]),
    "cuda": _gpu(),
}


def family(workload: str) -> str:
    """Key of `NAMES` and `FLOORS`: the longest that the workload's name begins with."""
    return max((name for name in NAMES if workload.startswith(name)), key=len)


# Tests


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("workload", list(KERNELS[workload_set(metafunc.config)]), scope="module")


@pytest.fixture(scope="module")
def kernel_race(
    request: pytest.FixtureRequest, workload: str, device: torch.device, ceilings: dict[str, Any], budget: Budget,
    figures: Figures,
) -> Iterator[tuple[Kernel, dict[str, Lap]]]:  # fmt: skip
    kernel = KERNELS[workload_set(request.config)][workload](device, ceilings)
    figures.workloads[workload] = kernel.facts
    with torch.set_grad_enabled(family(workload) == "attention backward"):
        yield kernel, race(kernel.contenders, device=device, budget=budget, clock="device")
    del kernel
    release_memory(device)


@pytest.mark.benchmark(timer=replay_clock)
@pytest.mark.parametrize("name", dict.fromkeys(name for names in NAMES.values() for name in names))
def test_kernel_time(
    kernel_race: tuple[Kernel, dict[str, Lap]], workload: str, name: str, report: Callable[..., None]
) -> None:
    kernel, laps = kernel_race
    if name not in laps:
        pytest.skip("no contender there")
    moved = {"bytes": kernel.moved} if kernel.moved else {}
    report(laps[name], group=workload, flops=kernel.flash_flops if name in (FLASH, DEFAULT) else kernel.flops, **moved)


def test_a_kernel_comes_as_near_its_peers_as_promised(
    pytestconfig: pytest.Config, kernel_race: tuple[Kernel, dict[str, Lap]], workload: str, hold: Callable[..., None]
) -> None:
    kernel, laps = kernel_race
    ratios = times_ours(laps)
    for name in ratios.keys() & {FLASH, DEFAULT}:
        ratios[name] *= kernel.flops / kernel.flash_flops  # per operation
    if kernel.bound:
        ratios[BOUND] = kernel.bound / laps[OURS].median
    hold(workload, ratios, FLOORS[family(workload)] if workload_set(pytestconfig) == "cuda" else {})
