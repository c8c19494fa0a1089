"""Train one step: sample, reward, compare within groups, assign credit, update.

For problem x with completions y_1 .. y_G, tokens t and the policy p, which sampled as q:
    y_b ~ q(. | x)                                                                            `draw`
    r_b = sum over reward functions f of weight_f f(x, y_b)                                   `rewarded`
    A_b = (r_b - mean of r) / (standard deviation of r + 1e-4), over the group                `group_advantages`
    w_bt = a rule's weight for the drop of log p(answer of y_b) when t's span is masked       `batch_credit`
    L = - sum_bt w_bt min(u_bt A_b, clip(u_bt, 1 - eps, 1 + eps_high) A_b) / N,  u = p / q    `Objective`
    p <- AdamW(p, gradient of L cut to max_grad_norm), num_iterations times                   `update`
`training_step` is a step from top to bottom. N is DAPO's number of tokens of the batch that the loss counts.
"""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cfa_kernels import (
    Batch,
    Credit,
    DeferredCredit,
    Rows,
    packed_forward,
    packed_logprobs,
    packed_policy_loss,
)
from cfa_kernels.credit.nothing import Nothing, why_nothing
from cfa_kernels.model.memory import run_in_memory
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.model.run_inside import is_sharded, run_inside
from cfa_kernels.model.sharded.fsdp import is_piece
from cfa_kernels.scoring.packed import PackedLoss

from . import processes
from .checks import check_sampling_gap, require_finite
from .metrics import Averages, StageTimes, Step, length_metrics, reward_metrics
from .microbatch import (
    ByRow,
    MicroBatch,
    Moving,
    Pass,
    batch_credit,
    by_row,
    counted_tokens,
    fetch,
    gather_credit,
    halved,
    micro_batches,
    on_host,
    own_rows,
    update_batch,
)
from .rewards.advantages import group_advantages
from .rewards.calls import compute_rewards
from .rollouts.engine import Rollouts
from .state import Samples, Shaped, Trainer, arguments

_Launched = tuple[MicroBatch, Moving, PackedLoss]  # its rows, what of them moves the loss, and the loss


def training_step(trainer: Trainer, step: int, problems: Sequence[int]) -> Step:
    """Train one step on some problems, by number: B = problems x num_generations completions."""
    config = trainer.config
    times = StageTimes(config.precision.device)
    keys = [(config.seed, step, i, g) for i in processes.own_share(problems) for g in range(config.num_generations)]
    with times.during("generate"):
        rollouts = draw(trainer, keys)

    samples = Samples.joined(processes.gather(rewarded(trainer, keys, rollouts)))  # what each process sampled, on each
    rollouts = samples.rollouts
    shaped = Shaped(samples.rewards)  # rewards (B,), edits B tensors (T_b,)
    if trainer.shape is not None:
        with times.during("correct"):
            shaped = trainer.shape(trainer, samples)
    advantages = group_advantages(shaped.rewards, config.num_generations, config.scale_rewards)  # (B,)
    batch = update_batch(config, rollouts, advantages, shaped)

    with times.during("update"):
        credit, nothing, losses = update(trainer, step, rollouts, batch, times)
    metrics = {
        **reward_metrics(samples.rewards, samples.by_function, config.num_generations),
        **length_metrics(rollouts),
        **losses,
        **credit.metrics(batch.mask),
        **shaped.metrics,
        **times.metrics(),
    }
    return Step(metrics, samples, advantages, credit, shaped.notes, nothing)


def draw(trainer: Trainer, keys: Sequence[tuple[int, ...]]) -> Rollouts:
    """Sample a completion for each key, whose last but one integer is the number of the problem."""
    with processes.whole_weights(trainer.policy):
        return trainer.sample([trainer.prompts[key[-2]] for key in keys], keys)


def rewarded(trainer: Trainer, keys: Sequence[tuple[int, ...]], rollouts: Rollouts) -> Samples:
    """Put completions together with their rewards."""
    rows = [trainer.rows[key[-2]] for key in keys]
    names = [f"sample {b} ({row.where})" for b, row in enumerate(rows)]
    weights = trainer.config.reward_weights
    return Samples(
        keys, rows, rollouts, *compute_rewards(trainer.rewards, arguments(rows, rollouts), weights=weights, names=names)
    )


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
    credit = batch_credit(config, trainer.tokenizer, batch, step=step)
    if credit.compares_beyond(parts):  # completions that no one micro-batch has all of
        with times.during("credit"), config.precision.autocast():
            credit.by_model(policy, rows=own_rows(config, batch))
    objective = Objective(trainer, batch, credit, times, reference_logprobs(trainer, batch, parts))
    for iteration in range(config.num_iterations):
        passes, norm = backward(trainer, parts, objective)
        parts = [done.micro for done in passes]  # cut where the device had no memory for them
        passes, norm = gather_passes(trainer, passes, norm)
        measure(metrics, trainer, rollouts, batch, passes, is_sampler=iteration == 0)
        if iteration == 0:
            logprobs = [row for done in passes for row in done.logprobs]
            old = by_row([done.micro for done in passes], logprobs)
            objective.old.update(dict(enumerate(rollouts.logprobs)) if config.score_centering else old)
        torch.nn.utils.clip_grads_with_norm_(trainer.trained.values(), config.max_grad_norm, norm)
        trainer.optimizer.step()
        trainer.engine.weights_changed()
        losses = (done.loss.item() for done in passes)
        metrics.add({"loss": sum(losses, 0.0), "grad_norm": passes[-1].norm if passes else norm})
    policy.eval()
    metrics.add({"learning_rate": trainer.scheduler.get_last_lr()[0]})
    trainer.scheduler.step()
    together = gather_credit(credit)
    return together, why_nothing(credit, together, rollouts.truncated.tolist()), metrics.values()


@dataclass(frozen=True)
class Objective:
    """Loss of each micro-batch of a batch, and what its first iteration leaves for later ones."""

    trainer: Trainer
    batch: Batch
    credit: DeferredCredit
    times: StageTimes
    reference: ByRow  # log-probs of the reference model; nothing without a KL term
    old: ByRow = field(default_factory=dict)  # log-probs before the first optimizer step

    def __call__(self, micro: MicroBatch) -> _Launched:
        """Do all of a micro-batch before its backward, which may start again in halves.

        It is one packed forward: its log-probs, from its keys and values the scores of masked spans, then its loss with
        the weights that follow.
        """
        policy = self.trainer.policy
        with self.trainer.config.precision.autocast():  # of one micro-batch: it keeps the weights that it has cast
            if not micro:
                return micro, Moving(), idle_loss(policy)
            return run_inside(policy, lambda: self._launch(micro), trains=True)

    def _launch(self, index: MicroBatch) -> _Launched:
        config, credit = self.trainer.config, self.credit
        batch, is_due = self.batch.take(index), credit.is_due(index)
        causal, foreseen = causal_lm(self.trainer.policy), None
        if is_due:
            with self.times.during("credit"):
                foreseen = credit.foreseen(index, causal)
        forward = packed_forward(
            causal,
            batch.rows,
            token_budget=config.token_budget,
            keep_states=is_due and credit.config.continues,
            foreseen=foreseen,
        )
        if is_due:
            with self.times.during("credit"):
                credit.by_forward(index, forward)
        options = {
            **config.loss_options, "temperature": config.temperature, "compute_entropy": True, "validate": False,
            "num_items_in_batch": counted_tokens(self.batch, range(len(self.batch))),
            "num_sequences_in_batch": len(self.batch),
        }  # fmt: skip
        if config.importance_sampling_clip_max is not None:
            options["sampling_mode"] = config.importance_sampling_mode
            options["sampling_clip_max"] = config.importance_sampling_clip_max
        old, reference = ([column[b] for b in index] if column else None for column in (self.old, self.reference))
        credited = credit.columns(index)
        batch = batch.with_columns(old_logprobs=old, ref_logprobs=reference, **credited)
        loss = forward.policy_loss(batch, **options)
        counted = batch.mask or ()
        columns = zip(*credited.values(), counted, strict=True)
        moving = [int(((row != 0) & (own != 0) & one).sum()) for row, own, one in columns]
        if not all(one.all() for one in counted):  # the loss needs no log-probs of an environment's tokens
            pairs = zip(loss.logprobs, counted, strict=True)
            loss = loss._replace(logprobs=[torch.where(one.to(row.device), row, 0.0) for row, one in pairs])
        return index, Moving(sum(moving), sum(count > 0 for count in moving)), loss


def measure(
    metrics: Averages, trainer: Trainer, rollouts: Rollouts, batch: Batch, passes: Sequence[Pass], *, is_sampler: bool
) -> None:
    """Check passes and add what they measured to `metrics`; `is_sampler` if their policy is the one that sampled."""
    config = trainer.config
    corrects_rows = config.importance_sampling_mode.startswith(("sequence", "geometric"))
    for done in passes:
        require_finite(done.micro, done.logprobs, done.norm, trainer.policy)
        counts = {name: done.moving.tokens for name in done.metrics if name == "ratio_mean" or "sampling/" in name}
        counts["vespo/phi_seq_mean"] = done.moving.rows
        if corrects_rows:
            counts["sampling/importance_sampling_ratio/mean"] = done.moving.rows
        if config.importance_sampling_level != "token" and config.loss_type != "gmpo":
            counts |= {name: len(done.micro) for name in done.metrics if "clip_ratio" in name}
        own = {name: x for name, x in done.metrics.items() if is_sampler or not name.startswith("sampling/")}
        metrics.add({name: x for name, x in own.items() if not x.isnan()}, counted_tokens(batch, done.micro), counts)
    if is_sampler and passes:
        logprobs = by_row([done.micro for done in passes], [row for done in passes for row in done.logprobs])
        metrics.add({"sampling/gap": check_sampling_gap(logprobs, rollouts, trainer.policy, trainer.config)})


def backward(
    trainer: Trainer, parts: Sequence[MicroBatch], objective: Callable[[MicroBatch], _Launched]
) -> tuple[list[Pass], Tensor]:
    """Sum the gradients of micro-batches; return their measurements, on the host, and the norm, on the device.

    A micro-batch that the device has no memory for is done in halves of whole groups, as long as its backward has not
    begun. Passes queue up on the device without a wait.
    """
    config, is_shared = trainer.config, is_sharded(trainer.policy)

    def smaller(micro: MicroBatch) -> list[MicroBatch]:
        halves = halved(micro, config.num_generations)
        if is_shared and any(processes.gather(len(halves) > 1)):  # where one has no memory, all come here
            return halves if len(halves) > 1 else [micro, []]
        return halves

    trainer.optimizer.zero_grad()  # to None: without a micro-batch the optimizer step changes nothing
    passes, norm = list[Pass](), torch.zeros(())
    for micro, moving, (loss, measured, logprobs) in run_in_memory(parts, objective, smaller):
        (loss * processes.count() if is_shared else loss).backward()  # what shares the model averages its gradients
        norm = gradient_norm(trainer.trained.values())
        passes.append(Pass(micro, moving, loss.detach(), norm, measured, logprobs))
    return fetch(passes), norm


def idle_loss(policy: nn.Module) -> PackedLoss:
    """Compute a loss of 0 by as many forwards as the processes with a micro-batch run."""
    nothing, token = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    loss = packed_policy_loss(
        policy, Rows([token], [token]), advantages=nothing, mask=[nothing], num_items_in_batch=1
    ).loss
    return PackedLoss(loss, {}, [])


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
    if reference is None:
        return {}
    adapter_off = reference.disable_adapter() if trainer.config.use_peft else contextlib.nullcontext()
    options: dict[str, Any] = {name: getattr(trainer.config, name) for name in ("temperature", "token_budget")}
    with adapter_off, trainer.config.precision.autocast():
        rows: list[Any] = [
            packed_logprobs(reference, part.rows, kept_tokens=part.kept_tokens, **options)
            for part in map(batch.take, parts)
        ]
    return by_row(parts, on_host([row for part in rows for row in part]))


def problem_batches(problems: int, per_step: int, seed: int) -> Iterator[list[int]]:
    """Yield endless batches of problem numbers: shuffled passes over all, run together."""
    rng = random.Random(seed)
    order = itertools.chain.from_iterable(rng.sample(range(problems), problems) for _ in itertools.count())
    while True:
        yield list(itertools.islice(order, per_step))
