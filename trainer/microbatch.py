"""Cut a batch of rollouts into micro-batches of one packed forward and backward.

Micro-batches are whole groups, so that a prompt is fed once; rows that cannot change the update are left out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedTokenizerBase

from cfa_kernels import Credit, DeferredCredit, Draws, KeptTokens, Rows
from cfa_kernels.model.limits import default_token_budget
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.tree.packs import groups_within

from .config import TrainConfig
from .processes import count, gather, own_share
from .rollouts import Rollouts
from .state import Shaped

MicroBatch = list[int]
"""Rows of one forward and backward, by their places in the batch; none where a process only runs as others do."""

ByRow = dict[int, Tensor]
"""Tensors (t,) by the number of their completion in the batch."""


@dataclass(frozen=True)
class UpdateBatch:
    """Inputs of the loss but for credit: B sampled completions, whether the loss counts them, and their advantages."""

    rollouts: Rollouts
    counted: Tensor  # (B,) bool
    advantages: Tensor  # (B,)

    @property
    def rows(self) -> Rows:
        """Prompts and completions."""
        return self.rollouts.rows

    def kept_tokens(self, index: Sequence[int]) -> list[KeptTokens] | None:
        """Give the ids that the tokens of some rows were drawn from; None if the engine does not tell."""
        kept = self.rollouts.kept_tokens
        return None if kept is None else [kept[b] for b in index]

    def tokens(self, index: Sequence[int]) -> float:
        """Count the tokens of some rows that the loss counts."""
        return float(sum(len(self.rows.completions[b]) for b in index if self.counted[b]))


def halved(micro: MicroBatch, group_size: int) -> list[MicroBatch]:
    """Cut the same rows into two micro-batches of whole groups of `group_size` completions; one for one group."""
    groups = [list(group) for _, group in groupby(micro, lambda b: b // group_size)]
    middle = -(-len(groups) // 2)
    return [[b for group in half for b in group] for half in (groups[:middle], groups[middle:]) if half]


class Moving(NamedTuple):
    """Counts of what moves the loss of a micro-batch: tokens with a weight and an advantage, and rows with any."""

    tokens: int = 0
    rows: int = 0


class Pass(NamedTuple):
    """Results of forward, loss and backward of one micro-batch."""

    micro: MicroBatch
    moving: Moving
    loss: Tensor  # ()
    norm: Tensor  # (), of the gradients summed so far
    metrics: dict[str, Tensor]  # ()
    logprobs: list[Tensor]  # b tensors (t,)


def own_rows(config: TrainConfig, batch: UpdateBatch) -> list[int]:
    """List the rows of this process's groups, by their places in the batch."""
    size = config.num_generations
    return [start + g for start in own_share(range(0, len(batch.rows), size)) for g in range(size)]


def micro_batches(config: TrainConfig, batch: UpdateBatch, policy: nn.Module) -> list[MicroBatch]:
    """Cut a batch into micro-batches of whole groups, as many as fit `token_budget`, at least one.

    Each process gets those of its own groups, perhaps none. Rows that the loss does not count are dropped, and rows
    without advantage too, unless the KL term needs them.
    """
    budget = config.token_budget or default_token_budget(causal_lm(policy), training=True)
    groups, sizes = list[list[int]](), list[int]()
    for _, places in groupby(own_rows(config, batch), lambda b: b // config.num_generations):
        if group := [b for b in places if batch.counted[b] and (config.beta != 0 or batch.advantages[b] != 0)]:
            groups.append(group)
            sizes.append(len(batch.rows.prompts[group[0]]) + sum(batch.rows.lengths[b] for b in group))
    return [[b for i in part for b in groups[i]] for part in groups_within(sizes, budget)]


def batch_credit(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, batch: UpdateBatch, shaped: Shaped, *, step: int
) -> DeferredCredit:
    """Make the credit of a batch, which is assigned to each micro-batch in the first forward over its rows, or at once.

    Edits of `shaped` multiply the weights, and credit that compares completions reads its rewards (B,).
    """
    counted = [counts.expand(length) for counts, length in zip(batch.counted, batch.rows.lengths, strict=True)]
    return DeferredCredit(
        config.counterfactual(), tokenizer, batch.rows, batch.advantages, seed=Draws(config.seed).key(step),
        groups=torch.arange(len(batch.rows)) // config.num_generations, rewards=shaped.rewards, mask=counted,
        factors=shaped.edits, temperature=config.temperature, gather=gather if count() > 1 else None,
    )  # fmt: skip


def gather_credit(credit: DeferredCredit) -> Credit:
    """Put the credit of all completions of all processes together; those in no micro-batch have weight 1."""
    return Credit.joined(credit.rows.lengths, [part for parts in gather(credit.parts) for part in parts])


def by_row(parts: Iterable[MicroBatch], tensors: Iterable[Tensor]) -> ByRow:
    """Number tensors, one for each row of the micro-batches in order, by the rows' places in the batch."""
    return dict(zip([b for micro in parts for b in micro], tensors, strict=True))


def fetch(passes: list[Pass]) -> list[Pass]:
    """Bring passes to the host: the one wait for the device in an optimizer step whose weights are known."""
    there = iter(on_host([leaf for leaf in tree_leaves(passes) if isinstance(leaf, Tensor)]))
    return tree_map_only(Tensor, lambda _: next(there), passes)  # type: ignore[no-any-return]


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Bring floating tensors, detached, to the host by one copy."""
    if not tensors:
        return []
    flat = torch.cat([tensor.detach().reshape(-1).to(tensors[0].device) for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]
