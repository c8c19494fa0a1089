"""trainer/step.py."""

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from cfa_kernels import Credit
from cfa_kernels.hf.liger import fused_modules
from cfa_kernels.hf.memory import run_in_memory
from cfa_kernels.hf.model import causal_lm
from cfa_kernels.scoring.training_forward import PackedLoss
from trainer.config import TrainConfig
from trainer.data import Row
from trainer.experimental.compare_and_correct import compare_and_correct, keep_edited
from trainer.microbatch import (
    MicroBatch,
    Pass,
    assign_credit,
    checked_sampling_gap,
    credit_of_batch,
    fetched,
    micro_batches,
    on_host,
    rollouts_on_host,
)
from trainer.model import Reference
from trainer.report.metrics import Averages, Step, length_metrics, reward_metrics
from trainer.rewards import Reward, compute_rewards, group_advantages
from trainer.rollouts.sampling import Rollouts, generate


@dataclass
class Trainer:
    """What a step needs, set up once."""

    config: TrainConfig
    policy: nn.Module
    tokenizer: PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    reference: Reference | None
    rewards: dict[str, Reward]
    rows: list[Row]
    prompts: list[list[int]]
    held_out: list[Row]
    held_out_prompts: list[list[int]]


def training_step(trainer: Trainer, step: int, problems: Sequence[int]) -> Step:
    """One step on some problems, by index: B = problems x num_generations completions, T tokens at most."""
    config, started = trainer.config, time.perf_counter()
    samples = [(i, g) for i in problems for g in range(config.num_generations)]
    keys = [(config.seed, step, i, g) for i, g in samples]
    with fused_modules(causal_lm(trainer.policy)):
        rollouts = generate(
            trainer.policy,
            trainer.tokenizer,
            [trainer.prompts[i] for i, _ in samples],
            max_completion_length=config.max_completion_length,
            keys=keys,
            temperature=config.temperature,
            top_p=config.top_p,
        )
    generated = time.perf_counter()

    batch_rows = [trainer.rows[i] for i, _ in samples]
    columns = {name: [row[name] for row in batch_rows] for name in batch_rows[0]}
    rewards, by_function = compute_rewards(
        trainer.rewards, columns["question"], rollouts.texts, rollouts.ids(), columns
    )  # (B,)
    corrections, shaped, edits, began = None, rewards, None, time.perf_counter()
    if config.compare_and_correct:
        corrections = compare_and_correct(
            trainer.policy, trainer.tokenizer, trainer.rewards, config, rollouts, rewards, columns, keys
        )
        shaped, edits = corrections.rewards, corrections.edits  # (B,), (B, T)
    correcting = time.perf_counter() - began
    advantages = group_advantages(shaped, config.num_generations, config.scale_rewards)  # (B,)
    advantages = advantages.to(rollouts.completion_ids.device)
    mask = rollouts.completion_mask  # (B, T)
    if config.mask_truncated_completions:
        mask = mask * ~rollouts.truncated[:, None]

    credit, losses = update(trainer, step, rollouts, mask, advantages, edits=edits, rewards=shaped)
    finished = time.perf_counter()
    metrics = {
        **reward_metrics(rewards, by_function, config.num_generations),
        **length_metrics(rollouts),
        **losses,
        **credit.metrics(mask.cpu()),
        "step_time": finished - started,
        "time/generate": generated - started,
        "time/update": finished - generated - losses["time/credit"],
    }
    if corrections is not None:
        metrics |= corrections.metrics | {"time/correct": correcting}
        metrics["time/update"] -= correcting
    return Step(metrics, [i for i, _ in samples], rollouts, rewards, advantages, credit, corrections)


def update(
    trainer: Trainer,
    step: int,
    rollouts: Rollouts,
    mask: Tensor,
    advantages: Tensor,
    weights: Tensor | None = None,
    edits: Tensor | None = None,
    rewards: Tensor | None = None,
) -> tuple[Credit, dict[str, float]]:
    """`num_iterations` optimizer steps on one batch of rollouts; `mask` is (B, T), `advantages` (B,).

    `weights` (B, T) take the place of credit; `edits` (B, T) multiply the weights that credit assigns;
    credit that compares completions reads `rewards` (B,).

    Each micro-batch is one packed forward: its log-probs, from its keys and values the scores of masked spans, then
    its loss with the weights that follow. One that the device has no memory for starts again in halves of whole groups,
    as long as its backward has not begun. Rows without advantage are left out where that changes nothing (no KL
    term, totals given): their tokens still count in the denominators. Raises `FloatingPointError` for a log-prob or
    gradient that is not finite, and for log-probs that are not those the batch was sampled with.
    """
    config, policy = trainer.config, trainer.policy
    rollouts, mask, advantages = rollouts_on_host(rollouts), mask.cpu(), advantages.cpu()
    parameters = [p for p in policy.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    policy.train()
    parts = micro_batches(config, rollouts, mask, advantages, policy, weights, rewards)
    if trainer.reference is not None:
        with trainer.reference.model() as reference:
            references = [micro.logprobs(reference, config) for micro in parts]
        rows = iter(on_host([row for part in references for row in part]))
        for micro in parts:
            micro.ref_logprobs = [next(rows) for _ in micro.completions]
    metrics, credits, credit_time = Averages(), list[tuple[MicroBatch, Credit]](), 0.0
    count, continues = len(parts), config.counterfactual().continues

    def forward_and_loss(micro: MicroBatch) -> tuple[MicroBatch, PackedLoss]:
        """All of a micro-batch before its backward, which may start again in halves."""
        nonlocal credit_time
        forward = micro.forward(policy, config, keep_states=micro.weights is None and continues)
        if micro.weights is None:
            began = time.perf_counter()
            credit = assign_credit(
                micro, policy, forward, rollouts, mask, config, tokenizer=trainer.tokenizer, generator=generator
            )
            if edits is not None:
                credit = keep_edited(micro, credit, edits, config)
            credits.append((micro, credit))
            credit_time += time.perf_counter() - began
        return micro, forward.policy_loss(
            micro.loss_batch(config),
            config.temperature,
            compute_entropy=True,
            epsilon=config.epsilon,
            epsilon_high=config.epsilon_high,
            delta=config.delta,
            beta=config.beta,
            loss_type=config.loss_type,
            importance_sampling_level=config.importance_sampling_level,
            num_items_in_batch=int(mask.sum()),
            num_sequences_in_batch=len(mask),
            max_completion_length=config.max_completion_length,
            validate=False,
        )

    for iteration in range(config.num_iterations):
        first = iteration == 0  # the policy is the one that sampled
        trainer.optimizer.zero_grad()  # to None: without a micro-batch the optimizer step below changes nothing
        passes, norm = list[Pass](), torch.zeros(())  # what each micro-batch gave; the norm of all gradients so far
        fitted = list[MicroBatch]()  # those of `parts`, cut where the device had no memory for them
        for micro, (loss, measured, logprobs) in run_in_memory(
            parts, forward_and_loss, lambda micro: micro.halved(config.num_generations)
        ):
            if config.loss_type == "bnpo":  # the one type that normalises by its own micro-batch
                loss = loss * (micro.share / count)
            loss.backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            passes.append(Pass(loss.detach(), norm, measured, logprobs))
            fitted.append(micro)
        parts = fitted
        # The one look at the device, before any weight changes: the passes queue up on it without a wait.
        loss_sum = 0.0
        for micro, done in zip(parts, fetched(passes), strict=True):
            micro.require_finite_logprobs(done.logprobs)
            micro.require_finite_gradient(done.norm, policy)
            if first:
                micro.old_logprobs = done.logprobs
                metrics.add(micro.sampling_metrics(done.logprobs), micro.tokens)
            metrics.add(done.metrics, micro.tokens)
            loss_sum += done.loss.item()
        if first and parts:
            metrics.add({"sampling/gap": checked_sampling_gap(parts, policy, config)})
        torch.nn.utils.clip_grads_with_norm_(parameters, config.max_grad_norm, norm)
        trainer.optimizer.step()
        metrics.add({"loss": loss_sum, "grad_norm": done.norm if passes else norm})
    policy.eval()
    rate = float(trainer.scheduler.get_last_lr()[0])
    trainer.scheduler.step()
    credit_of_all = credit_of_batch(mask.shape, credits)
    return credit_of_all, {**metrics.values(), "learning_rate": rate, "time/credit": credit_time}


def problem_batches(problems: int, per_step: int, seed: int) -> Iterator[list[int]]:
    """Endless batches of problem numbers: shuffled passes over all, run together."""
    rng = random.Random(seed)
    order = itertools.chain.from_iterable(rng.sample(range(problems), problems) for _ in itertools.count())
    while True:
        yield list(itertools.islice(order, per_step))
