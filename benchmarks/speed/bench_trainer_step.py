"""Time steps of the training program, sampling included, by its own stages; profile its decoding.

A model of random weights never ends a completion. So every completion is decoded to the length of the longest, and
recorded ones of the mean length, with answers and spans that the program finds, stand in for what was sampled.
"""

import dataclasses
import functools
import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import yaml
from transformers import get_scheduler
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import is_liger_kernel_available

from benchmarks.harness.race import Budget, Contender, Figures, Lap, WrongAnswer, race, release_memory, replay_clock
from benchmarks.harness.workloads import SEED, JobRollouts, policy, shaped_rollouts
from benchmarks.speed.command import workload_set
from benchmarks.speed.profiles import device_events, summarize
from cfa_kernels.hf.model import causal_lm
from trainer.config import TrainConfig
from trainer.data import Row
from trainer.metrics import STAGES
from trainer.rollouts import Rollouts, TransformersEngine
from trainer.settings import PRESETS
from trainer.state import Trainer
from trainer.step import training_step

OURS = "ours"
CREDITED = "cf", "prefix_gain_positive"  # presets
SHARPNESS = 6.0  # factor of the logits, so that nuclei are as narrow as a trained model's


@dataclasses.dataclass(frozen=True)
class Load:
    """A model, and the shape of a step: `longest` tokens are decoded for every completion of `completion` tokens."""

    model: str
    problems: int
    group: int
    prompt: int
    completion: int
    longest: int
    spans: int

    def rollouts(self) -> JobRollouts:
        """Random words with an expression in each span and a number behind the marker."""
        rollouts = shaped_rollouts(
            self.problems, group=self.group, prompt=self.prompt, completion=self.completion - 1, spans=self.spans
        )
        job = rollouts.job
        expression, number = (torch.tensor(job.tokenizer.encode(text)) for text in (" 3 * 4 = 12,", " 72"))
        end = torch.tensor([job.tokenizer.eos_token_id])
        completions = []
        for ids, spans, answer in zip(job.completions, job.spans, job.answers, strict=True):
            for span in spans:
                ids[span.start : span.start + len(expression)] = expression
            completions.append(torch.cat([ids[: answer.start], number, end]))
        return dataclasses.replace(rollouts, job=dataclasses.replace(job, completions=completions))


LOADS = {
    "smoke": Load("qwen3-tiny", 2, 2, 20, 60, 8, 3),
    "cpu": Load("qwen3-40m", 2, 4, 110, 220, 220, 6),
    "cuda": Load("Qwen3-1.7B", 8, 8, 110, 220, 400, 6),
}


class Recorded:
    """The engine of the program, whose completions are exchanged for recorded ones after they have been sampled."""

    def __init__(self, engine: TransformersEngine, rollouts: JobRollouts) -> None:
        self.engine, self.notes, self.weights_changed = engine, engine.notes, engine.weights_changed
        self._rollouts, self.sampled = rollouts, 0

    def __call__(self, prompts: Sequence[Sequence[int]], **options: Any) -> Rollouts:
        """Sample, then return the recorded completions."""
        self.sampled = sum(self.engine(prompts, **options).rows.lengths)
        job = self._rollouts.job
        completions, ends = [ids.tolist() for ids in job.completions], [job.tokenizer.eos_token_id]
        return Rollouts.of(prompts, completions, [-torch.ones(len(row)) for row in completions], ends, job.tokenizer)


def make_trainer(load: Load, device: torch.device, *, liger: bool = True) -> Trainer:
    """Set the program up around a model of random weights, as `trainer.run.set_up` does around a loaded one."""
    rollouts, count = load.rollouts(), load.problems * load.group
    config = TrainConfig(
        device=str(device), generation_batch_size=count, num_generations=load.group, seed=SEED,
        max_completion_length=load.longest, max_sampling_gap=1e9,  # recorded completions were not sampled
    )  # fmt: skip
    model = policy(load.model, lora=True, device=device, dtype=config.precision.weights).eval()
    causal = causal_lm(model)
    if liger and device.type == "cuda" and is_liger_kernel_available():
        apply_liger_kernel(causal, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    with torch.no_grad():
        causal.model.norm.weight.mul_(SHARPNESS)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=config.learning_rate, weight_decay=0.0,
        fused=device.type == "cuda" or None,
    )  # fmt: skip
    engine = Recorded(TransformersEngine(model, rollouts.job.tokenizer), rollouts)
    prompts = [rollouts.job.prompts[i].tolist() for i in range(0, count, load.group)]
    rows = [Row({"question": "", "answer": "72"})] * load.problems
    return Trainer(
        config, model, rollouts.job.tokenizer, engine, optimizer,
        get_scheduler(config.lr_scheduler_type, optimizer, 0, config.max_steps), None,
        {"forced": lambda completions, **_: rollouts.rewards.tolist()}, rows, prompts, rows, prompts, lambda **_: [],
    )  # fmt: skip


def stepper(load: Load, trainer: Trainer, preset: str) -> tuple[Contender, list[dict[str, float]]]:
    """A step with a preset's credit as a contender, and the metrics of the steps that it has taken."""
    steps: list[dict[str, float]] = []
    config = dataclasses.replace(trainer.config, **yaml.safe_load((PRESETS / f"{preset}.yaml").read_text("utf-8")))

    def run() -> dict[str, float]:
        trainer.config = config
        problems = range(load.problems)
        steps.append(training_step(trainer, len(steps) + 1, problems).metrics)
        return steps[-1]

    def check(metrics: dict[str, float]) -> dict[str, Any]:
        expected = {"completions/mean_length": load.completion, "credit/spans_mean": load.spans}
        for name, value in expected.items():
            if metrics[name] != value:
                raise WrongAnswer(f"{name} is {metrics[name]}, expected {value}")
        if not metrics["grad_norm"] > 0:
            raise WrongAnswer(f"grad_norm is {metrics['grad_norm']}, expected more than 0")
        liger = "liger" in causal_lm(trainer.policy).model.norm.forward.__module__  # which exchanges no class
        return {"sampled_tokens": trainer.engine.sampled, "liger": liger}  # type: ignore[attr-defined]

    return Contender(preset, run, check), steps


@pytest.fixture(scope="module")
def trainer(request: pytest.FixtureRequest, device: torch.device) -> Iterator[tuple[Load, Trainer]]:
    load = LOADS[workload_set(request.config)]
    made = make_trainer(load, device)
    release_memory(device)
    gc.freeze()  # as the program does
    yield load, made
    gc.unfreeze()
    del made
    release_memory(device)


@pytest.fixture(scope="module")
def laps(
    trainer: tuple[Load, Trainer], device: torch.device, budget: Budget
) -> dict[str, tuple[Lap, dict[str, float]]]:
    """Each preset's lap, and the medians of its stages."""
    steppers = [stepper(*trainer, preset) for preset in CREDITED]
    laps, result = race([contender for contender, _ in steppers], device=device, budget=budget), {}
    for contender, steps in steppers:
        lap = laps[contender.name]
        timed = steps[-max(len(lap.seconds), 1) :]
        stages = {f"{stage}_seconds": statistics.median(step[f"time/{stage}"] for step in timed) for stage in STAGES}
        stages["credit_rows"] = statistics.median(step["credit/tokens_fed"] for step in timed)
        stages["credit_ms_per_1000_rows"] = stages["credit_seconds"] / stages["credit_rows"] * 1e6
        result[contender.name] = lap, stages
    return result


@pytest.mark.benchmark(timer=replay_clock)
@pytest.mark.parametrize("preset", CREDITED)
def test_step_time_by_stages(
    trainer: tuple[Load, Trainer], laps: dict[str, tuple[Lap, dict[str, float]]], preset: str, figures: Figures,
    report: Callable[..., None],
) -> None:  # fmt: skip
    load, made = trainer
    group, (lap, stages) = f"trainer step, {load.model}", laps[preset]
    figures.workloads[group] = dataclasses.asdict(load) | {"notes": made.engine.notes, "seed": SEED}
    print(preset, ", ".join(f"{name} {value:.3f}" for name, value in stages.items()), *made.engine.notes, sep="\n")
    report(lap, group=group, **stages)


def test_where_decoding_takes_its_time(trainer: tuple[Load, Trainer], device: torch.device, figures: Figures) -> None:
    load, made = trainer
    keys = [(SEED, i, g) for i in range(load.problems) for g in range(load.group)]
    tokens = min(load.longest, 64)
    sample = functools.partial(
        made.engine.engine, [made.prompts[key[-2]] for key in keys], keys=keys, max_completion_length=tokens,  # type: ignore[attr-defined]
        temperature=made.config.temperature, top_p=made.config.top_p,
    )  # fmt: skip
    for _ in range(2):
        sample()
    lap = race([Contender(OURS, sample, lambda _: None)], device=device, budget=Budget(0.0, 3, 3))[OURS]
    result = summarize(device_events(sample, device), lap.median)
    figures.profiles.append({"group": f"decoding, {load.model}", "name": OURS, "tokens": tokens, **result})
    print(f"{tokens} tokens of {len(keys)} rows: {lap.median:.3f} s, the device idle for {result['idle_share']:.0%}")
    for line in result["kernels"][:12]:
        print(f"  {line['seconds']:.4f} s, {line['launches']} launches: {line['name'][:90]}")
    assert result["launches"] > 0
