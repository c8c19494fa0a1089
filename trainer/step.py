"""Train one step: sample, reward, compare within groups, assign credit, update.

For problem x with completions y_1 .. y_G, tokens t and the policy p, which sampled as q:
    y_b ~ q(. | x)                                                                            `sample`
    r_b = sum over reward functions f of weight_f f(x, y_b)                                   `compute_rewards`
    A_b = (r_b - mean of r) / (standard deviation of r + 1e-4), over the group                `group_advantages`
    w_bt = a rule's weight for the drop of log p(answer of y_b) when t's span is masked       `DeferredCredit`
    L = - sum_bt w_bt min(u_bt A_b, clip(u_bt, 1 - eps, 1 + eps_high) A_b) / N,  u = p / q    `Objective`
    p <- AdamW(p, gradient of L cut to max_grad_norm), num_iterations times                   `update`
`training_step` is a step from top to bottom. N is DAPO's number of tokens of the batch that the loss counts.

A micro-batch is one packed forward and backward, of whole groups, so that a prompt is fed once; rows that cannot change
the update are omitted.
"""

import contextlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, count, groupby, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from cfa_kernels import (
    Batch,
    BatchKeys,
    Credit,
    DeferredCredit,
    Rows,
    packed_forward,
    packed_logprobs,
    packed_policy_loss,
)
from cfa_kernels.credit.nothing import Nothing, why_nothing
from cfa_kernels.credit.presets import NONE
from cfa_kernels.loss.ragged import LossBatch
from cfa_kernels.model.limits import default_token_budget
from cfa_kernels.model.memory import run_in_memory
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.model.run_inside import is_sharded, run_inside
from cfa_kernels.model.sharded.fsdp import is_piece
from cfa_kernels.tree.packs import groups_within

from . import processes
from .config import TrainConfig
from .metrics import (
    Averages,
    StageTimes,
    check_sampling_gap,
    length_metrics,
    require_finite,
    reward_metrics,
)
from .rewards.calls import RewardError, group_advantages
from .rollouts.engine import Rollouts
from .state import Samples, Shaped, Step, Trainer, joined

MicroBatch = list[int]
"""Rows of one forward and backward, by their places in the batch; none where a process only runs as others do."""

ByRow = dict[int, Tensor]
"""Tensors (t,) by the number of their completion in the batch."""


def training_step(trainer: Trainer, step: int, problems: Sequence[int]) -> Step:
    """Train one step on some problems, by number: B = problems x num_generations completions."""
    config = trainer.config
    times = StageTimes(config.precision.device)
    keys = sample_keys(config, step, problems)
    with times.during("generate"):
        rollouts = trainer.sample(keys)

    rows = [trainer.rows[key[-2]] for key in keys]
    names = [f"sample {b} ({row.where})" for b, row in enumerate(rows)]
    own = trainer.reward(rows, rollouts, names, keys)
    samples: Samples = joined(processes.gather(own))  # what each process sampled, on each
    rollouts = samples.rollouts
    shaped = Shaped(samples.rewards)  # rewards (B,), edits B tensors (T_b,)
    if trainer.shape is not None:
        with times.during("correct"):
            shaped = trainer.shape(trainer, samples, shaped)
    advantages = group_advantages(shaped.rewards, config.num_generations, config.scale_rewards)  # (B,)
    batch = update_batch(config, rollouts, advantages, shaped)

    with times.during("update"):
        credit, nothing, losses = update(trainer, step, rollouts, batch, times)
    logged = Averages()
    for name, value in samples.logged:  # by reward functions
        logged.add({name: value})
    metrics = {
        **reward_metrics(samples.rewards, samples.by_function, config.num_generations),
        **length_metrics(rollouts), **losses, **credit.metrics(batch.mask), **shaped.metrics, **times.metrics(),
    }  # fmt: skip
    if taken := sorted({"step", *metrics} & {name for name, _ in samples.logged}):
        raise RewardError(f"log_metric: {taken} are names of the run; name yours otherwise, as mine/{taken[0]}")
    metrics = {**logged.values(), **metrics}
    if config.credit_name == NONE:
        metrics = {name: value for name, value in metrics.items() if not name.startswith(("credit/", "time/credit"))}
    notes = {b: {**shaped.notes.get(b, {}), "logged": row} for b, row in enumerate(samples.extra) if row}
    return Step(metrics, samples, advantages, credit, {**shaped.notes, **notes}, nothing)


def sample_keys(config: TrainConfig, step: int, problems: Sequence[int]) -> list[tuple[int, ...]]:
    """Give each completion of this process's groups the key that it is drawn with.

    A problem that comes again, as there are fewer than the step has groups, has other keys then.
    """
    groups = processes.own_share([(i, problems[:at].count(i)) for at, i in enumerate(problems)])
    size = config.num_generations
    return [(config.seed, step, i, nth * size + g) for i, nth in groups for g in range(size)]


def update_batch(config: TrainConfig, rollouts: Rollouts, advantages: Tensor, shaped: Shaped) -> Batch:
    """Make the columns of an update: the loss counts no truncated completion with `mask_truncated_completions`.

    Nor does it count the tokens that an environment wrote.
    Edits of `shaped` multiply the weights, and credit that compares completions reads its rewards (B,).
    """
    own = rollouts.mask or [torch.ones(length) for length in rollouts.rows.lengths]
    counted = ~(rollouts.truncated & config.mask_truncated_completions)  # (B,)
    return Batch(
        rollouts.rows, advantages=advantages, rewards=shaped.rewards, weights=shaped.edits,
        groups=torch.arange(len(counted)) // config.num_generations,
        mask=[counts & row.bool() for counts, row in zip(counted, own, strict=True)],
        sampling_logprobs=rollouts.logprobs, kept_tokens=rollouts.kept_tokens,
    )  # fmt: skip


def update(
    trainer: Trainer, step: int, rollouts: Rollouts, batch: Batch, times: StageTimes
) -> tuple[Credit, Nothing | None, dict[str, float]]:
    """Take `num_iterations` optimizer steps on one batch of rollouts; credit time is recorded in `times`.

    Raises `FloatingPointError` for a log-prob or gradient that is not finite, and for log-probs that are not those the
    batch was sampled with.
    """
    config, policy, metrics = trainer.config, trainer.policy, Averages()
    policy.train()
    parts = micro_batches(config, batch, policy)
    if is_sharded(policy):  # all processes must run each layer equally often
        parts += [[]] * (max(processes.gather(len(parts))) - len(parts))
    credit = DeferredCredit(
        config.counterfactual(), trainer.tokenizer, batch, seed=BatchKeys(config.seed).key(step),
        temperature=config.temperature, gather=processes.gather if processes.count() > 1 else None,
    )  # fmt: skip
    if credit.compares_beyond(parts):  # completions that no one micro-batch has all of
        with times.during("credit"), config.precision.autocast():
            credit.by_model(policy, rows=own_rows(config, batch))
    objective = Objective(trainer, batch, credit, times, reference_logprobs(trainer, batch, parts))
    for iteration in range(config.num_iterations):
        passes, norm = backward(trainer, parts, objective)
        parts = [done.micro for done in passes]  # cut where the device had no memory for them
        passes, norm = gather_passes(trainer, passes, norm)
        measure(metrics, trainer, batch, passes, is_sampler=iteration == 0)
        if iteration == 0:
            old = {b: row for done in passes for b, row in zip(done.micro, done.logprobs, strict=True)}
            objective.old.update(dict(enumerate(rollouts.logprobs)) if config.score_centering else old)
            if passes:
                metrics.add({"sampling/gap": check_sampling_gap(old, rollouts, policy, config)})
        torch.nn.utils.clip_grads_with_norm_(trainer.trained.values(), config.max_grad_norm, norm)
        trainer.optimizer.step()
        trainer.engine.weights_changed()
        losses = (done.loss.item() for done in passes)
        metrics.add({"loss": sum(losses, 0.0), "grad_norm": passes[-1].norm if passes else norm})
    policy.eval()
    metrics.add({"learning_rate": trainer.scheduler.get_last_lr()[0]})
    trainer.scheduler.step()
    # Completions in no micro-batch have weight 1.
    together = Credit.joined(batch.rows.lengths, [part for parts in processes.gather(credit.parts) for part in parts])
    return together, why_nothing(credit, together, rollouts.truncated.tolist()), metrics.values()


class Pass(NamedTuple):
    """Results of forward, loss and backward of one micro-batch."""

    micro: MicroBatch
    loss: Tensor  # ()
    metrics: Mapping[str, Tensor]  # ()
    logprobs: list[Tensor]  # b tensors (t,)
    moving: tuple[int, int] = (0, 0)  # tokens with a weight and an advantage, and rows with any: they move the loss
    norm: Tensor = torch.zeros(())  # of the gradients summed so far


@dataclass(frozen=True)
class Objective:
    """Loss of each micro-batch of a batch, and what its first iteration leaves for later ones."""

    trainer: Trainer
    batch: Batch
    credit: DeferredCredit
    times: StageTimes
    reference: ByRow  # log-probs of the reference model; nothing without a KL term
    old: ByRow = field(default_factory=dict)  # log-probs before the first optimizer step

    def __call__(self, micro: MicroBatch) -> Pass:
        """Do all of a micro-batch before its backward, which may start again in halves.

        It is one packed forward: its log-probs, from its keys and values the scores of masked spans, then its loss with
        the weights that follow.
        """
        policy = self.trainer.policy
        with self.trainer.config.precision.autocast():  # of one micro-batch: it keeps the weights that it has cast
            if not micro:  # a loss of 0, by as many forwards as the processes with a micro-batch run
                nothing, token = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
                options: dict[str, Any] = {"advantages": nothing, "mask": [nothing], "num_items_in_batch": 1}
                return Pass(micro, packed_policy_loss(policy, Rows([token], [token]), **options).loss, {}, [])
            return run_inside(policy, lambda: self._launch(micro), trains=True)

    def _launch(self, index: MicroBatch) -> Pass:
        config, credit = self.trainer.config, self.credit
        batch, is_due = self.batch.take(index), credit.is_due(index)
        causal, keeps = causal_lm(self.trainer.policy), is_due and credit.config.continues
        forward = packed_forward(causal, batch.rows, token_budget=config.token_budget, keep_states=keeps)

        @cache
        def plain() -> LossBatch:  # without weights, which the branches give
            options = {
                **config.loss_options, "temperature": config.temperature, "compute_entropy": True, "validate": False,
                "num_items_in_batch": counted_tokens(self.batch, range(len(self.batch))),
                "num_sequences_in_batch": len(self.batch), "weights": None,
            }  # fmt: skip
            for name, column in (("old_logprobs", self.old), ("ref_logprobs", self.reference)):
                options[name] = [column[b] for b in index] if column else None
            return LossBatch.of(batch, **options)

        if is_due:
            forward.meanwhile = plain
            with self.times.during("update" if credit.config.control == "off" else "credit"):
                credit.by_forward(index, forward, queues=True)
        loss, metrics, logprobs = forward.policy_loss(plain().credited(**credit.columns(index)))
        counted = batch.mask or ()
        if not all(one.all() for one in counted):  # the loss needs no log-probs of an environment's tokens
            pairs = zip(logprobs, counted, strict=True)
            logprobs = [torch.where(one.to(row.device), row, 0.0) for row, one in pairs]
        return Pass(index, loss, metrics, logprobs)

    def moving(self, micro: MicroBatch) -> tuple[int, int]:
        """Count the tokens of a micro-batch that move the loss, and its rows; reads credit that is queued."""
        self.credit.read()
        columns = zip(*self.credit.columns(micro).values(), self.batch.take(micro).mask or (), strict=True)
        counts = [int(((row != 0) & (own != 0) & one).sum()) for row, own, one in columns]
        return sum(counts), sum(count > 0 for count in counts)


def measure(metrics: Averages, trainer: Trainer, batch: Batch, passes: Sequence[Pass], *, is_sampler: bool) -> None:
    """Check passes and add what they measured to `metrics`; `is_sampler` if their policy is the one that sampled."""
    config = trainer.config
    for done in passes:
        require_finite(done.micro, done.logprobs, done.norm, trainer.policy)
        tokens, rows = done.moving
        counts = {name: tokens for name in done.metrics if name == "ratio_mean" or "sampling/" in name}
        counts |= {"vespo/phi_seq_mean": rows, "sampling/off_policy_mask/mean": rows}
        if not config.importance_sampling_mode.startswith("token"):
            counts["sampling/importance_sampling_ratio/mean"] = rows
        if config.importance_sampling_level != "token" and config.loss_type != "gmpo":
            counts |= {name: len(done.micro) for name in done.metrics if "clip_ratio" in name}
        own = {name: x for name, x in done.metrics.items() if is_sampler or not name.startswith("sampling/")}
        metrics.add({name: x for name, x in own.items() if not x.isnan()}, counted_tokens(batch, done.micro), counts)


def backward(trainer: Trainer, parts: Sequence[MicroBatch], objective: Objective) -> tuple[list[Pass], Tensor]:
    """Sum the gradients of micro-batches; return their measurements, on the host, and the norm, on the device.

    A micro-batch that the device has no memory for is done in halves of whole groups, as long as its backward has not
    begun. Passes queue up on the device without a wait.
    """
    config, is_shared = trainer.config, is_sharded(trainer.policy)

    def smaller(micro: MicroBatch) -> list[MicroBatch]:
        groups = [list(group) for _, group in groupby(micro, lambda b: b // config.num_generations)]
        middle = -(-len(groups) // 2)
        halves = [[*chain.from_iterable(half)] for half in (groups[:middle], groups[middle:]) if half]
        if is_shared and any(processes.gather(len(halves) > 1)):  # where one has no memory, all come here
            return halves if len(halves) > 1 else [micro, []]
        return halves

    trainer.optimizer.zero_grad()  # to None: without a micro-batch the optimizer step changes nothing
    passes, norm = list[Pass](), torch.zeros(())
    for done in run_in_memory(parts, objective, smaller):
        (done.loss * processes.count() if is_shared else done.loss).backward()  # what shares the model averages its own
        norm = gradient_norm(trainer.trained.values())
        passes.append(done._replace(loss=done.loss.detach(), norm=norm))
    # The one wait for the device in an optimizer step: scores that are queued are there then.
    there = iter(on_host([leaf for leaf in tree_leaves(passes) if isinstance(leaf, Tensor)]))
    passes = tree_map_only(Tensor, lambda _: next(there), passes)
    return [done._replace(moving=objective.moving(done.micro)) if done.micro else done for done in passes], norm


def gather_passes(trainer: Trainer, passes: list[Pass], norm: Tensor) -> tuple[list[Pass], Tensor]:
    """Put together what all processes measured, and sum their gradients where each holds a whole model.

    Returns the passes of all, of which the last has the norm of the sum, and that norm on the device.
    """
    if processes.count() == 1:
        return passes, norm
    together = [done for theirs in processes.gather([one for one in passes if one.micro]) for done in theirs]
    if together and not is_sharded(trainer.policy):
        processes.sum_gradients([*trainer.trained.values()])
        norm = gradient_norm(trainer.trained.values())
    return [*together[:-1], *(last._replace(norm=norm.cpu()) for last in together[-1:])], norm


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Compute the norm of all gradients, also where they are in pieces on several processes; ()."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if is_piece(norm) else norm  # type: ignore[attr-defined]


@torch.no_grad()
def reference_logprobs(trainer: Trainer, batch: Batch, parts: Sequence[MicroBatch]) -> ByRow:
    """Compute log-probs under the reference model; nothing where the loss has no KL term."""
    reference: Any = trainer.reference
    config, rows = trainer.config, dict[int, Tensor]()
    if reference is None:
        return rows
    with reference.disable_adapter() if config.use_peft else contextlib.nullcontext(), config.precision.autocast():
        for part in parts:
            own = batch.take(part)
            values: Any = packed_logprobs(
                reference, own.rows, kept_tokens=own.kept_tokens, temperature=config.temperature,
                token_budget=config.token_budget,
            )  # fmt: skip
            rows |= zip(part, values, strict=True)
    return dict(zip(rows, on_host([*rows.values()]), strict=True))


def counted_tokens(batch: Batch, rows: Iterable[int]) -> int:
    """Count the tokens of some rows that the loss counts."""
    assert batch.mask is not None
    return sum(int(batch.mask[b].sum()) for b in rows)


def own_rows(config: TrainConfig, batch: Batch) -> list[int]:
    """List the rows of this process's groups, by their places in the batch."""
    size = config.num_generations
    return [start + g for start in processes.own_share(range(0, len(batch), size)) for g in range(size)]


def micro_batches(config: TrainConfig, batch: Batch, policy: nn.Module) -> list[MicroBatch]:
    """Cut a batch into micro-batches of whole groups, as many as fit `token_budget`, at least one.

    Each process gets those of its own groups, perhaps none. Rows that the loss does not count are dropped, and rows
    without advantage too, unless the KL term needs them.
    """
    budget = config.token_budget or default_token_budget(causal_lm(policy), training=True)
    groups, sizes = list[list[int]](), list[int]()
    for _, places in groupby(own_rows(config, batch), lambda b: b // config.num_generations):
        if group := [
            b for b in places if counted_tokens(batch, [b]) and (config.beta != 0 or batch.advantages[b] != 0)
        ]:
            groups.append(group)
            sizes.append(len(batch.rows.prompts[group[0]]) + sum(batch.rows.lengths[b] for b in group))
    return [[b for i in part for b in groups[i]] for part in groups_within(sizes, budget)]


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Bring floating tensors, detached, to the host by one copy."""
    if not tensors:
        return []
    flat = torch.cat([tensor.detach().reshape(-1).to(tensors[0].device) for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]


def problem_batches(problems: int, per_step: int, seed: int) -> Iterator[list[int]]:
    """Yield endless batches of problem numbers: shuffled passes over all, run together."""
    rng = random.Random(seed)
    order = chain.from_iterable(rng.sample(range(problems), problems) for _ in count())
    while True:
        yield list(islice(order, per_step))
