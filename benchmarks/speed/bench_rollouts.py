"""Time sampling with a LoRA policy, with narrow and with wide nuclei, on which the sampler's time depends.

Random weights leave nuclei of thousands of tokens; with their logits scaled a few tokens carry nearly everything.
"""

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.harness.race import (
    Budget,
    Contender,
    Figures,
    Lap,
    WrongAnswer,
    race,
    release_memory,
    replay_clock,
    times_ours,
)
from benchmarks.harness.workloads import SEED, Job, gsm8k_job, policy
from benchmarks.speed.command import workload_set
from cfa_kernels.hf.model import causal_lm
from cfa_kernels.scoring.training_forward import packed_logprobs
from trainer.rollouts import Engine, Rollouts, TransformersEngine, generate
from trainer.rollouts.in_process import by_transformers
from trainer.rollouts.merged import merged_adapters

OURS = "ours"
GENERATE = "transformers' generate"
GAP = {torch.float32: 2e-3, torch.bfloat16: 0.3}  # nats, on average over tokens, between sampling and one forward
SAMPLING = {"temperature": 0.6, "top_p": 0.95}


@dataclass(frozen=True)
class Load:
    """A model, a number of problems of four completions each, and how many tokens are sampled."""

    model: str
    problems: int
    tokens: int
    dtype: torch.dtype


LOADS = {
    "smoke": Load("qwen3-tiny", 1, 8, torch.float32),
    "cpu": Load("qwen3-40m", 4, 150, torch.float32),
    "cuda": Load("Qwen3-1.7B", 16, 220, torch.bfloat16),
}


def sampling_contenders(load: Load, job: Job, device: torch.device, *, sharpness: float) -> list[Contender]:
    """The engine as the trainer runs it, and transformers' `generate` with a cache that grows; both merge adapters."""
    model = policy(load.model, lora=True, device=device, dtype=load.dtype).eval()
    with torch.no_grad():
        causal_lm(model).model.norm.weight.mul_(sharpness)

    def sampled(engine: Engine) -> tuple[Rollouts, float]:
        began, prompts = time.process_time(), [prompt.tolist() for prompt in job.prompts]
        keys = [(SEED, b) for b in range(len(prompts))]
        rollouts = engine(prompts, max_completion_length=load.tokens, keys=keys, **SAMPLING)
        return rollouts, time.process_time() - began

    def by_generate(*arguments: Any, **options: Any) -> Rollouts:
        decoder = functools.partial(by_transformers, causal_lm(model))
        with merged_adapters(model):
            return generate(model, job.tokenizer, *arguments, **options, decoder=decoder)

    ways: dict[str, Any] = {GENERATE: by_generate, OURS: TransformersEngine(model, job.tokenizer)}
    return [
        Contender(
            name,
            functools.partial(sampled, engine),
            functools.partial(_check_sampled, model),
        )
        for name, engine in ways.items()
    ]


def _check_sampled(model: nn.Module, sampled: tuple[Rollouts, float]) -> dict[str, Any]:
    """Whether the log-probs that tokens were drawn with are those of the policy."""
    rollouts, cpu_seconds = sampled
    with torch.no_grad():
        logprobs = packed_logprobs(model, rollouts.rows, temperature=SAMPLING["temperature"])
    gap = (torch.cat(list(logprobs)).cpu() - torch.cat(rollouts.logprobs)).abs().mean().item()
    if not gap <= GAP[next(model.parameters()).dtype]:
        raise WrongAnswer(f"tokens were drawn with log-probs that are {gap:.3g} nats from the policy's, on average")
    return {"gap_nats": gap, "tokens": sum(rollouts.rows.lengths), "cpu_seconds": cpu_seconds}


NUCLEI = {"narrow nuclei": 6.0, "wide nuclei": 1.0}
"""Factor of the logits of random weights; 6 is chosen, not taken from a trained model."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "nuclei" in metafunc.fixturenames:
        metafunc.parametrize("nuclei", list(NUCLEI), scope="module")


@pytest.fixture(scope="module")
def laps(
    request: pytest.FixtureRequest, nuclei: str, device: torch.device, budget: Budget, figures: Figures
) -> Iterator[dict[str, Lap]]:
    load = LOADS[workload_set(request.config)]
    job = gsm8k_job(load.problems).to(device)
    sampled = {**SAMPLING, "model": load.model, "tokens": load.tokens, "seed": SEED}
    figures.workloads[f"rollouts, {nuclei}"] = {**job.describe(), **sampled}
    yield race(sampling_contenders(load, job, device, sharpness=NUCLEI[nuclei]), device=device, budget=budget)
    release_memory(device)


@pytest.mark.benchmark(timer=replay_clock)
@pytest.mark.parametrize("name", [GENERATE, OURS])
def test_sampling_time(laps: dict[str, Lap], nuclei: str, name: str, report: Callable[..., None]) -> None:
    report(laps[name], group=f"rollouts, {nuclei}")


def test_sampling_is_faster_than_by_generate(
    pytestconfig: pytest.Config, laps: dict[str, Lap], nuclei: str, hold: Callable[..., None]
) -> None:
    same = workload_set(pytestconfig) == "smoke" or nuclei == "wide nuclei"  # where both sort the vocabulary
    hold(f"rollouts, {nuclei}", times_ours(laps), {} if same else {GENERATE: 1.0})
