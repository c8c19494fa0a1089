"""Time span detection and packing on the CPU, relative to the scoring that they serve."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.harness.options import workload_set
from benchmarks.harness.race import Budget, Contender, Figures, Lap, WrongAnswer, race, release_memory, replay_clock
from benchmarks.harness.workloads import SEED, Job, gsm8k_job, random_model
from benchmarks.speed.peers import PEERS, Observed
from benchmarks.speed.reference import Reference
from cfa_kernels import ScoredBatch
from cfa_kernels.packing.prefix_tree import Pack
from cfa_kernels.scoring.plan import ScoringOptions, ScoringPlan, plan_scoring
from cfa_kernels.text.find import Reasoning, find_reasoning

LIMIT = 0.05  # of the scoring time
CHECKED = 4  # completions whose scores are checked: those of one prompt
STAGES = ("span detection", "packing", "ours")


@dataclass(frozen=True)
class Load:
    """Workload: a model, and a number of problems of four completions each."""

    model: str
    problems: int
    dtype: torch.dtype


LOADS = {
    "smoke": Load("qwen3-tiny", 1, torch.float32),
    "cpu": Load("qwen3-40m", 32, torch.float32),
    "cuda": Load("Qwen3-1.7B", 32, torch.bfloat16),  # the fastest to score of the models measured
}


@pytest.fixture(scope="module")
def group(request: pytest.FixtureRequest) -> str:
    load = LOADS[workload_set(request.config)]
    return f"host share {load.model}, {4 * load.problems} completions"


@pytest.fixture(scope="module")
def stage_laps(
    request: pytest.FixtureRequest, group: str, device: torch.device, budget: Budget, figures: Figures
) -> Iterator[dict[str, Lap]]:
    load = LOADS[workload_set(request.config)]
    model = random_model(load.model, device=device, dtype=load.dtype)
    job = gsm8k_job(load.problems).to(device)
    figures.workloads[group] = {**job.describe(), "model": load.model, "seed": SEED}
    yield race(_stages(model, job), device=device, budget=budget)
    del model, job
    release_memory(device)


def _stages(model: PreTrainedModel, job: Job) -> list[Contender]:
    ids = {b: completion.tolist() for b, completion in enumerate(job.completions)}
    run = PEERS["ours"].run
    run(model, job.part([0]))  # checks once per model that it can be scored

    def detect() -> dict[int, Reasoning]:
        return find_reasoning(ids, job.tokenizer)

    def pack() -> tuple[ScoringPlan, list[Pack]]:
        batch = ScoredBatch.of(
            model, job.prompts, job.completions, job.spans, job.answers, placeholder_id=job.placeholder_id
        )
        plan = plan_scoring(model, batch, ScoringOptions())
        return plan, plan.packs

    return [
        Contender("span detection", detect, functools.partial(_check_spans, job)),
        Contender("packing", pack, functools.partial(_check_packs, job)),
        Contender("ours", lambda: run(model, job), functools.partial(_check_scores, model, job)),
    ]


def _check_spans(job: Job, found: dict[int, Reasoning]) -> None:
    for b, (answer, spans) in found.items():
        if answer is None or answer.end != job.answers[b].end or spans != job.spans[b]:
            raise WrongAnswer(f"completion {b}: answer {answer} and spans {spans}, not those of the job")


def _check_packs(job: Job, packed: tuple[ScoringPlan, list[Pack]]) -> dict[str, Any]:
    plan, packs = packed
    asked = sum(1 + len(spans) for spans in job.spans)
    if (laid_out := sum(map(len, plan.bundles))) != asked:
        raise WrongAnswer(f"{laid_out} sequences are packed, {asked} were asked for")
    return {"packs": len(packs), "tokens_fed": sum(pack.num_tokens for pack in packs)}


def _check_scores(model: PreTrainedModel, job: Job, observed: Observed) -> dict[str, Any]:
    some = job.part(range(CHECKED))
    reference = Reference.of(model, some)
    return reference.check(PEERS["ours"], some, observed[:CHECKED], next(model.parameters()).dtype)


@pytest.mark.benchmark(timer=replay_clock)
@pytest.mark.parametrize("name", STAGES)
def test_stage_time(stage_laps: dict[str, Lap], group: str, name: str, report: Callable[..., None]) -> None:
    report(stage_laps[name], group=group)


def test_detection_and_packing_take_their_share_at_most(
    pytestconfig: pytest.Config, stage_laps: dict[str, Lap], group: str, budget: Budget, figures: Figures
) -> None:
    host = stage_laps["span detection"].median + stage_laps["packing"].median
    share = host / stage_laps["ours"].median
    figures.ratios.append({"group": group, "of": "detection and packing", "to": "ours", "ratio": share, "limit": LIMIT})
    print(f"{group}: span detection and packing take {share:.2%} of scoring, promised {LIMIT:.0%} at most")
    if budget.max_rounds == 1 or workload_set(pytestconfig) == "smoke":
        pytest.skip("this shows that all runs and measures nothing")
    if share > LIMIT:
        pytest.fail(f"{share:.2%} of scoring, promised {LIMIT:.0%} at most", pytrace=False)
