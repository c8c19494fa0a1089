"""Cut a batch of rollouts into micro-batches of one packed forward and backward, and weigh their tokens.

Micro-batches are whole groups, so that a prompt is fed once; rows that cannot change the update are left out.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from cfa_kernels import Credit, counterfactual_credit
from cfa_kernels.credit.weights import normalized_weights
from cfa_kernels.hf.liger import runs_fused
from cfa_kernels.hf.limits import default_token_budget
from cfa_kernels.hf.memory import halves
from cfa_kernels.hf.model import causal_lm
from cfa_kernels.losses.off_policy import truncated_ratios
from cfa_kernels.losses.ragged import LossBatch
from cfa_kernels.scoring.access import TrainingForward
from cfa_kernels.scoring.training_forward import PackedForward, packed_forward, packed_logprobs
from trainer.config import TrainConfig
from trainer.processes import gathered, own
from trainer.report.stages import StageTimes
from trainer.rollouts import Rollouts
from trainer.state import Shaped

ByRow = dict[int, Tensor]
"""Tensors (t,) by the number of their completion in the batch."""


@dataclass(frozen=True)
class MicroBatch:
    """Completions of a batch, unpadded and on the host: b rows, of t tokens each."""

    rows: Tensor  # (b,) their numbers in the batch
    prompts: list[Tensor]  # b tensors (p,)
    completions: list[Tensor]  # b tensors (t,)
    mask: list[Tensor]  # b tensors (t,): what the loss counts
    advantages: Tensor  # (b,)
    sampled_logprobs: list[Tensor]  # b tensors (t,)
    nucleus: float = 1.0  # least probability of the tokens that they are normalised over
    moving: float = 0.0  # tokens that move the loss, once credit is assigned
    share: float = 1.0  # of the loss of the micro-batch that it is a part of, where the denominator is its own

    @property
    def tokens(self) -> float:
        """Tokens that the loss counts."""
        return float(sum(row.sum() for row in self.mask))

    def forward(self, policy: nn.Module, config: TrainConfig, *, keep_states: bool = False) -> PackedForward:
        """Compute hidden states of every completion, with gradient; prompts are fed once."""
        return packed_forward(
            causal_lm(policy), self.prompts, self.completions, token_budget=config.token_budget, keep_states=keep_states
        )

    def logprobs(self, model: nn.Module, config: TrainConfig) -> list[Tensor]:
        """Compute b tensors (t,) fp32, nats, without gradient."""
        with torch.no_grad():
            found = packed_logprobs(
                model, self.prompts, self.completions, temperature=config.temperature, token_budget=config.token_budget
            )
        assert isinstance(found, list)
        return found

    def loss_batch(self, credited: "Credited", old: ByRow, reference: ByRow, config: TrainConfig) -> LossBatch:
        """Collect the loss's other inputs; without `old` log-probs the policy is the one that sampled."""
        return LossBatch.of(
            self.completions, self.of(old), credited.advantages, weights=credited.weights, mask=self.mask,
            ref_logprobs=self.of(reference), compute_entropy=True,
            importance_sampling_level=config.importance_sampling_level, loss_type=config.loss_type,
        )  # fmt: skip

    def corrected(self, credited: "Credited", forward: PackedForward, ratios: ByRow, config: TrainConfig) -> "Credited":
        """Multiply weights by `ratios` to the sampling engine; the first forward fills them, before a step."""
        if config.importance_sampling_clip_max is None:
            return credited
        if int(self.rows[0]) not in ratios:
            with torch.no_grad():
                found = forward.logprobs(config.temperature)
            assert isinstance(found, list)
            own = truncated_ratios(on_host(found), self.sampled_logprobs, config.importance_sampling_clip_max)
            ratios |= by_row([self], own)
        return credited._replace(weights=[w * r for w, r in zip(credited.weights, self.of(ratios) or [], strict=True)])

    def of(self, by_row: ByRow) -> list[Tensor] | None:
        """Pick b tensors (t,) of those of a batch; None where there are none."""
        return [by_row[b] for b in self.rows.tolist()] if by_row else None

    @classmethod
    def idle(cls) -> "MicroBatch":
        """Make a micro-batch without rows, for a process that has fewer than others with which it shares the model."""
        return cls(torch.zeros(0, dtype=torch.int64), [], [], [], torch.zeros(0), [])

    def halved(self, group_size: int) -> list["MicroBatch"]:
        """Cut the same rows into two micro-batches of whole groups of `group_size` completions; none for one group."""
        groups = (self.rows // group_size).tolist()
        parts = halves(range(len(groups)), groups.__getitem__) if len(set(groups)) > 1 else []

        def of(part: Sequence[int]) -> "MicroBatch":
            chosen: dict[str, Any] = {
                name: column[list(part)] if isinstance(column, Tensor) else [column[i] for i in part]
                for name, column in vars(self).items()
                if isinstance(column, (Tensor, list))
            }
            tokens = float(sum(row.sum() for row in chosen["mask"]))
            return dataclasses.replace(self, **chosen, share=self.share * tokens / max(self.tokens, 1.0))

        return [of(part) for part in parts]


class Credited(NamedTuple):
    """Weights of the tokens of a micro-batch."""

    weights: list[Tensor]  # b tensors (t,)
    advantages: Tensor | list[Tensor]  # (b,); b tensors (t,) where credit is signed

    def moving(self, mask: Sequence[Tensor]) -> float:
        """Count the tokens that move the loss: the mask has them, and their weighted advantage is not 0."""
        rows = zip(self.weights, self.advantages, mask, strict=True)
        return float(
            sum(((weights != 0) & (advantages != 0) & mask.bool()).sum() for weights, advantages, mask in rows)
        )


class Pass(NamedTuple):
    """Results of forward, loss and backward of one micro-batch."""

    micro: MicroBatch
    loss: Tensor  # ()
    norm: Tensor  # (), of the gradients summed so far
    metrics: dict[str, Tensor]  # ()
    logprobs: list[Tensor]  # b tensors (t,)


def micro_batches(
    config: TrainConfig, rollouts: Rollouts, mask: Tensor, advantages: Tensor, policy: nn.Module
) -> list[MicroBatch]:
    """Cut a batch on the host into micro-batches of whole groups, as many as fit `token_budget`, at least one.

    Of several processes each gets its own groups, perhaps none.

    Rows the mask leaves out are dropped, and rows without advantage too, unless the KL term or `bnpo`'s
    denominator (its own micro-batch) needs them. `mask` is (B, T), `advantages` (B,).
    """
    if rollouts.logprobs is None:
        raise ValueError("rollouts: must have been sampled; these were decoded greedily")
    causal = causal_lm(policy)
    budget = config.token_budget or default_token_budget(causal, training=True, fused=runs_fused(causal))
    skip = config.beta == 0 and config.loss_type != "bnpo"
    wanted = mask.any(1) & ((advantages != 0) | (not skip))
    lengths = rollouts.completion_mask.sum(1).tolist()
    prompt_lengths = rollouts.prompt_mask.sum(1).tolist()
    parts: list[list[int]] = []
    size = 0
    for start in own(range(0, len(wanted), config.num_generations)):
        group = [b for b in range(start, start + config.num_generations) if wanted[b]]
        if not group:
            continue
        added = prompt_lengths[start] + sum(lengths[b] for b in group)
        if not parts or size + added > budget:
            parts.append([])
            size = 0
        parts[-1] += group
        size += added
    return [
        MicroBatch(
            rows=torch.tensor(part),
            prompts=[rollouts.prompt_ids[b, rollouts.prompt_ids.shape[1] - prompt_lengths[b] :] for b in part],
            completions=[rollouts.completion_ids[b, : lengths[b]] for b in part],
            mask=[mask[b, : lengths[b]] for b in part],
            advantages=advantages[part],
            sampled_logprobs=[rollouts.logprobs[b, : lengths[b]] for b in part],
            nucleus=rollouts.nucleus,
        )
        for part in parts
    ]


@dataclass(frozen=True)
class Credits:
    """Credit of the micro-batches of a batch, each assigned once, in the first forward over its rows."""

    config: TrainConfig
    rollouts: Rollouts  # B completions of T tokens at most, on the host
    mask: Tensor  # (B, T): what the loss counts
    tokenizer: PreTrainedTokenizerBase
    generator: torch.Generator
    shaped: Shaped  # rewards (B,), for credit that compares; edits (B, T), which multiply the weights
    times: StageTimes = dataclasses.field(default_factory=StageTimes)
    weights: ByRow = dataclasses.field(default_factory=dict)
    advantages: ByRow = dataclasses.field(default_factory=dict)  # of rows with signed credit
    assigned: list[tuple[MicroBatch, Credit]] = dataclasses.field(default_factory=list)

    def needs_states(self, micro: MicroBatch) -> bool:
        """Say whether assigning credit will ask what continues the micro-batch's forward."""
        return not self._has(micro) and self.config.counterfactual().continues

    def of(self, micro: MicroBatch, forward: PackedForward) -> Credited:
        """Look up the weights of a micro-batch's tokens, or compute them from its `forward`."""
        if not self._has(micro):
            with self.times.during("credit"):
                self._keep(micro, self.assign(micro, forward))
        rows = micro.rows.tolist()
        signed = [self.advantages[b] for b in rows] if rows[0] in self.advantages else micro.advantages
        return Credited([self.weights[b] for b in rows], signed)

    def _has(self, micro: MicroBatch) -> bool:
        return int(micro.rows[0]) in self.weights

    def assign(self, micro: MicroBatch, forward: PackedForward) -> Credit:
        """Assign credit to a micro-batch's completions, before the first optimizer step on the batch.

        Answers and probes are scored, and entropies read, from the micro-batch's own `forward`; other estimators run
        the policy themselves.
        """
        part, entropies, config = micro.rows, None, self.config.counterfactual()
        if config.reads_entropies:
            with torch.no_grad():
                _, found = forward.logprobs(self.config.temperature, return_entropy=True)
            assert isinstance(found, list)
            entropies = torch.zeros(len(part), self.mask.shape[1])
            for row, line in zip(on_host(found), entropies, strict=True):
                line[: len(row)] = row
        return counterfactual_credit(
            TrainingForward(forward),
            prompt_ids=self.rollouts.prompt_ids[part],
            prompt_mask=self.rollouts.prompt_mask[part],
            completion_ids=self.rollouts.completion_ids[part],
            completion_mask=self.mask[part],
            advantages=micro.advantages,
            config=config,
            groups=part // self.config.num_generations,
            rewards=self.shaped.rewards[part],
            entropies=entropies,
            tokenizer=self.tokenizer,
            generator=self.generator,
        )

    def _keep(self, micro: MicroBatch, credit: Credit) -> None:
        rows, weights = micro.rows, credit.weights
        edits = self.shaped.edits
        gate = torch.ones_like(weights) if edits is None else edits.to(weights)[rows]
        credit = dataclasses.replace(credit, weights=weights * gate)
        for i, (b, ids) in enumerate(zip(rows.tolist(), micro.completions, strict=True)):
            own = credit.weights[i, : len(ids)]
            if not gate[i].all() and own.any():  # what is left is rescaled; where nothing is, no credit
                own.copy_(normalized_weights(own, self.config.counterfactual().normalize))
            self.weights[b] = own
            if credit.advantages is not None:
                self.advantages[b] = credit.advantages[i, : len(ids)]
        self.assigned.append((micro, credit))

    def of_batch(self) -> Credit:
        """Put credit of all (B, T) completions together; those in no micro-batch weigh 1 and were not scored."""
        assigned = [(micro.rows.tolist(), credit) for micro, credit in self.assigned]
        return Credit.of_parts(self.mask.shape, [part for parts in gathered(assigned) for part in parts])


def by_row(micros: Iterable[MicroBatch], tensors: Iterable[Tensor]) -> ByRow:
    """Number tensors, one for each row of the micro-batches in order, by the rows' places in the batch."""
    return dict(zip([b for micro in micros for b in micro.rows.tolist()], tensors, strict=True))


def fetched(passes: Sequence[Pass]) -> list[Pass]:
    """Bring passes to the host: the one wait for the device in an optimizer step that is given its weights."""
    rows = [(one.loss, one.norm, *one.metrics.values(), *one.logprobs) for one in passes]
    there = iter(on_host([tensor for row in rows for tensor in row]))

    return [
        Pass(
            one.micro, next(there), next(there), {name: next(there) for name in one.metrics},
            [next(there) for _ in one.logprobs],
        )
        for one in passes
    ]  # fmt: skip


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Bring floating tensors, detached, to the host by one copy."""
    if not tensors:
        return []
    flat = torch.cat([tensor.detach().reshape(-1).to(tensors[0].device) for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]


def to_host(rollouts: Rollouts) -> Rollouts:
    """Bring every tensor of rollouts to the host, where micro-batches are cut and trees laid out."""
    moved: dict[str, Any] = {name: value.cpu() for name, value in vars(rollouts).items() if isinstance(value, Tensor)}
    return dataclasses.replace(rollouts, **moved)
