"""The embedded model, set up small: settings, samples and runs that several tests use."""

import copy
import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from cfa_kernels import Batch, Credit, Importances
from tests.support.runs import config
from trainer.checkpoints import open_run
from trainer.config import TrainConfig
from trainer.metrics import StageTimes
from trainer.rewards.calls import group_advantages
from trainer.rollouts.engine import Rollouts
from trainer.rollouts.in_process import TransformersEngine
from trainer.run import set_up, train
from trainer.state import Shaped, Trainer
from trainer.step import update, update_batch

SMALL = [
    "--device=cpu", "--train_problems=16", "--eval_problems=8", "--generation_batch_size=16", "--max_steps=2",
]  # fmt: skip


def settings(*argv: str) -> TrainConfig:
    """Check flags as the program does, the same ones once: to parse them takes longer than a step of the model."""
    return copy.copy(_checked(*argv))


@functools.cache
def _checked(*argv: str) -> TrainConfig:
    return config(*SMALL, *argv)


def run(folder: Path, *argv: str) -> Path:
    trainer = set_up(settings("--output_dir", str(folder), *argv))
    with open_run(trainer.config) as opened:
        return train(trainer, opened)


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def samples_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text("utf-8").splitlines()]


def sample(trainer: Trainer, problems: list[int], **options) -> Rollouts:
    pairs = [(i, g) for i in problems for g in range(8)]
    options = {"max_completion_length": 80, "keys": [(0, 1, i, g) for i, g in pairs]} | options
    engine = TransformersEngine(trainer.policy, trainer.tokenizer)
    return engine([trainer.prompts[i] for i, _ in pairs], **options)


def advantages_of(rollouts: Rollouts) -> torch.Tensor:
    """Made-up rewards of four groups: two mixed, one all wrong, one all right."""
    rewards = torch.tensor([1.0, 0, 0, 0, 0, 1, 0, 0] + [0.0] * 8 + [1.0] * 8 + [1.0, 1, 1, 0, 1, 1, 1, 1])
    return group_advantages(rewards, 8)[: len(rollouts.texts)]


def updated(
    trainer: Trainer, rollouts: Rollouts, advantages: torch.Tensor | None = None,
    edits: list[torch.Tensor] | None = None, rewards: torch.Tensor | None = None,
) -> tuple[Credit, dict[str, float]]:  # fmt: skip
    """The first step's update on rollouts: by made-up advantages, all counted, rewards of 0, unless told."""
    batch = all_counted(rollouts, advantages, edits, rewards)
    credit, _, metrics = update(trainer, 1, rollouts, batch, StageTimes())
    return credit, metrics


def all_counted(
    rollouts: Rollouts, advantages: torch.Tensor | None = None, edits: list[torch.Tensor] | None = None,
    rewards: torch.Tensor | None = None,
) -> Batch:  # fmt: skip
    """Rollouts of which the loss counts all, by made-up advantages and rewards of 0 unless told."""
    advantages = advantages_of(rollouts) if advantages is None else advantages
    rewards = torch.zeros(len(rollouts.texts)) if rewards is None else rewards
    return update_batch(settings("--no_mask_truncated_completions"), rollouts, advantages, Shaped(rewards, edits))


def padded_logprobs(model: torch.nn.Module, rollouts: Rollouts, dtype: torch.dtype | None = None):
    """Log-probs (B, T) by the model's own forward over padded rows, in `dtype`, and the mask of completions."""
    prompts, completions = rollouts.rows.prompts, rollouts.rows.completions
    ids = [pad_sequence(rows, True, 0, side) for rows, side in ((prompts, "left"), (completions, "right"))]
    masks = [
        pad_sequence([torch.ones_like(row) for row in rows], True, 0, side)
        for rows, side in ((prompts, "left"), (completions, "right"))
    ]
    logits = model(input_ids=torch.cat(ids, 1), attention_mask=torch.cat(masks, 1)).logits
    logprobs = logits[:, ids[0].shape[1] - 1 : -1].to(dtype).log_softmax(-1)
    return logprobs.gather(2, ids[1][..., None]).squeeze(2), masks[1]


def reward_every_other(completions, **_):
    return [i % 2 for i in range(len(completions))]


def even(completions, **_):
    """1 for texts whose characters add up to an even number: completions and corrections are often either."""
    return [float(sum(map(ord, text)) % 2 == 0) for text in completions]


EVERY_OTHER = f"--reward_funcs={__name__}:reward_every_other"
EVEN = f"--reward_funcs={__name__}:even"


def beside_its_group(model: Any, batch: Any) -> Importances:
    """Importances by how much shorter a completion is than the longest of its group, and than the batch's mean."""
    lengths = torch.tensor(batch.rows.lengths).float()
    longest = [lengths[batch.groups == group].max() for group in batch.groups]
    return Importances(
        [
            torch.arange(len(units)) * (longest[b] - lengths[b] + 1) / lengths.mean()
            for b, units in enumerate(batch.units)
        ]
    )


COMPARING = {
    "top of entropies": ["--estimator=entropy"],
    "a function": [
        f"--estimator={__name__}:beside_its_group", "--weights=identity", "--units=tokens",
    ],
}  # fmt: skip
