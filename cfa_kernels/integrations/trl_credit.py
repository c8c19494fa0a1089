"""Credit of TRL's generation batches: when to assign it, and a warning if none came. Nothing here imports TRL."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import CounterfactualConfig, Credit, DeferredCredit, Rows
from ..batch import Batch
from ..ops.kept_tokens import KeptTokens
from ..text.offsets import decoded

ROW = "credit_row"
"""Name, among the inputs of the loss, of the (b,) places of a micro-batch's rows in their generation batch."""

PADDED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
"""Names, among the inputs of the loss, of TRL's padded rows."""

KEPT = "kept_tokens"
"""Name, among the inputs of the loss, of the list of `KeptTokens` of a micro-batch's rows."""


def why_at_once(deferred: DeferredCredit, micro_batches: int, one_update: bool) -> str | None:
    """Say why credit cannot be assigned from the training forwards of a batch, one per micro-batch; None if it can.

    `one_update` says whether the policy changes only after all of them.
    """
    config = deferred.config
    if not (config.continues or config.reads_entropies):
        return f"{config.asked_for} reads nothing that a training forward has fed"
    if not one_update:
        return (
            "the policy changes between training forwards over one generation batch (gradient_accumulation_steps is no "
            "multiple of steps_per_generation * num_iterations), and credit is that of the policy before"
        )
    if deferred.compares_beyond([range(len(deferred.batch))] * micro_batches):
        return (
            f"{config.asked_for} with weights={getattr(config.weights, 'name', None)!r} compares completions of the "
            "whole generation batch, and a training forward holds a part of it (steps_per_generation, processes)"
        )
    return None


def batch_credit(
    config: CounterfactualConfig,
    tokenizer: Any,
    output: Mapping[str, Any],
    rewards: Tensor,
    sampled: Sequence[Sequence[int]],
    *,
    first: int,
    group_size: int,
    **options: Any,
) -> DeferredCredit:
    """Make the credit of a process's share of TRL's generation batch, `output`, with groups side by side.

    Rewards are nan for completions to omit. The ids `sampled` of completions that are masked as truncated are still
    compared with others. `first` counts the rows of the processes before this one.
    """
    index = range(first, first + len(rewards))
    rows = Rows.from_padded(**{name: output[name] for name in PADDED})
    whole = [
        row if len(row) else torch.tensor(ids, dtype=torch.int64)
        for row, ids in zip(rows.completions, sampled, strict=True)
    ]
    rows = Rows(rows.prompts, whole, index)
    batch = Batch(
        rows, advantages=unpadded(output["advantages"], rows), groups=torch.tensor(index) // group_size,
        rewards=rewards, mask=unpadded(loss_mask(output), rows),
    )  # fmt: skip
    return DeferredCredit(config, tokenizer, batch, **options)


def unpadded(column: Tensor, rows: Rows) -> Any:
    """Take the padding off a column (B, T) of `rows`; one of (B,) stays."""
    column = column.cpu()
    return column if column.ndim == 1 else [row[:n] for row, n in zip(column, rows.lengths, strict=True)]


def weighed(deferred: DeferredCredit, credit: Credit) -> list[str]:
    """Describe the weighed tokens of each completion in runs of one value: "3 + 4 = 7. (4.00) | #### 7 (1.50)".

    Values are weights or, for signed credit, advantages.
    """
    signed = credit.advantages is not None
    texts = []
    for b, (ids, values) in enumerate(
        zip(deferred.batch.rows.completions, credit.advantages or credit.weights, strict=True)
    ):
        plain = float(deferred.batch.advantages[b]) if signed else 1.0
        levels, counts = values.unique_consecutive(return_counts=True)
        runs = [one for one in zip(levels.tolist(), ids.split(counts.tolist()), strict=True) if one[0] != plain]
        texts.append(" | ".join(f"{decoded(run, deferred.tokenizer).strip()} ({value:.2f})" for value, run in runs))
    return texts


def loss_mask(inputs: Mapping[str, Any]) -> Tensor:
    """Return what the loss counts of TRL's completions, (B, T): not a tool's tokens."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def kept_tokens_of(masks: Sequence[Any], sampled: Sequence[Sequence[int]], mask: Tensor) -> list[KeptTokens]:
    """Check the ids that a sampler kept at each token of B completions, `KeptTokens` or lists of lists of ids.

    Args:
        sampled: ids of the B completions.
        mask: (B, T), tokens that the loss counts: their own id must be among those kept, if any are.

    Raises `ValueError` naming row and token.
    """
    if len(masks) != len(sampled):
        raise ValueError(f"sampling_mask: expected the kept ids of {len(sampled)} completions, got {len(masks)}")
    checked = []
    for b, (own, ids) in enumerate(zip(masks, sampled, strict=True)):
        name, counted = f"sampling_mask row {b}", torch.zeros(len(ids), dtype=torch.bool)
        counted[: mask.shape[1]] = mask[b, : len(ids)].bool().cpu()
        kept = own if isinstance(own, KeptTokens) else KeptTokens.of(own)
        place = f"{name}, token {{}}".format
        checked.append(kept.checked(place, len(ids), name=name, targets=torch.tensor(ids), counted=counted))
    return checked


def of_first_tokens(kept: Sequence[KeptTokens], rows: Rows) -> list[KeptTokens]:
    """Cut kept ids to the tokens of `rows`, of which those of completions that are masked as truncated have none."""
    return [one.take(slice(0, n)) for one, n in zip(kept, rows.lengths, strict=True)]
