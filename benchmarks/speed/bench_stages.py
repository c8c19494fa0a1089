"""Time what comes before scoring: sampling with a LoRA policy, detecting spans, packing.

Sampling is raced with narrow and with wide nuclei, because the sampler's time depends on them: random weights leave
nuclei of thousands of tokens, and with their logits scaled a few tokens carry nearly everything.
"""

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.harness.race import Budget, Contender, Figures, Lap, WrongAnswer, race, release_memory, replay_clock
from benchmarks.harness.workloads import SEED, Job, gsm8k_job, policy, random_model
from benchmarks.speed.command import workload_set
from benchmarks.speed.peers import PEERS
from benchmarks.speed.reference import Reference
from cfa_kernels import ScoredBatch
from cfa_kernels.hf.model import causal_lm
from cfa_kernels.scoring.plan import ScoringOptions, ScoringPlan, plan_scoring
from cfa_kernels.scoring.training_forward import packed_logprobs
from cfa_kernels.text.find import Reasoning, find_reasoning
from trainer.rollouts import Engine, Rollouts, RolloutSettings, TransformersEngine

OURS = "ours"
BESIDE = "adapters beside, growing cache"
DETECTION, PACKING = "span detection", "packing"
GAP = {torch.float32: 2e-3, torch.bfloat16: 0.3}  # nats, on average over tokens, between sampling and one forward
SAMPLING = {"temperature": 0.6, "top_p": 0.95}
HOST_SHARE = 0.05  # of the scoring time, for detection and packing together


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
    """The engine as the trainer runs it, and with adapters left beside the weights and a cache that grows."""
    model = policy(load.model, lora=True, device=device, dtype=load.dtype).eval()
    with torch.no_grad():
        causal_lm(model).model.norm.weight.mul_(sharpness)

    def sampled(engine: Engine) -> tuple[Rollouts, float]:
        began, prompts = time.process_time(), [prompt.tolist() for prompt in job.prompts]
        keys = [(SEED, b) for b in range(len(prompts))]
        rollouts = engine(prompts, max_completion_length=load.tokens, keys=keys, **SAMPLING)
        return rollouts, time.process_time() - began

    ways = {
        BESIDE: RolloutSettings(merge_adapters="never", rollout_cache="dynamic"),
        OURS: RolloutSettings(merge_adapters="always"),
    }
    return [
        Contender(
            name,
            functools.partial(sampled, TransformersEngine(model, job.tokenizer, settings)),
            functools.partial(_check_sampled, model),
        )
        for name, settings in ways.items()
    ]


def _check_sampled(model: nn.Module, sampled: tuple[Rollouts, float]) -> dict[str, Any]:
    """Whether the log-probs that tokens were drawn with are those of the policy."""
    rollouts, cpu_seconds = sampled
    mask = rollouts.completion_mask.bool()
    prompts = [ids[real.bool()] for ids, real in zip(rollouts.prompt_ids, rollouts.prompt_mask, strict=True)]
    completions = [ids[real] for ids, real in zip(rollouts.completion_ids, mask, strict=True)]
    with torch.no_grad():
        logprobs = packed_logprobs(model, prompts, completions, temperature=SAMPLING["temperature"])
    assert rollouts.logprobs is not None
    gap = (torch.cat(list(logprobs)) - rollouts.logprobs[mask]).abs().mean().item()
    if not gap <= GAP[next(model.parameters()).dtype]:
        raise WrongAnswer(f"tokens were drawn with log-probs that are {gap:.3g} nats from the policy's, on average")
    return {"gap_nats": gap, "tokens": int(mask.sum()), "cpu_seconds": cpu_seconds}


def host_contenders(load: Load, job: Job, device: torch.device) -> list[Contender]:
    """Detecting spans, packing, and the scoring that they serve."""
    model = random_model(load.model, device=device, dtype=load.dtype)
    ids = {b: completion.tolist() for b, completion in enumerate(job.completions)}
    some = job.part(range(min(4, len(job.completions))))
    reference = Reference.of(model, some)
    PEERS[OURS].run(model, some)  # checks once per model that it can be scored

    def pack() -> ScoringPlan:
        batch = ScoredBatch.of(
            model, job.prompts, job.completions, job.spans, job.answers, placeholder_id=job.placeholder_id
        )
        return plan_scoring(model, batch, ScoringOptions())

    def check_spans(reasonings: dict[int, Reasoning]) -> None:
        for b, one in reasonings.items():
            if one.answer is None or one.answer.end != job.answers[b].end or one.spans != job.spans[b]:
                raise WrongAnswer(f"completion {b}: answer {one.answer}, spans {one.spans}, not those of the job")

    def check_packs(plan: ScoringPlan) -> dict[str, Any]:
        expected, sequences = sum(1 + len(spans) for spans in job.spans), sum(map(len, plan.bundles))
        if sequences != expected:
            raise WrongAnswer(f"{sequences} sequences are packed, expected {expected}")
        return {"packs": len(plan.packs), "tokens_fed": sum(pack.num_tokens for pack in plan.packs)}

    return [
        Contender(DETECTION, lambda: find_reasoning(ids, job.tokenizer), check_spans),
        Contender(PACKING, pack, check_packs),
        Contender(
            OURS,
            lambda: PEERS[OURS].run(model, job),
            lambda scores: reference.check(PEERS[OURS], some, scores[: len(some.completions)], load.dtype),
        ),
    ]


STAGES: dict[str, tuple[tuple[str, ...], Callable[..., list[Contender]]]] = {
    "rollouts, narrow nuclei": ((BESIDE, OURS), functools.partial(sampling_contenders, sharpness=6.0)),
    "rollouts, wide nuclei": ((BESIDE, OURS), functools.partial(sampling_contenders, sharpness=1.0)),
    "host": ((DETECTION, PACKING, OURS), host_contenders),
}
"""By name: contenders, and what makes them of a load, a job and a device."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        pairs = [(stage, name) for stage, (names, _) in STAGES.items() for name in names]
        metafunc.parametrize(("stage", "name"), pairs, scope="module")
    elif "stage" in metafunc.fixturenames:
        metafunc.parametrize("stage", list(STAGES), scope="module")


@pytest.fixture(scope="module")
def stage_laps(
    request: pytest.FixtureRequest, stage: str, device: torch.device, budget: Budget, figures: Figures
) -> Iterator[dict[str, Lap]]:
    load = LOADS[workload_set(request.config)]
    job = gsm8k_job(load.problems).to(device)
    figures.workloads[stage] = {**job.describe(), **SAMPLING, "model": load.model, "tokens": load.tokens, "seed": SEED}
    contenders = STAGES[stage][1](load, job, device)
    yield race(contenders, device=device, budget=budget)
    del contenders
    release_memory(device)


@pytest.mark.benchmark(timer=replay_clock)
def test_stage_time(stage_laps: dict[str, Lap], stage: str, name: str, report: Callable[..., None]) -> None:
    report(stage_laps[name], group=stage)


def test_stages_take_what_was_promised(
    pytestconfig: pytest.Config, stage_laps: dict[str, Lap], stage: str, hold: Callable[..., None]
) -> None:
    ours = stage_laps[OURS].median
    real = workload_set(pytestconfig) != "smoke"
    if stage == "host":
        share = (stage_laps[DETECTION].median + stage_laps[PACKING].median) / ours
        short = [f"detection and packing take {share:.2%} of scoring, promised {HOST_SHARE:.0%}"]
        hold(stage, {"detection and packing": share}, {}, short if real and share > HOST_SHARE else [])
    else:
        hold(stage, {BESIDE: stage_laps[BESIDE].median / ours}, {BESIDE: 1.0} if real else {})
