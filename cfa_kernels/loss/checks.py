"""Check the columns of a policy loss, tensors as the formulas take them."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.row_softmax import compute_dtype
from .linear import contributing
from .options import LossOptions, made_options, should_validate
from .token_loss import Tokens
from .types import LOSS_TYPES, weights_sequences

_INPUTS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "mask": (None, ("0 or 1",)),
    "advantages": ("floating point", ("finite",)),
    "old_logprobs": ("floating point", ("finite",)),
    "weights": ("floating point", ("finite", ">= 0")),
    "ref_logprobs": ("floating point", ("finite",)),
    "sampling_logprobs": ("floating point", ("finite or nan",)),
}
"""Tensors (B, T), advantages also (B,): their dtype, if it matters, and the bounds of values that the mask counts."""
_NEEDED = ("mask", "advantages")
_BOUNDS: dict[str, Callable[[Tensor], Tensor]] = {
    "finite": torch.isfinite,
    "finite or nan": lambda tensor: ~tensor.isinf(),
    ">= 0": lambda tensor: tensor >= 0,
    "0 or 1": lambda tensor: (tensor == 0) | (tensor == 1),
}


class CheckedBatch(NamedTuple):
    """Checked input of a loss; the loss is `sum(token loss * scale) - entropy_scale * sum(entropy)`."""

    keep: Tensor  # (B, T) bool, the mask
    tokens: Tokens  # (B, T) each, in the compute dtype, 0 where the mask is 0
    entropy_scale: Tensor | None  # 0-d
    options: LossOptions


def check_batch(
    source: Tensor, shape: torch.Size, old_logprobs: Tensor | None, advantages: Tensor, mask: Tensor, given: Any
) -> CheckedBatch:
    """Check all but the log-probs or logits, `source` of `shape` (B, T) at first; `given` is made empty."""
    device, dtype = source.device, compute_dtype(source.dtype)
    columns: dict[str, Tensor | None] = {"mask": mask, "advantages": advantages, "old_logprobs": old_logprobs}
    columns |= {name: given.pop(name, None) for name in _INPUTS if name not in columns}
    options = made_options(given)
    if 0 in shape:
        raise ValueError(f"a loss needs at least one row and one token, got (B, T) = {tuple(shape)}")
    if options.beta != 0 and columns["ref_logprobs"] is None:
        raise ValueError(f"beta={options.beta} needs ref_logprobs (B, T), got None")
    for name in ("sampling_mode", "off_policy_mask_threshold"):
        if (value := getattr(options, name)) is not None and columns["sampling_logprobs"] is None:
            raise ValueError(f"{name}={value!r} needs sampling_logprobs (B, T), got None")
    inputs: dict[str, Any] = {name: one for name, one in columns.items() if one is not None or name in _NEEDED}
    for name, tensor in inputs.items():
        shapes = [shape[:1], shape] if name == "advantages" else [shape]
        check_tensor(name, tensor, shapes, device, _INPUTS[name][0])
    keep = mask != 0
    columns["advantages"] = inputs["advantages"] = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    if should_validate(options.validate, mask):
        for name, tensor in inputs.items():
            for bound in _INPUTS[name][1]:
                check_values(name, tensor, keep, bound)
        check_weights(columns["weights"], keep, options)

    items, sequences = options.num_items_in_batch, options.num_sequences_in_batch
    items = keep.sum() if items is None else items
    items = items.reshape(()).clamp(min=1) if isinstance(items, Tensor) else max(items, 1)
    sequences = keep.size(0) if sequences is None else sequences
    sequences = sequences.reshape(()) if isinstance(sequences, Tensor) else sequences
    divisor = LOSS_TYPES[options.loss_type].divisor(
        keep.to(dtype), items, sequences, options.max_completion_length or 0
    )
    entropy_scale, coefficient = None, options.entropy_coef
    if isinstance(coefficient, Tensor) or coefficient != 0:
        if not isinstance(coefficient, Tensor):  # it is written there: to send it would be a wait
            coefficient = torch.full((), coefficient, dtype=dtype, device=device)
        entropy_scale = coefficient.to(device, dtype) / items
    del columns["mask"]
    tokens = Tokens(scale=keep.to(dtype) / divisor, **columns)  # type: ignore[arg-type]
    return CheckedBatch(keep, tokens.map(lambda column: counted(column.detach(), keep, dtype)), entropy_scale, options)


def counted(tensor: Tensor, keep: Tensor, dtype: torch.dtype) -> Tensor:
    """Broadcast `tensor` to (B, T) in `dtype`, with 0, also in the gradient, where tokens are not counted."""
    return torch.where(keep, tensor, 0).to(dtype)


def check_tensor(
    name: str,
    tensor: Tensor,
    shapes: list[torch.Size] | None = None,
    device: torch.device | None = None,
    dtype: str | None = "floating point",
) -> None:
    """Check type, dtype, shape and device of a tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if dtype is not None and not (
        tensor.is_floating_point() if dtype == "floating point" else str(tensor.dtype) == dtype
    ):
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if shapes is not None and tensor.shape not in shapes:
        wanted = " or ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device} as the log-probs or logits are, got {tensor.device}")


def check_values(name: str, tensor: Tensor, keep: Tensor, bound: str, holds: Tensor | None = None) -> None:
    """Raise `ValueError` for the first token of `keep` (B, T) outside `bound`, a key of `_BOUNDS` or what `holds`."""
    bad = keep & ~(_BOUNDS[bound](tensor) if holds is None else holds)
    if bad.any():
        row, token = bad.nonzero()[0].tolist()
        value = tensor.expand_as(bad)[row, token].item()
        where = "" if name == "mask" else " where the mask is 1"
        raise ValueError(f"{name} must be {bound}{where}; row {row}, token {token} is {value}")


def check_weights(weights: Tensor | None, keep: Tensor, options: LossOptions) -> None:
    """Raise `ValueError` for weights (B, T) that differ within a row of `keep` if only their sum acts."""
    if weights is None or not weights_sequences(options.loss_type, options.importance_sampling_level):
        return
    keep = keep.to(weights.device)
    low, high = weights.masked_fill(~keep, math.inf).amin(1), weights.masked_fill(~keep, -math.inf).amax(1)
    if (low < high).any():
        row = int((low < high).nonzero()[0])
        raise ValueError(
            f"weights must be equal within a row at importance_sampling_level='sequence', where only their sum acts; "
            f"row {row} holds {low[row].item()} to {high[row].item()}; use importance_sampling_level='sequence_token'"
        )


def check_targets(targets: Tensor, keep: Tensor, vocabulary: int, validate: bool) -> None:
    """Check that targets are (B, T) int64 and, if `validate`, in the vocabulary."""
    check_tensor("targets", targets, [keep.shape], keep.device, "torch.int64")
    if validate:
        check_values("targets", targets, keep, f"in [0, {vocabulary})", (targets >= 0) & (targets < vocabulary))


def check_linear(hidden: Tensor, lm_head: Tensor, bias: Tensor | None, rows: Tensor | None) -> None:
    """Check that states (B, T, H), or (M, H) of the M `rows` only, head (V, H) and bias (V,) fit together."""
    check_tensor("hidden", hidden)
    if hidden.dim() not in (2, 3) or not hidden.size(-1):
        raise ValueError(f"hidden must be (B, T, H), or (M, H) for M rows, got shape {tuple(hidden.shape)}")
    check_tensor("lm_head", lm_head)
    if rows is not None:
        check_tensor("rows", rows, dtype="torch.int64")
        check_tensor("rows", rows, [torch.Size((rows.numel(),))], dtype=None)
    if hidden.dim() == 2 and (rows is None or rows.shape != hidden.shape[:1]):
        got = None if rows is None else tuple(rows.shape)
        raise ValueError(f"hidden of shape {tuple(hidden.shape)} needs rows of shape ({len(hidden)},), got {got}")
    check_tensor("lm_head", lm_head, [torch.Size((max(len(lm_head), 1), hidden.size(-1)))], hidden.device)
    if bias is not None:
        check_tensor("bias", bias, [lm_head.shape[:1]], hidden.device)


def check_rows(rows: Tensor, batch: CheckedBatch, with_entropy: bool, validate: bool) -> None:
    """Check that `rows` of `linear_policy_loss`, if `validate`, are indices that leave no token out."""
    if not validate:
        return
    rows = rows.to(batch.keep.device)
    expected = contributing(batch.tokens, joins_tokens=batch.options.joins_tokens, every=with_entropy).flatten()
    if rows.numel() and (rows.min() < 0 or rows.max() >= expected.numel()):
        raise ValueError(f"rows must be in [0, {expected.numel()}), got {rows.min().item()} to {rows.max().item()}")
    counts = torch.bincount(rows, minlength=expected.numel())
    for index in ((counts > 1) | (expected & (counts == 0))).nonzero()[:1].flatten().tolist():
        row, token = divmod(index, batch.keep.size(1))
        raise ValueError(
            "rows must hold each token that contributes to the loss once; "
            f"row {row}, token {token} is there {int(counts[index])} times"
        )
