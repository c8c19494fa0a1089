"""Set the training program up for steps that are timed by its own stages, sampling included.

A model of random weights never ends a completion. So every completion is decoded to the length of the longest, and
recorded ones of the mean length, with answers and spans that the program finds, stand in for what was sampled.
"""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import get_scheduler

from benchmarks.harness.race import WrongAnswer
from benchmarks.harness.workloads import SEED, JobRollouts, policy, shaped_rollouts, tokenizer
from cfa_kernels.model.parts import causal_lm
from trainer.config import TrainConfig
from trainer.data import Row
from trainer.rollouts.engine import Rollouts
from trainer.rollouts.in_process import TransformersEngine
from trainer.state import Trainer
from trainer.step import training_step

PRESETS_RACED: dict[str, tuple[str, dict[str, Any]]] = {
    "off": ("none", {}),
    "cf": ("cf", {}),
    "cf, merged": ("cf", {"estimator.merge_adapters": True}),
    "cf, 3 nearest spans": ("cf", {"spans.max_spans": 3, "spans.selection": "nearest"}),
    "prefix_gain_positive": ("prefix_gain_positive", {}),
}
"""Credit of the raced steps: a preset, with more options of credit by path."""

SHARPNESS = 6.0  # factor of the logits, so that nuclei are as narrow as a trained model's


@dataclasses.dataclass(frozen=True)
class Load:
    """A model, and the shape of a step; completions have `spans` spans, in turn."""

    model: str
    problems: int
    group: int
    prompt: int
    completion: int
    spans: tuple[int, ...]

    def rollouts(self) -> JobRollouts:
        """Random words with an expression in each span and a number behind the marker."""
        rollouts = shaped_rollouts(
            self.problems, group=self.group, prompt=self.prompt, completion=self.completion - 1, spans=max(self.spans)
        )
        job = rollouts.job
        expression, number = (torch.tensor(job.tokenizer.encode(text)) for text in (" 3 * 4 = 12,", " 72"))
        end = torch.tensor([job.tokenizer.eos_token_id])
        completions = []
        columns = zip(job.completions, job.spans, job.answers, itertools.cycle(self.spans), strict=False)
        for ids, spans, answer, count in columns:
            for span in spans[len(spans) - count :]:
                ids[span.start : span.start + len(expression)] = expression
            completions.append(torch.cat([ids[: answer.start], number, end]))
        return dataclasses.replace(rollouts, job=dataclasses.replace(job, completions=completions))


LOADS = {
    "smoke": {
        "six spans": Load("qwen3-tiny", 2, 2, 20, 80, (4,)),
        "GSM8K's spans": Load("qwen3-tiny", 2, 2, 20, 60, (3, 3, 2, 2)),
        "long answers": Load("qwen3-tiny", 1, 2, 20, 120, (5,)),
    },
    "cuda": {
        "six spans": Load("Qwen3-1.7B", 8, 8, 110, 220, (6,)),
        "GSM8K's spans": Load("Qwen3-1.7B", 8, 8, 110, 140, (4, 4, 4, 4, 4, 4, 3, 3)),
        "long answers": Load("Qwen3-1.7B", 2, 8, 110, 2000, (10,)),
    },
}  # fmt: skip
"""By name. GSM8K's solutions have 138 tokens and 3.7 spans in the mean."""


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
    config = TrainConfig(
        device=str(device), generation_batch_size=load.problems * load.group, num_generations=load.group, seed=SEED,
        max_sampling_gap=1e9,  # recorded completions were not sampled
    )  # fmt: skip
    model = policy(load.model, lora=True, device=device, dtype=config.precision.weights).eval()
    causal = causal_lm(model)
    with torch.no_grad():
        causal.model.norm.weight.mul_(SHARPNESS)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=config.learning_rate, weight_decay=0.0,
        fused=device.type == "cuda" or None,
    )  # fmt: skip
    return Trainer(
        config, model, tokenizer(), TransformersEngine(model, tokenizer()), optimizer,
        get_scheduler(config.lr_scheduler_type, optimizer, 0, config.max_steps), None, {}, [], [], [], [],
        lambda **_: [],
    )  # fmt: skip


def steppers(load: Load, trainer: Trainer, engine: Any, longest: int) -> dict[str, Callable[[], dict[str, float]]]:
    """Make a step of a load for each kind of credit, which returns its metrics.

    `longest` tokens are sampled for every completion by `engine`, that of a trainer just made. A step raises
    `WrongAnswer` where the metrics are not those of such a step.
    """
    rollouts, number = load.rollouts(), itertools.count(1)
    places = range(0, load.problems * load.group, load.group)
    loaded: dict[str, Any] = {
        "engine": Recorded(engine, rollouts), "prompts": [rollouts.job.prompts[i].tolist() for i in places],
        "rows": [Row({"question": "", "answer": "72"})] * load.problems,
        "rewards": {"forced": lambda completions, **_: rollouts.rewards.tolist()},
    }  # fmt: skip

    def run(config: TrainConfig) -> dict[str, float]:
        vars(trainer).update(loaded, config=config)
        metrics = training_step(trainer, next(number), range(load.problems)).metrics
        expected: dict[str, float] = {"completions/mean_length": load.completion}
        if config.credit != "none":
            most = config.credit_options.get("spans.max_spans", max(load.spans))
            expected["credit/spans_mean"] = statistics.fmean(min(count, most) for count in load.spans)
        for name, value in expected.items():
            if metrics[name] != value:
                raise WrongAnswer(f"{name} is {metrics[name]}, expected {value}")
        if not metrics["grad_norm"] > 0:
            raise WrongAnswer(f"grad_norm is {metrics['grad_norm']}, expected more than 0")
        return metrics

    made = {}
    for name, (preset, options) in PRESETS_RACED.items():
        config = dataclasses.replace(
            trainer.config, generation_batch_size=load.problems * load.group, num_generations=load.group,
            max_completion_length=longest, credit=preset, credit_options=options,
        )  # fmt: skip
        made[name] = functools.partial(run, config)
    return made
