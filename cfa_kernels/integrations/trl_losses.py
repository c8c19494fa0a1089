"""Replace TRL's loss by the same loss from a packed tree of its padded batch; nothing here imports TRL."""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..credit.deferred import DeferredCredit
from ..hf.modes import one_mode
from ..hf.verify import check_trainable
from ..losses.ragged import LossBatch
from ..rows import Rows
from ..scoring.training_forward import packed_forward
from .trl_credit import ROW, unpadded

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


@torch.compiler.disable  # a tree has its own shape in each micro-batch and is laid out on the host
def loss_of_packed_rows(
    model: PreTrainedModel,
    *,
    inputs: dict[str, Any],
    options: dict[str, Any],
    head_in_float32: bool,
    credit: DeferredCredit | None = None,
) -> LossAndMetrics:
    """Compute the same loss from one packed forward, which feeds each prompt once and no padding.

    Args:
        inputs: TRL's `prompt_ids`, `prompt_mask`, `completion_mask`, padded as TRL pads.
        options: those of `linear_policy_loss`, (B, T) as there; `targets` are TRL's completions.
        head_in_float32: the head's products in float32, outside autocast.
        credit: that of the generation batch, if these rows get theirs from this forward or have had it from an earlier
            one; None if `advantages` are those to train on.
    """
    options = dict(options)
    padded = options.pop("targets")
    if credit is None:
        places = []
        rows = Rows.from_padded(inputs["prompt_ids"], inputs["prompt_mask"], padded, inputs["completion_mask"])
    else:
        places = inputs[ROW].tolist()
        rows = credit.rows.take(places)
    columns: dict[str, Any] = {
        name: None if (column := options.pop(name)) is None else unpadded(column, rows)
        for name in ("old_logprobs", "advantages", "weights", "mask", "ref_logprobs", "sampling_logprobs")
    }
    due = credit if credit is not None and credit.is_due(places) else None
    if credit is not None and due is None:
        columns["advantages"] = credit.credited(places)
    batch = LossBatch.of(rows, **columns, **options)
    needed, trained = batch.needed(), batch.trained.tolist()
    if due is not None:  # estimators that compare completions may give an advantage to one that had none
        reads = due.reads(places)
        needed = [n if whole else count for n, count, whole in zip(rows.lengths, needed, reads, strict=True)]
        trained = [one or whole for one, whole in zip(trained, reads, strict=True)]
    keep_states = due is not None and due.config.continues
    forward = packed_forward(model, rows, needed=needed, trained=trained, keep_states=keep_states)
    if due is not None:
        due.by_forward(places, forward)
        batch = LossBatch.of(rows, **columns | {"advantages": due.credited(places)}, **options)
    with torch.autocast(forward.device.type, enabled=False) if head_in_float32 else nullcontext():
        loss, metrics, _ = forward.policy_loss(batch)
    size = inputs["prompt_ids"].numel() + padded.numel()
    fed = {"packed/tokens_fed": torch.tensor(forward.tokens_fed), "packed/tokens_padded": torch.tensor(size)}
    return loss, metrics | fed


def prompts_together(micro_batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort the rows of micro-batches by the first occurrence of their prompt; number and sizes of them stay."""
    first: dict[tuple[bytes, bytes], int] = {}
    groups = [
        first.setdefault((ids.numpy().tobytes(), mask.numpy().tobytes()), len(first))
        for micro in micro_batches
        for ids, mask in zip(micro["prompt_ids"].cpu(), micro["prompt_mask"].cpu(), strict=True)
    ]
    order = torch.tensor(groups).argsort(stable=True).split([len(micro["prompt_ids"]) for micro in micro_batches])
    sorted_batches = [dict(micro) for micro in micro_batches]
    for name, value in micro_batches[0].items():
        parts = [micro[name] for micro in micro_batches]
        if isinstance(value, Tensor) and value.dim():
            whole = torch.cat(parts)
            for micro, places in zip(sorted_batches, order, strict=True):
                micro[name] = whole[places.to(whole.device)]
        elif isinstance(value, list):
            rows = list(chain.from_iterable(parts))
            for micro, places in zip(sorted_batches, order, strict=True):
                micro[name] = [rows[i] for i in places]
    return sorted_batches


def check_trains_packed(model: PreTrainedModel) -> None:
    """Check as `check_trainable` does, in training mode, whatever mode the model is in."""
    with one_mode(model, training=True):
        check_trainable(model)
