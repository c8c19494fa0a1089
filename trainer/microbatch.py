"""Cut a batch of rollouts into micro-batches of one packed forward and backward, and weigh their tokens.

Micro-batches are whole groups, so that a prompt is fed once; rows that cannot change the update are left out.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from cfa_kernels import Credit, DeferredCredit, Draws, LossBatch, PackedForward, Rows, packed_forward, packed_logprobs
from cfa_kernels.hf.limits import default_token_budget
from cfa_kernels.hf.model import causal_lm
from cfa_kernels.losses.off_policy import truncated_ratios
from cfa_kernels.packing.packs import groups_within
from trainer.config import TrainConfig
from trainer.processes import gather, own_share
from trainer.rollouts import Rollouts
from trainer.state import Shaped

ByRow = dict[int, Tensor]
"""Tensors (t,) by the number of their completion in the batch."""


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch, on the host: b completions of t tokens each."""

    rows: Rows  # whose index is their place in the batch
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
        return packed_forward(causal_lm(policy), self.rows, token_budget=config.token_budget, keep_states=keep_states)

    def logprobs(self, model: nn.Module, config: TrainConfig) -> list[Tensor]:
        """Compute b tensors (t,) fp32, nats, without gradient."""
        with torch.no_grad():
            found = packed_logprobs(model, self.rows, temperature=config.temperature, token_budget=config.token_budget)
        assert isinstance(found, list)
        return found

    def loss_batch(self, credited: "Credited", old: ByRow, reference: ByRow, options: dict[str, Any]) -> LossBatch:
        """Collect the loss's other inputs; without `old` log-probs the policy is the one that sampled."""
        return LossBatch.of(
            self.rows, self.of(old), credited.advantages, weights=credited.weights, mask=self.mask,
            ref_logprobs=self.of(reference), **options,
        )  # fmt: skip

    def corrected(self, credited: "Credited", forward: PackedForward, ratios: ByRow, config: TrainConfig) -> "Credited":
        """Multiply weights by `ratios` to the sampling engine; the first forward fills them, before a step."""
        if config.importance_sampling_clip_max is None:
            return credited
        if self.rows.index[0] not in ratios:
            with torch.no_grad():
                found = forward.logprobs(config.temperature)
            assert isinstance(found, list)
            own = truncated_ratios(on_host(found), self.sampled_logprobs, config.importance_sampling_clip_max)
            ratios |= by_row([self], own)
        return credited._replace(weights=[w * r for w, r in zip(credited.weights, self.of(ratios) or [], strict=True)])

    def of(self, by_row: ByRow) -> list[Tensor] | None:
        """Pick b tensors (t,) of those of a batch; None where there are none."""
        return [by_row[b] for b in self.rows.index] if by_row else None

    @classmethod
    def idle(cls) -> "MicroBatch":
        """Make a micro-batch without rows, for a process that has fewer than others with which it shares the model."""
        return cls(Rows([], []), [], torch.zeros(0), [])

    def halved(self, group_size: int) -> list["MicroBatch"]:
        """Cut the same rows into two micro-batches of whole groups of `group_size` completions; one for one group."""
        groups = [list(part) for _, part in groupby(range(len(self.rows)), lambda i: self.rows.index[i] // group_size)]
        halves = groups_within([1] * len(groups), -(-len(groups) // 2))
        parts = [[i for group in groups[half.start : half.stop] for i in group] for half in halves]

        def of(part: Sequence[int]) -> "MicroBatch":
            chosen: dict[str, Any] = {
                name: column[list(part)] if isinstance(column, Tensor) else [column[i] for i in part]
                for name, column in vars(self).items()
                if isinstance(column, (Tensor, list))
            }
            tokens = float(sum(row.sum() for row in chosen["mask"]))
            return dataclasses.replace(
                self, rows=self.rows.take(part), **chosen, share=self.share * tokens / max(self.tokens, 1.0)
            )

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
    config: TrainConfig, rows: Rows, rollouts: Rollouts, mask: Tensor, advantages: Tensor, policy: nn.Module
) -> list[MicroBatch]:
    """Cut a batch on the host into micro-batches of whole groups, as many as fit `token_budget`, at least one.

    Of several processes each gets its own groups, perhaps none.

    Rows the mask leaves out are dropped, and rows without advantage too, unless the KL term or `bnpo`'s
    denominator (its own micro-batch) needs them. `mask` is (B, T), `advantages` (B,).
    """
    if rollouts.logprobs is None:
        raise ValueError("rollouts: must have been sampled; these were decoded greedily")
    causal = causal_lm(policy)
    budget = config.token_budget or default_token_budget(causal, training=True)
    skip = config.beta == 0 and config.loss_type != "bnpo"
    wanted = mask.any(1) & ((advantages != 0) | (not skip))
    groups, sizes = list[list[int]](), list[int]()
    for start in own_share(range(0, len(wanted), config.num_generations)):
        if group := [b for b in range(start, start + config.num_generations) if wanted[b]]:
            groups.append(group)
            sizes.append(len(rows.prompts[start]) + sum(rows.lengths[b] for b in group))
    parts = [[b for i in part for b in groups[i]] for part in groups_within(sizes, budget)]
    return [
        MicroBatch(
            rows=rows.take(part),
            mask=[mask[b, : rows.lengths[b]] for b in part],
            advantages=advantages[part],
            sampled_logprobs=[rollouts.logprobs[b, : rows.lengths[b]] for b in part],
            nucleus=rollouts.nucleus,
        )
        for part in parts
    ]


def batch_rows(rollouts: Rollouts) -> Rows:
    """Take the padding off the completions of a batch, on the host."""
    return Rows.from_padded(
        rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids, rollouts.completion_mask
    )


def batch_credit(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: Rows,
    advantages: Tensor,
    shaped: Shaped,
    *,
    step: int = 0,
) -> DeferredCredit:
    """Make the credit of a batch, which is assigned to each micro-batch in the first forward over its rows.

    Edits (B, T) of `shaped` multiply the weights, and credit that compares completions reads its rewards (B,).
    """
    factors = shaped.edits
    return DeferredCredit(
        config.counterfactual(), tokenizer, rows, advantages, seed=Draws(config.seed).key(step),
        groups=torch.arange(len(rows)) // config.num_generations, rewards=shaped.rewards,
        factors=None if factors is None else [row[:n] for row, n in zip(factors.cpu(), rows.lengths, strict=True)],
        temperature=config.temperature,
    )  # fmt: skip


def joined(credit: DeferredCredit) -> Credit:
    """Put the credit of all completions of all processes together; those in no micro-batch have weight 1."""
    return Credit.joined(credit.rows.lengths, [part for parts in gather(credit.parts) for part in parts])


def by_row(micros: Iterable[MicroBatch], tensors: Iterable[Tensor]) -> ByRow:
    """Number tensors, one for each row of the micro-batches in order, by the rows' places in the batch."""
    return dict(zip([b for micro in micros for b in micro.rows.index], tensors, strict=True))


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
