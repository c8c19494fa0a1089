"""Set the training program up for steps that are timed by its own stages, sampling included.

A model of random weights never ends a completion. So every completion is decoded to the length of the longest, and
recorded ones of the mean length, with answers and spans that the program finds, stand in for what was sampled.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import yaml
from transformers import get_scheduler

from benchmarks.harness.race import WrongAnswer
from benchmarks.harness.workloads import SEED, JobRollouts, policy, shaped_rollouts
from cfa_kernels.credit.presets import PRESETS
from cfa_kernels.model.parts import causal_lm
from trainer.config import TrainConfig
from trainer.data import Row
from trainer.rollouts.engine import Rollouts
from trainer.rollouts.in_process import TransformersEngine
from trainer.state import Trainer
from trainer.step import training_step

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


LOADS = {"smoke": Load("qwen3-tiny", 2, 2, 20, 60, 8, 3), "cuda": Load("Qwen3-1.7B", 8, 8, 110, 220, 64, 6)}


class Recorded:
    """The engine of the program, whose completions are exchanged for recorded ones after they have been sampled."""

    def __init__(self, engine: TransformersEngine, rollouts: JobRollouts) -> None:
        self.engine, self.notes, self.weights_changed = engine, engine.notes, engine.weights_changed
        self._rollouts = rollouts

    def __call__(self, prompts: Sequence[Sequence[int]], **options: Any) -> Rollouts:
        """Sample, then return the recorded completions."""
        self.engine(prompts, **options)
        job = self._rollouts.job
        completions, ends = [ids.tolist() for ids in job.completions], [job.tokenizer.eos_token_id]
        return Rollouts.of(prompts, completions, [-torch.ones(len(row)) for row in completions], ends, job.tokenizer)


def make_trainer(load: Load, device: torch.device) -> Trainer:
    """Set the program up around a model of random weights, as `trainer.run.set_up` does around a loaded one."""
    rollouts, count = load.rollouts(), load.problems * load.group
    config = TrainConfig(
        device=str(device), generation_batch_size=count, num_generations=load.group, seed=SEED,
        max_completion_length=load.longest, max_sampling_gap=1e9,  # recorded completions were not sampled
    )  # fmt: skip
    model = policy(load.model, lora=True, device=device, dtype=config.precision.weights).eval()
    causal = causal_lm(model)
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


def stepper(load: Load, trainer: Trainer, preset: str, **options: Any) -> Callable[[], dict[str, float]]:
    """Make a step with a preset's credit and more options, which returns its metrics.

    Raises `WrongAnswer` where they are no step's.
    """
    chosen = yaml.safe_load((PRESETS / f"{preset}.yaml").read_text("utf-8"))
    chosen["credit_options"] = chosen.get("credit_options", {}) | options
    config = dataclasses.replace(trainer.config, **chosen)
    number = itertools.count(1)

    def run() -> dict[str, float]:
        trainer.config = config
        metrics = training_step(trainer, next(number), range(load.problems)).metrics
        expected = {"completions/mean_length": load.completion, "credit/spans_mean": load.spans}
        for name, value in expected.items():
            if metrics[name] != value:
                raise WrongAnswer(f"{name} is {metrics[name]}, expected {value}")
        if not metrics["grad_norm"] > 0:
            raise WrongAnswer(f"grad_norm is {metrics['grad_norm']}, expected more than 0")
        return metrics

    return run
