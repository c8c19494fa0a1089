"""Replace TRL's loss by the same loss from a packed tree of its padded batch; nothing here imports TRL."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..batch import Batch
from ..credit.deferred import DeferredCredit
from ..loss.policy import policy_loss
from ..loss.ragged import LossBatch
from ..loss.types import weights_sequences
from ..model.check.verify import check_trainable
from ..model.modes import one_mode
from ..model.parts import context_length, input_device, vocab_size
from ..model.sharded.ranks import inside
from ..rows import Rows, pad_rows
from ..scoring.packed import packed_forward
from .trl_credit import KEPT, ROW, of_first_tokens, unpadded

_MOVED = 0.01
"""Nats: log-probs that differ by more come from other positions, or from rounding, where either may be taken."""

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


@torch.compiler.disable  # a tree has its own shape in each micro-batch and is laid out on the host
def loss_of_packed_rows(
    model: PreTrainedModel,
    *,
    inputs: dict[str, Any],
    options: dict[str, Any],
    head_in_float32: bool,
    entropy_coef: float = 0.0,
    high_entropies: Callable[[Tensor, Tensor], Tensor] | None = None,
    router_coef: float | None = None,
    scale: Tensor | float = 1.0,
    credit: DeferredCredit | None = None,
) -> LossAndMetrics:
    """Compute the same loss from one packed forward, which feeds each prompt once and no padding.

    Args:
        inputs: TRL's `prompt_ids`, `prompt_mask`, `completion_mask`, padded as TRL pads; `KEPT`, where a sampler cut
            its distributions off.
        options: those of `linear_policy_loss`, (B, T) as there; `targets` are TRL's completions.
        head_in_float32: the head's products in float32, outside autocast.
        entropy_coef: factor of the mean entropy, which is subtracted.
        high_entropies: finds the tokens (B, T) that policy term and entropy act on, by entropies and mask (B, T); every
            process calls it.
        router_coef: factor of the routers' loss; None for a model without.
        scale: of these two terms in the loss.
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
        rows = credit.batch.rows.take(places)
    names = ("old_logprobs", "advantages", "weights", "mask", "ref_logprobs", "sampling_logprobs")
    columns = {name: column for name in names if (column := options.pop(name)) is not None}
    kept = of_first_tokens(inputs[KEPT], rows) if KEPT in inputs else None
    batch = Batch(rows, kept_tokens=kept, **{name: unpadded(column, rows) for name, column in columns.items()})
    counted = sum(int(row.sum()) for row in batch.mask or ())
    options["entropy_coef"] = entropy_coef * scale / max(counted, 1) if entropy_coef else 0.0
    due = credit if credit is not None and credit.is_due(places) else None
    if credit is not None and due is None:
        batch = batch.with_columns(advantages=credit.credited(places))
    plain = LossBatch.of(batch, **options)
    needed, trained = plain.needed(), plain.trained.tolist()
    if due is not None:  # estimators that compare completions may give an advantage to one that had none
        reads = due.reads(places)
        needed = [n if whole else count for n, count, whole in zip(rows.lengths, needed, reads, strict=True)]
        trained = [one or whole for one, whole in zip(trained, reads, strict=True)]
    keep_states = due is not None and due.config.continues
    forward = packed_forward(
        model, rows, needed=needed, trained=trained, keep_states=keep_states, router_loss=router_coef is not None,
        foreseen=None if due is None else due.foreseen(places, model),
    )  # fmt: skip
    in_heads_mode = partial(torch.autocast, forward.device.type, enabled=False) if head_in_float32 else nullcontext
    if high_entropies is not None:  # before branches, of which processes feed different numbers
        with in_heads_mode(), torch.set_grad_enabled(torch.is_grad_enabled() and entropy_coef != 0):
            values = forward.logprobs(options["temperature"], return_entropy=True, kept_tokens=batch.kept_tokens)
        mask = plain.columns["mask"].to(forward.device)
        logprobs, entropies = (torch.where(mask, pad_rows(each, mask.shape[1]), 0) for each in values)  # type: ignore[arg-type]
        if (ranks := inside(model)) is not None:
            ranks.largest(0)  # raises if a process has failed, for whose entropies the others would wait
        high = high_entropies(entropies.detach().float(), mask)
    if due is not None:
        due.by_forward(places, forward)
        batch = batch.with_columns(advantages=due.credited(places))
    figures = {}
    if high_entropies is not None:
        whole = LossBatch.of(batch, **options)
        figures, factors = _metrics_of_all(whole, logprobs, entropies), unpadded(_acting(high, whole), rows)
        own: Sequence[Any] = batch.weights or [1.0] * len(rows)
        batch = batch.with_columns(weights=[factor * row for factor, row in zip(factors, own, strict=True)])
        options |= {"entropy_coef": 0.0, "compute_entropy": False}
    with in_heads_mode():
        loss, metrics, _ = forward.policy_loss(batch, **options)
    metrics |= figures
    if high_entropies is not None:
        metrics |= {"bonus/entropy": (entropies * high).sum() / high.sum().clamp(min=1), "bonus/tokens": high.sum()}
        loss = loss - entropy_coef * scale * metrics["bonus/entropy"]
    elif "entropy" in metrics:
        metrics |= {"bonus/entropy": metrics["entropy"].nan_to_num(nan=0.0), "bonus/tokens": torch.tensor(counted)}
    metrics["policy_loss"] = loss + entropy_coef * scale * metrics.get("bonus/entropy", 0.0)
    if router_coef is not None:
        routers = forward.router_loss()
        loss, metrics["aux_loss"] = loss + router_coef * scale * routers, routers
    size = inputs["prompt_ids"].numel() + padded.numel()
    sizes = {"packed/tokens_fed": forward.tokens_fed, "packed/tokens_padded": size, "tokens": counted}
    fed = {name: torch.tensor(value) for name, value in sizes.items()}
    return loss, {name: value.detach() for name, value in (metrics | fed).items()}


def _metrics_of_all(batch: LossBatch, logprobs: Tensor, entropies: Tensor) -> dict[str, Tensor]:
    """Compute the metrics of a loss that all tokens are in."""
    tensors, _ = batch.to(logprobs.device)
    inputs: dict[str, Any] = {name: tensors[name] for name in ("weights", "ref_logprobs", "sampling_logprobs")}
    inputs |= {"entropies": entropies.detach(), "loss_options": batch.options["loss_options"].but(entropy_coef=0.0)}
    positional = (tensors[name] for name in ("old_logprobs", "advantages", "mask"))
    return policy_loss(logprobs.detach(), *positional, **inputs)[1]  # type: ignore[arg-type]


def _acting(high: Tensor, batch: LossBatch) -> Tensor:
    """Return the factors (B, T) of the policy terms of tokens: 1 where `high`; their mean in a row with one ratio."""
    high, options = high.cpu().to(batch.columns["advantages"].dtype), batch.options["loss_options"]
    if not weights_sequences(options.loss_type, options.importance_sampling_level):
        return high
    return (high.sum(1, keepdim=True) / batch.columns["mask"].sum(1, keepdim=True).clamp(min=1)).expand_as(high)


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


def check_trains_packed(model: PreTrainedModel, *, router_loss: bool = False) -> None:
    """Check as `check_trainable` does, in training mode, whatever mode the model is in."""
    with one_mode(model, training=True):
        check_trainable(model, router_loss=router_loss)


@torch.no_grad()
def is_moved_by_padding(model: PreTrainedModel) -> bool:
    """Whether padding on the left moves a row's positions: learned ones are counted from the padding if none are given.

    TRL gives none. Positions that are known to be relative, or read from the mask, are the same to rounding.
    """
    width = min(32, context_length(model) or 32)
    ids = torch.arange(width, device=input_device(model)).remainder(vocab_size(model))[None]
    mask, half = torch.ones_like(ids), width // 2
    with one_mode(model, training=False):
        alone = model(input_ids=ids[:, half:], attention_mask=mask[:, half:]).logits
        padded = model(input_ids=ids, attention_mask=mask.index_fill(1, ids.new_tensor(range(half)), 0)).logits
    alone, padded = (logits.float().log_softmax(-1) for logits in (alone, padded[:, half:]))
    return not bool((alone - padded).abs().max() <= _MOVED)
