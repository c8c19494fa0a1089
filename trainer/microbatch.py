"""Cut a batch of rollouts into micro-batches of one packed forward and backward.

Micro-batches are whole groups, so that a prompt is fed once; rows that cannot change the update are omitted.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedTokenizerBase

from cfa_kernels import Batch, DeferredCredit, Draws
from cfa_kernels.model.limits import default_token_budget
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.tree.packs import groups_within

from .config import TrainConfig
from .processes import count, gather, own_share
from .rollouts.engine import Rollouts
from .state import Shaped

MicroBatch = list[int]
"""Rows of one forward and backward, by their places in the batch; none where a process only runs as others do."""

ByRow = dict[int, Tensor]
"""Tensors (t,) by the number of their completion in the batch."""


def halved(micro: MicroBatch, group_size: int) -> list[MicroBatch]:
    """Cut the same rows into two micro-batches of whole groups of `group_size` completions; one for one group."""
    groups = [list(group) for _, group in groupby(micro, lambda b: b // group_size)]
    middle = -(-len(groups) // 2)
    return [[b for group in half for b in group] for half in (groups[:middle], groups[middle:]) if half]


class Pass(NamedTuple):
    """Results of forward, loss and backward of one micro-batch."""

    micro: MicroBatch
    loss: Tensor  # ()
    metrics: Mapping[str, Tensor]  # ()
    logprobs: list[Tensor]  # b tensors (t,)
    moving: tuple[int, int] = (0, 0)  # tokens with a weight and an advantage, and rows with any: they move the loss
    norm: Tensor = torch.zeros(())  # of the gradients summed so far


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


def counted_tokens(batch: Batch, rows: Iterable[int]) -> int:
    """Count the tokens of some rows that the loss counts."""
    assert batch.mask is not None
    return sum(int(batch.mask[b].sum()) for b in rows)


def own_rows(config: TrainConfig, batch: Batch) -> list[int]:
    """List the rows of this process's groups, by their places in the batch."""
    size = config.num_generations
    return [start + g for start in own_share(range(0, len(batch), size)) for g in range(size)]


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


def batch_credit(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, batch: Batch, *, step: int) -> DeferredCredit:
    """Make the credit of a batch, assigned to each micro-batch in the first forward over its rows, or at once."""
    return DeferredCredit(
        config.counterfactual(), tokenizer, batch, seed=Draws(config.seed).key(step), temperature=config.temperature,
        gather=gather if count() > 1 else None,
    )  # fmt: skip


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
