"""Check the input of a policy loss: the options that all forms share, and tensors as the formulas take them.

Errors name the argument, the row and the value.
"""

import math
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from ..ops.linear_policy_loss import contributing
from ..ops.row_softmax import compute_dtype
from ..ops.token_loss import PolicyOptions, Tokens
from ..options import NOT_NEGATIVE, POSITIVE

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")
LEVELS = ("token", "sequence")


class LossOptions(TypedDict, total=False):
    """Keyword options of all three losses; `policy_loss` documents them and their defaults."""

    weights: Tensor | None
    ref_logprobs: Tensor | None
    epsilon: float
    epsilon_high: float
    delta: float | None
    beta: float
    loss_type: str
    importance_sampling_level: str
    num_items_in_batch: Tensor | float | None
    max_completion_length: int | None
    num_sequences_in_batch: Tensor | float | None
    use_bias_correction_kl: bool
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    entropy_coef: float
    validate: bool | None


_KNOWN = frozenset(LossOptions.__annotations__)


class Batch(NamedTuple):
    """Checked input of a loss; the loss is `sum(token loss * scale) - entropy_scale * sum(entropy)`."""

    keep: Tensor  # (B, T) bool, the mask
    tokens: Tokens  # (B, T) each, in the compute dtype, 0 where the mask is 0
    entropy_scale: Tensor | None  # 0-d
    options: PolicyOptions


def check_batch(
    function: str,
    source: Tensor,
    shape: torch.Size,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    options: LossOptions,
) -> Batch:
    """Check everything but the log-probs (or logits) themselves, and bring it into one form.

    Args:
        function: name of the loss that was called, for the error about an unknown option.
        source: log-probs, logits or hidden states, whose device all else is on; the loss has their compute dtype.
        shape: (B, T).
        old_logprobs, advantages, mask, options: as `policy_loss` takes them.

    Returns:
        The batch; tokens outside the mask hold 0, whatever they held before.

    Raises:
        ValueError: a wrong option, shape, device or value.
        TypeError: an unknown option, or a tensor of a wrong dtype.
    """
    device, dtype = source.device, compute_dtype(source.dtype)
    if unknown := options.keys() - _KNOWN:
        raise TypeError(f"{function}() got an unexpected keyword argument {min(unknown)!r}")
    if 0 in shape:
        raise ValueError(f"a loss needs at least one row and one token, got (B, T) = {tuple(shape)}")
    loss_type, validate = _loss_type(options), options.get("validate")
    policy = _policy_options(options, loss_type)
    weights, ref_logprobs = options.get("weights"), options.get("ref_logprobs")
    if policy.beta != 0 and ref_logprobs is None:
        raise ValueError(f"beta={policy.beta} needs ref_logprobs (B, T), got None")
    num_items = _check_count("num_items_in_batch", options.get("num_items_in_batch"), validate, zero=True)
    num_sequences = _check_count("num_sequences_in_batch", options.get("num_sequences_in_batch"), validate, zero=False)
    entropy_coef = options.get("entropy_coef", 0.0)
    if not abs(entropy_coef) < math.inf:
        raise ValueError(f"entropy_coef must be finite, got {entropy_coef}")

    check_tensor("mask", mask, [shape], device, floating=False)
    check_tensor("advantages", advantages, [shape[:1], shape], device)
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    optional = {"old_logprobs": old_logprobs, "weights": weights, "ref_logprobs": ref_logprobs}
    for name, tensor in optional.items():
        if tensor is not None:
            check_tensor(name, tensor, [shape], device)
    keep = mask != 0
    if should_validate(validate, mask):
        _check_rows("mask", mask, keep & (mask != 1), "must be 0 or 1")
        for name, tensor in ({"advantages": advantages} | optional).items():
            if tensor is not None:
                check_finite(name, tensor, keep)
        if weights is not None:
            _check_rows("weights", weights, keep & (weights < 0), "must be >= 0")
            check_weights(weights, keep, loss_type, policy.level)

    length = options.get("max_completion_length") or 0
    scale = _token_scale(keep, dtype, loss_type, num_items, length, num_sequences)
    entropy_scale = None
    if entropy_coef != 0:
        count = keep.sum() if num_items is None else num_items
        entropy_scale = torch.full((), entropy_coef, dtype=dtype, device=device) / _at_least_one(count)
    tokens = Tokens(old_logprobs, advantages, weights, ref_logprobs, scale)
    return Batch(keep, tokens.map(lambda tensor: counted(tensor.detach(), keep, dtype)), entropy_scale, policy)


def _loss_type(options: LossOptions) -> str:
    loss_type, length = options.get("loss_type", "dapo"), options.get("max_completion_length")
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type must be one of {LOSS_TYPES}, got {loss_type!r}")
    if loss_type == "dr_grpo" and (length is None or length <= 0):
        raise ValueError(f"loss_type='dr_grpo' needs max_completion_length > 0, got {length}")
    return loss_type


def _policy_options(options: LossOptions, loss_type: str) -> PolicyOptions:
    """Build the options that the formula of a token takes; defaults of numbers are those of `PolicyOptions`."""
    numbers: dict[str, Any] = {name: value for name, value in options.items() if name in PolicyOptions._fields}
    if numbers.get("delta", 0.0) is None:
        del numbers["delta"]
    found = PolicyOptions(
        surrogate=loss_type if loss_type in ("cispo", "sapo") else "clip",
        level=check_level(options.get("importance_sampling_level", "token")),
        **numbers,
    )
    NOT_NEGATIVE.check(epsilon=found.epsilon, epsilon_high=found.epsilon_high, beta=found.beta)
    POSITIVE.check(
        delta=numbers.get("delta"),
        sapo_temperature_pos=found.sapo_temperature_pos,
        sapo_temperature_neg=found.sapo_temperature_neg,
    )
    return found


def _check_count(
    name: str, value: Tensor | float | None, validate: bool | None, *, zero: bool
) -> Tensor | float | None:
    """Check a total of the step, a number or 0-d; its value is read only where that does not wait for a device."""
    if value is None:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must be a single number, got shape {tuple(value.shape)}")
        value = value.reshape(())
        if not should_validate(validate, value):
            return value
        number = value.item()
    elif isinstance(value, int | float):
        number = value
    else:
        raise TypeError(f"{name} must be a number or a tensor, got {type(value).__name__}")
    if not (0 < number < math.inf or (zero and number == 0)):
        raise ValueError(f"{name} must be {'>=' if zero else '>'} 0 and finite, got {number}")
    return value


def _token_scale(
    keep: Tensor,
    dtype: torch.dtype,
    loss_type: str,
    num_items: Tensor | float | None,
    max_completion_length: int,
    num_sequences: Tensor | float | None,
) -> Tensor:
    """Compute the factor (B, T) of each token's loss in the sum that is the loss; 0 where the mask is 0."""
    mask = keep.to(dtype)
    sequences = keep.size(0) if num_sequences is None else num_sequences
    if loss_type in ("grpo", "sapo"):
        return mask / (mask.sum(1, keepdim=True).clamp(min=1) * sequences)
    if loss_type == "bnpo":
        return mask / mask.sum().clamp(min=1)
    if loss_type == "dr_grpo":
        return mask / (sequences * max_completion_length)
    if loss_type == "luspo":
        return mask / sequences
    return mask / _at_least_one(mask.sum() if num_items is None else num_items)  # dapo, cispo


def _at_least_one(count: Tensor | float) -> Tensor | float:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def counted(tensor: Tensor, keep: Tensor, dtype: torch.dtype) -> Tensor:
    """Broadcast `tensor` to (B, T) in `dtype`, with 0, also in the gradient, where tokens are not counted."""
    return torch.where(keep, tensor, 0).to(dtype)


# Checks that several losses share


def should_validate(validate: bool | None, tensor: Tensor) -> bool:
    """Whether to check values: by default where that neither waits for a GPU nor breaks a compiled graph."""
    if validate is None:
        return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
    return validate


def check_level(level: str) -> str:
    """Return `level`; raise `ValueError` unless it is one of `LEVELS`."""
    if level not in LEVELS:
        raise ValueError(f"importance_sampling_level must be one of {LEVELS}, got {level!r}")
    return level


def check_float(name: str, tensor: Tensor) -> None:
    """Raise `TypeError` unless `tensor` is a floating-point tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {tensor.dtype}")


def check_tensor(
    name: str, tensor: Tensor, shapes: list[torch.Size], device: torch.device, floating: bool = True
) -> None:
    """Raise `TypeError` as `check_float`, if `floating`; `ValueError` for another shape or device."""
    if floating:
        check_float(name, tensor)
    elif not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.shape not in shapes:
        wanted = " or ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} as the log-probs or logits are, got {tensor.device}")


def check_finite(name: str, tensor: Tensor, keep: Tensor) -> None:
    """Raise `ValueError` for the first infinite or nan element where `keep` is true."""
    _check_rows(name, tensor, keep & ~torch.isfinite(tensor), "must be finite")


def _check_rows(name: str, tensor: Tensor, bad: Tensor, rule: str) -> None:
    """Raise for the first true element of `bad` (B, T); `tensor` is (B, T) or (B, 1)."""
    if not bad.any():
        return
    row, token = bad.nonzero()[0].tolist()
    value = tensor.expand_as(bad)[row, token].item()
    raise ValueError(f"{name} {rule} where the mask is 1; row {row}, token {token} is {value}")


def weights_sequences(loss_type: str, level: str) -> bool:
    """Whether only the sum of a row's weights acts, since its tokens share the ratio that carries the gradient."""
    return level == "sequence" and loss_type != "cispo"


def check_weights(weights: Tensor, keep: Tensor, loss_type: str, level: str) -> None:
    """Raise `ValueError` for weights (B, T) that differ within a row of `keep` if only their sum acts."""
    if not weights_sequences(loss_type, level):
        return
    low, high = weights.masked_fill(~keep, math.inf).amin(1), weights.masked_fill(~keep, -math.inf).amax(1)
    if (low < high).any():
        row = int((low < high).nonzero()[0])
        raise ValueError(
            "weights must be equal within a row at importance_sampling_level='sequence', which has one ratio for the "
            f"row, so that only their sum acts; row {row} holds {low[row].item()} to {high[row].item()}; "
            "use importance_sampling_level='token'"
        )


def check_targets(targets: Tensor, keep: Tensor, vocabulary: int, checked: bool) -> None:
    """Raise `ValueError` or `TypeError` unless targets are (B, T) int64 and, if `checked`, in the vocabulary."""
    check_tensor("targets", targets, [keep.shape], keep.device, floating=False)
    if targets.dtype != torch.int64:
        raise TypeError(f"targets must be int64, got {targets.dtype}")
    if checked:
        outside = (targets < 0) | (targets >= vocabulary)
        _check_rows("targets", targets, keep & outside, f"must be in [0, {vocabulary})")


def check_linear(hidden: Tensor, lm_head: Tensor, bias: Tensor | None, rows: Tensor | None) -> None:
    """Raise `ValueError` or `TypeError` unless hidden states, head (V, H) and bias (V,) fit together.

    The states are (B, T, H), or (M, H) of the M `rows` only.
    """
    for name, tensor, dims, sizes in (
        ("hidden", hidden, "(B, T, H), or (M, H) for M rows", (2, 3)),
        ("lm_head", lm_head, "(V, H)", (2,)),
    ):
        check_float(name, tensor)
        if tensor.dim() not in sizes:
            raise ValueError(f"{name} must be {dims}, got shape {tuple(tensor.shape)}")
        if 0 in tensor.shape[-2 if name == "lm_head" else -1 :]:
            raise ValueError(f"{name} must not be empty, got shape {tuple(tensor.shape)}")
    if hidden.dim() == 2 and (rows is None or rows.shape != hidden.shape[:1]):
        given = None if rows is None else tuple(rows.shape)
        raise ValueError(f"hidden of shape {tuple(hidden.shape)} needs rows of shape ({len(hidden)},), got {given}")
    if hidden.size(-1) != lm_head.size(1):
        raise ValueError(f"hidden has H={hidden.size(-1)}, lm_head has H={lm_head.size(1)}")
    if hidden.device != lm_head.device:
        raise ValueError(f"lm_head must be on {hidden.device} like hidden, got {lm_head.device}")
    if bias is not None:
        check_tensor("bias", bias, [lm_head.shape[:1]], hidden.device)


def check_given_rows(rows: Tensor, batch: Batch, with_entropy: bool, checked: bool) -> None:
    """Raise `ValueError` unless `rows` of `linear_policy_loss` are indices that, if `checked`, leave no token out."""
    if rows.dim() != 1 or rows.dtype != torch.int64:
        raise ValueError(f"rows must be 1-D int64, got {rows.dtype} of shape {tuple(rows.shape)}")
    if rows.device != batch.keep.device:
        raise ValueError(f"rows must be on {batch.keep.device} as the mask is, got {rows.device}")
    if not checked:
        return
    missing = contributing(batch.tokens, batch.options, with_entropy=with_entropy).flatten()
    if rows.numel() and (rows.min() < 0 or rows.max() >= missing.numel()):
        raise ValueError(f"rows must be in [0, {missing.numel()}), got {rows.min().item()} to {rows.max().item()}")
    if rows.unique().numel() != rows.numel():
        raise ValueError(f"rows must not repeat, got {rows.numel()} of which {rows.unique().numel()} differ")
    missing[rows] = False
    if missing.any():
        row, token = divmod(int(missing.nonzero()[0]), batch.keep.size(1))
        raise ValueError(f"rows leaves out row {row}, token {token}, which contributes to the loss")
