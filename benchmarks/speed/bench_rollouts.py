"""Sampling with a LoRA policy: what merging its adapters and a nucleus without a sort are worth.

Raced twice, because the sampler's time depends on the size of the nucleus: random weights leave nuclei of thousands of
tokens, and with their logits scaled a few tokens carry nearly everything, as where a trained model is sure.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

from benchmarks.harness.options import workload_set
from benchmarks.harness.race import Budget, Contender, Figures, Lap, WrongAnswer, race, release_memory, replay_clock
from benchmarks.harness.workloads import SEED, Job, gsm8k_job, policy
from cfa_kernels.hf.model import causal_lm
from cfa_kernels.scoring.training_forward import packed_logprobs
from trainer.rollouts import Engine, Rollouts, RolloutSettings, TransformersEngine

NUCLEI = {"narrow nuclei": 6.0, "wide nuclei": 1.0}
"""Factor of the logits of random weights; 6 is chosen, not taken from a trained model."""
PROMISE = 1.5  # on a CPU, beside adapters left where they are and a sort of the vocabulary for each token
GAP = {torch.float32: 2e-3, torch.bfloat16: 0.3}  # nats, on average over tokens, between sampling and one forward
SAMPLING = {"temperature": 0.6, "top_p": 0.95}
BEFORE = "adapters beside, sorted nucleus"


@dataclass(frozen=True)
class Load:
    """Which model, and how many problems of four completions each, of how many tokens."""

    model: str
    problems: int
    tokens: int
    dtype: torch.dtype


LOADS = {
    "smoke": Load("qwen3-tiny", 1, 8, torch.float32),
    "cpu": Load("qwen3-40m", 4, 150, torch.float32),
    "cuda": Load("Qwen3-1.7B", 16, 220, torch.bfloat16),
}


class SortingSampler(LogitsProcessor):
    """Draws what `KeyedSampler` draws by a sort of the whole vocabulary and float64 sums over it."""

    def __init__(self, uniforms: Tensor, temperature: float, top_p: float) -> None:
        self.logprobs: list[Tensor] = []
        self._uniforms = uniforms
        self._warpers = TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) in; 0 at the drawn token and -inf elsewhere out."""
        position = len(self.logprobs)
        scores = self._warpers[0](input_ids, scores)
        full = torch.log_softmax(scores, -1)
        cumulative = torch.softmax(self._warpers[1](input_ids, scores).double(), -1).cumsum(-1)
        threshold = self._uniforms[:, position : position + 1] * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, threshold, right=True).clamp(max=scores.shape[1] - 1)
        self.logprobs.append(full.gather(1, token).squeeze(1))
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)


def sharpened(model: nn.Module, factor: float) -> nn.Module:
    """Scale the logits of a policy, in place."""
    with torch.no_grad():
        causal_lm(model).model.norm.weight.mul_(factor)
    return model


def contenders(model: nn.Module, job: Job, load: Load) -> list[Contender]:
    """The engine as it is, and without what makes it fast, one thing after the other."""
    beside = RolloutSettings(merge_adapters="never", rollout_cache="dynamic")
    merged = RolloutSettings(merge_adapters="always", rollout_cache="dynamic")

    def sorting() -> contextlib.AbstractContextManager[Any]:
        """Sampling with the sorting sampler, and with torch's own product for the head."""
        module = "trainer.rollouts.in_process"
        head = mock.Mock(side_effect=lambda model: contextlib.nullcontext())
        return mock.patch.multiple(module, KeyedSampler=SortingSampler, decoding_head=head)

    ways: dict[str, tuple[RolloutSettings, Callable[[], Any]]] = {
        BEFORE: (beside, sorting),
        "adapters merged, sorted nucleus": (merged, sorting),
        "ours": (RolloutSettings(merge_adapters="always"), contextlib.nullcontext),
    }

    def run(engine: Engine, patched: Callable[[], Any]) -> tuple[Rollouts, float]:
        began = time.process_time()
        with patched():
            prompts = [prompt.tolist() for prompt in job.prompts]
            keys = [(SEED, b) for b in range(len(prompts))]
            rollouts = engine(prompts, max_completion_length=load.tokens, keys=keys, **SAMPLING)
        return rollouts, time.process_time() - began

    check = functools.partial(_check, model)
    return [
        Contender(name, functools.partial(run, TransformersEngine(model, job.tokenizer, how), patched), check)
        for name, (how, patched) in ways.items()
    ]


def _check(model: nn.Module, sampled: tuple[Rollouts, float]) -> dict[str, Any]:
    """Whether the log-probs that tokens were drawn with are those of the policy."""
    rollouts, cpu_seconds = sampled
    mask = rollouts.completion_mask.bool()
    prompts = [ids[kept.bool()] for ids, kept in zip(rollouts.prompt_ids, rollouts.prompt_mask, strict=True)]
    completions = [ids[kept] for ids, kept in zip(rollouts.completion_ids, mask, strict=True)]
    with torch.no_grad():
        found = packed_logprobs(model, prompts, completions, temperature=SAMPLING["temperature"])
    assert rollouts.logprobs is not None
    assert isinstance(found, list)
    gap = (torch.cat(found) - rollouts.logprobs[mask]).abs().mean().item()
    if not gap <= GAP[next(model.parameters()).dtype]:
        raise WrongAnswer(f"tokens were drawn with log-probs that are {gap:.3g} nats from the policy's, on average")
    return {"gap_nats": gap, "tokens": int(mask.sum()), "cpu_seconds": cpu_seconds}


@pytest.fixture(scope="module", params=NUCLEI)
def nuclei(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def group(request: pytest.FixtureRequest, nuclei: str) -> str:
    load = LOADS[workload_set(request.config)]
    return f"rollouts {load.model}, LoRA, {4 * load.problems} completions of {load.tokens} tokens, {nuclei}"


@pytest.fixture(scope="module")
def rollout_laps(
    request: pytest.FixtureRequest, group: str, nuclei: str, device: torch.device, budget: Budget, figures: Figures
) -> Iterator[dict[str, Lap]]:
    load = LOADS[workload_set(request.config)]
    model = sharpened(policy(load.model, lora=True, device=device, dtype=load.dtype).eval(), NUCLEI[nuclei])
    job = gsm8k_job(load.problems).to(device)
    figures.workloads[group] = {**job.describe(), **SAMPLING, "model": load.model, "seed": SEED}
    yield race(contenders(model, job, load), device=device, budget=budget)
    del model, job
    release_memory(device)


@pytest.mark.benchmark(timer=replay_clock)
@pytest.mark.parametrize("name", [BEFORE, "adapters merged, sorted nucleus", "ours"])
def test_sampling_time(rollout_laps: dict[str, Lap], group: str, name: str, report: Callable[..., None]) -> None:
    report(rollout_laps[name], group=group)


def test_sampling_is_as_fast_as_promised(
    pytestconfig: pytest.Config, rollout_laps: dict[str, Lap], group: str, budget: Budget, figures: Figures
) -> None:
    ratio = rollout_laps[BEFORE].median / rollout_laps["ours"].median
    figures.ratios.append({"group": group, "of": BEFORE, "to": "ours", "ratio": ratio, "limit": PROMISE})
    print(f"{group}: {ratio:.2f} times as fast as with {BEFORE}, promised {PROMISE:g}")
    if budget.max_rounds == 1 or workload_set(pytestconfig) == "smoke":
        pytest.skip("this shows that all runs and measures nothing")
    if ratio < PROMISE:
        pytest.fail(f"{ratio:.2f} times as fast, promised {PROMISE:g}", pytrace=False)
