"""Replace TRL's loss by the same loss from a packed tree of its padded batch; nothing here imports TRL."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..batch import Batch
from ..credit.deferred import DeferredCredit
from ..loss.ragged import LossBatch
from ..ops.kept_tokens import KeptTokens
from ..rows import Rows, pad_rows
from ..scoring.packed import packed_forward
from .trl_credit import KEPT, ROW, of_first_tokens, unpadded


@torch.compiler.disable  # a tree has its own shape in each micro-batch and is laid out on the host
def loss_of_packed_rows(
    model: PreTrainedModel,
    *,
    inputs: dict[str, Any],
    options: dict[str, Any],
    head_in_float32: bool,
    router_coef: float | None = None,
    scale: Tensor | float = 1.0,
    credit: DeferredCredit | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the same loss from one packed forward, which feeds each prompt once and no padding.

    `inputs` are TRL's padded rows; `options` those of `linear_policy_loss`, (B, T) as there, with TRL's completions as
    `targets`. `router_coef * scale` weighs the routers' loss. `credit` is that of the generation batch, if these rows
    get theirs from this forward or had it from an earlier one; None if `advantages` are those to train on.
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
        model, rows, needed=needed, trained=trained, keep_states=keep_states, router_loss=router_coef is not None
    )
    if due is not None:
        due.by_forward(places, forward)
        plain = plain.credited(advantages=due.credited(places))
    with _heads_mode(forward.device, head_in_float32):
        loss, metrics, _ = forward.policy_loss(plain)
    if router_coef is not None:
        routers = forward.router_loss()
        loss, metrics["aux_loss"] = loss + router_coef * scale * routers, routers
    size = inputs["prompt_ids"].numel() + padded.numel()
    sizes = {"packed/tokens_fed": forward.tokens_fed, "packed/tokens_padded": size, "tokens": counted}
    fed = {name: torch.tensor(value) for name, value in sizes.items()}
    return loss, {name: value.detach() for name, value in (metrics | fed).items()}


@torch.compiler.disable
def logprobs_of_packed_rows(
    model: PreTrainedModel,
    *,
    inputs: dict[str, Any],
    kept: Sequence[KeptTokens] | None,
    temperature: float,
    head_in_float32: bool,
    entropies: bool,
    routers: bool,
) -> tuple[list[Tensor | None], int]:
    """Compute log-probs (B, T), entropies and the routers' loss, if wanted, as TRL's padded forward; and tokens fed."""
    rows = Rows.from_padded(**inputs)
    forward = packed_forward(model, rows, router_loss=routers)
    kept = None if kept is None else of_first_tokens(kept, rows)
    with _heads_mode(forward.device, head_in_float32):
        values = forward.logprobs(temperature, return_entropy=entropies, kept_tokens=kept)
    width = inputs["completion_ids"].shape[1]
    columns: list[Any] = [pad_rows(each, width) for each in (values if isinstance(values, tuple) else (values,))]
    columns += [None] * (2 - len(columns))
    return [*columns, forward.router_loss() if routers else None], forward.tokens_fed


def _heads_mode(device: torch.device, head_in_float32: bool) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, enabled=False) if head_in_float32 else nullcontext()


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
