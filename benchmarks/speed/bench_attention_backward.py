"""Race the gradients of tree attention along training trees against those of flash attention."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.harness.options import workload_set
from benchmarks.harness.race import Budget, Contender, Figures, Lap, race, release_memory, replay_clock, times_ours
from benchmarks.harness.workloads import SEED, Job, Rollouts, gsm8k_rollouts, shaped_rollouts
from benchmarks.speed.bench_kernels import (
    FLASH,
    GATHERED,
    OURS,
    AttentionJob,
    Trees,
    along_each_segment,
    equal_sequences,
    flash,
    gathered_varlen,
    make_attention_job,
    ours_attention,
    plain,
    wide_dtype,
)
from benchmarks.speed.reference import ErrorBudget, max_error

FLOOR = 0.5  # of the rate of flash attention's gradients on as many tokens and pairs in equal causal sequences


def training_tree(rollouts: Callable[[], Rollouts]) -> Job:
    """Prompts and completions of a training step, without the branches that are only scored."""
    job = rollouts().job
    return replace(job, spans=[[] for _ in job.spans])


def _training(model: str, dtype: torch.dtype, make: Callable[..., Rollouts], *sizes: int, **shape: Any) -> Trees:
    return Trees(model, dtype, functools.partial(training_tree, functools.partial(make, *sizes, **shape)))


BACKWARD: dict[str, dict[str, Trees]] = {
    "smoke": {"tiny": _training("qwen3-tiny", torch.float32, gsm8k_rollouts, 1, mixed=False)},
    "cpu": {"qwen3-40m gsm8k": _training("qwen3-40m", torch.float32, gsm8k_rollouts, 2, mixed=True)},
    "cuda": {
        **{
            f"{model} gsm8k": _training(model, torch.bfloat16, gsm8k_rollouts, 8, mixed=True)
            for model in ("Qwen3-1.7B", "Qwen2.5-3B")
        },
        **{
            f"Qwen3-1.7B {problems} x 8, P {prompt}, T {completion}": _training(
                "Qwen3-1.7B", torch.bfloat16, shaped_rollouts, problems,
                group=8, prompt=prompt, completion=completion, spans=1,
            )
            for problems, prompt, completion in ((8, 110, 220), (4, 512, 512))
        },
    },
}  # fmt: skip


# Gradients

Gradients = tuple[Tensor, ...]
"""By q, k and v."""


def gradients_along_each_segment(job: AttentionJob, by_out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """Gradients of `along_each_segment`, a segment at a time: its weights as a whole would not fit."""
    found = tuple(torch.zeros_like(x, dtype=wide_dtype(x)) for x in (q, k, v))
    first, ends = (x.tolist() for x in job.ends)
    for rows, keys in zip(itertools.pairwise(first), itertools.pairwise(ends), strict=True):
        seen = job.gathered[slice(*keys)]
        leaves = [x.detach().requires_grad_() for x in (q[slice(*rows)], k[seen], v[seen])]
        own = torch.arange(len(leaves[0]), device=q.device), torch.arange(len(seen), device=q.device)
        ends_of_one = tuple(torch.tensor([0, len(x)]) for x in own)
        one = replace(job, gathered=own[1], ends=ends_of_one)
        with torch.enable_grad():
            out = along_each_segment(one, *leaves)
        by_q, *by_kv = torch.autograd.grad(out, leaves, by_out[slice(*rows)].to(out.dtype))
        found[0][slice(*rows)] = by_q
        for total, part in zip(found[1:], by_kv, strict=True):
            total.index_add_(0, seen, part.to(total.dtype))
    return found


def gradients_of(attend: Callable[..., Tensor], by_out: Tensor, *inputs: Tensor) -> Callable[[], Gradients]:
    """Make a function that takes the gradients of one forward repeatedly; its first call runs the forward."""
    graph: list[tuple[Tensor, list[Tensor]]] = []

    def run() -> Gradients:
        if not graph:
            leaves = [x.detach().requires_grad_() for x in inputs]
            with torch.enable_grad():
                graph.append((attend(*leaves), leaves))
        out, leaves = graph[0]
        return torch.autograd.grad(out, leaves, by_out, retain_graph=True)

    return run


def gradient_check(reference: Callable[..., Gradients], *inputs: Tensor) -> Callable[[Gradients], dict[str, float]]:
    """Hold gradients to `reference` of the inputs in float64."""
    exact, low = reference(*(x.double() for x in inputs)), reference(*inputs)
    eps = torch.finfo(inputs[0].dtype).eps
    pairs = zip(low, exact, strict=True)
    budgets = [ErrorBudget(truth, max_error(mine, truth), eps) for mine, truth in pairs]

    def check(found: Gradients) -> dict[str, float]:
        named = zip(("by q", "by k", "by v"), found, budgets, strict=True)
        return {"error_over_budget": max(b.check(x, name)["error_over_budget"] for name, x, b in named)}

    return check


def backward_contenders(job: AttentionJob) -> list[Contender]:
    inputs, shape = (job.q, job.k, job.v), equal_sequences(job)
    generator = torch.Generator(job.q.device).manual_seed(SEED)
    by_out, by_equal = (
        torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype) for x in (job.q, shape[0])
    )
    tree = gradient_check(functools.partial(gradients_along_each_segment, job, by_out), *inputs)

    def of_first(*first: Tensor) -> Gradients:
        return gradients_of(plain, by_equal[:1].to(first[0].dtype), *first)()

    equal = gradient_check(of_first, *(x[:1] for x in shape))
    run = {
        OURS: gradients_of(lambda q, k, v: ours_attention(replace(job, q=q, k=k, v=v)), by_out, *inputs),
        GATHERED: gradients_of(lambda q, k, v: gathered_varlen(replace(job, q=q, k=k, v=v)), by_out, *inputs),
        FLASH: gradients_of(lambda *x: flash(x), by_equal, *shape),
    }
    checks = {FLASH: lambda found: equal(tuple(x[:1] for x in found))}
    return [Contender(name, take, checks.get(name, tree)) for name, take in run.items()]


# Tests


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backward_workload" in metafunc.fixturenames:
        metafunc.parametrize("backward_workload", list(BACKWARD[workload_set(metafunc.config)]), scope="module")


@pytest.fixture(scope="module")
def backward_job(
    request: pytest.FixtureRequest, backward_workload: str, device: torch.device
) -> Iterator[AttentionJob]:
    yield make_attention_job(BACKWARD[workload_set(request.config)][backward_workload], device)
    release_memory(device)


@pytest.fixture(scope="module")
def backward_laps(
    backward_job: AttentionJob, backward_workload: str, device: torch.device, budget: Budget, figures: Figures
) -> dict[str, Lap]:
    figures.workloads[f"attention backward {backward_workload}"] = backward_job.describe()
    return race(backward_contenders(backward_job), device=device, budget=budget, clock="device")


@pytest.mark.benchmark(timer=replay_clock)
@pytest.mark.parametrize("name", [OURS, GATHERED, FLASH])
def test_attention_backward_time(
    backward_laps: dict[str, Lap],
    backward_job: AttentionJob,
    backward_workload: str,
    name: str,
    report: Callable[..., None],
) -> None:
    flops = 2.5 * (backward_job.flash_flops if name == FLASH else backward_job.flops)  # five products, not two
    report(backward_laps[name], group=f"attention backward {backward_workload}", flops=flops)


def test_attention_backward_keeps_its_share_of_flash_attentions_rate(
    pytestconfig: pytest.Config,
    backward_laps: dict[str, Lap],
    backward_job: AttentionJob,
    backward_workload: str,
    hold: Callable[..., None],
) -> None:
    ratios = times_ours(backward_laps)
    if FLASH in ratios:
        ratios[FLASH] *= backward_job.flops / backward_job.flash_flops  # per operation
    floors = {FLASH: FLOOR} if workload_set(pytestconfig) == "cuda" else {}
    hold(f"attention backward {backward_workload}", ratios, floors)
