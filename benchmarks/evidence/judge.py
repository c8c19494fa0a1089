"""Judge the same completions by several estimators, in records that `python -m trainer.analyze` reads.

Groups are sampled as a training step samples them, and every estimator is asked about them; nothing is trained.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from cfa_kernels import CounterfactualConfig
from cfa_kernels.estimators.masking import Masking
from cfa_kernels.hf.model import causal_lm
from cfa_kernels.scoring.training_forward import PackedForward, packed_forward
from trainer.analyze.records import Record, completion_record, judged_spans, rounded, token_credit
from trainer.cli import parse
from trainer.config import PRESETS, TrainConfig
from trainer.microbatch import UpdateBatch, batch_credit, micro_batches, to_host
from trainer.rewards import group_advantages
from trainer.state import Shaped, Trainer
from trainer.step import draw, rewarded

NAMES = ("cf", "oar_p", "oar_g", "prefix_gain", "entropy_80_20", "prefix_tree")


def judge(trainer: Trainer, problems: int, presets: Sequence[str], flags: Sequence[str] = ()) -> list[Record]:
    """Sample completions of the first `problems` training problems and judge them, as `read_samples` reads them.

    Args:
        trainer: set up; its policy is not changed.
        problems: how many.
        presets: names of settings that ship with the program.
        flags: further flags of the training program; they win over the presets.

    Returns:
        A record for each completion that has an advantage: tokens, reward, advantage, answer, masked spans with drops,
        weights (or advantages) by each estimator, and the norm of each token's gradient at the last hidden state.

    Raises:
        ValueError: no group has completions of different rewards, or more problems than there are.
    """
    config = trainer.config
    if problems > len(trainer.rows):
        raise ValueError(f"problems must be at most the {len(trainer.rows)} there are, got {problems}")
    keys = [(config.seed, 0, i, g) for i in range(problems) for g in range(config.num_generations)]
    batch = rewarded(trainer, keys, draw(trainer, keys))
    rollouts, rewards = to_host(batch.rollouts), batch.rewards
    advantages = group_advantages(rewards, config.num_generations, config.scale_rewards)
    settings = {
        name: parse(TrainConfig, ["--config", str(PRESETS / f"{name}.yaml"), *flags], prog="", description="")
        for name in presets
    }
    inputs = UpdateBatch.of(rollouts, rollouts.completion_mask, advantages)
    parts = micro_batches(config, inputs, trainer.policy)
    if not parts:
        raise ValueError(f"problems: in none of {problems} groups do rewards differ, so nothing has an advantage")
    samples: dict[int, Record] = {}
    for micro in parts:
        rows = inputs.rows.take(micro.index)
        forward = packed_forward(causal_lm(trainer.policy), rows, token_budget=config.token_budget, keep_states=True)
        norms = gradient_norms(forward, config.temperature)
        for i, b in enumerate(rows.index):
            samples[b] = completion_record(
                rollouts, b, trainer.tokenizer, problem=b // config.num_generations, reward=rewards[b].item(),
                advantage=advantages[b].item(),
            ) | {"gradient_norms": rounded(norms[i].tolist()), "estimators": {}}  # fmt: skip
        for name, setting in settings.items():
            deferred = batch_credit(setting, trainer.tokenizer, inputs.rows, advantages, Shaped(rewards))
            deferred.by_forward(rows.index, forward)
            ((_, credit),) = deferred.parts
            library = setting.counterfactual()
            for i, b in enumerate(rows.index):
                ids = rows.completions[i].tolist()
                samples[b]["estimators"][name] = token_credit(credit, i)
                if "spans" not in samples[b] and _masks_spans(library):
                    samples[b] |= judged_spans(credit, i, ids, trainer.tokenizer, library)
    return [samples[b] for b in sorted(samples)]


def gradient_norms(forward: PackedForward, temperature: float) -> list[Tensor]:
    """Compute the norm of each token's log-prob gradient at the hidden state that predicts it: b tensors (t,) fp32."""
    head = dataclasses.replace(forward.head, weight=forward.head.weight.detach().float())
    norms = []
    for state, completion in zip(forward.states(), forward.rows.completions, strict=True):
        leaf = state.detach().float().requires_grad_()
        logprobs = head.logprobs(leaf, completion.to(leaf.device), temperature)
        (gradient,) = torch.autograd.grad(logprobs.sum(), leaf)
        norms.append(gradient.norm(dim=1).cpu())
    return norms


def _masks_spans(config: CounterfactualConfig) -> bool:
    """Whether drops are those of spans that were masked exactly, each by itself."""
    estimator = config.estimator
    exact = isinstance(estimator, Masking) and estimator.effect == "direct" and estimator.preselect == 1
    return exact and config.continues and config.units == "spans"
