"""Check the input of a policy loss: its options, and tensors as the formulas take them."""

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Annotated, Any, NamedTuple, TypedDict, get_args, get_type_hints

import torch
from torch import Tensor

from ..ops.row_softmax import compute_dtype
from ..options import NOT_NEGATIVE, POSITIVE, Finite, NotNegative
from .linear import contributing
from .token_loss import CORRECTIONS, KL_ESTIMATORS, NUMBERS, PolicyOptions, Tokens
from .types import LEVELS, LOSS_TYPES, Count


class LossOptions(TypedDict, total=False):
    """Keyword options of all three losses; `policy_loss` documents them and their defaults."""

    weights: Tensor | None
    ref_logprobs: Tensor | None
    sampling_logprobs: Tensor | None
    sampling_mode: str | None
    sampling_clip_min: NotNegative | None
    sampling_clip_max: Annotated[float, POSITIVE] | None
    off_policy_mask_threshold: NotNegative | None
    epsilon: NotNegative
    epsilon_high: NotNegative
    delta: Annotated[float, POSITIVE] | None
    beta: NotNegative
    kl_estimator: str
    loss_type: str
    importance_sampling_level: str
    num_items_in_batch: Count | None
    max_completion_length: Annotated[int, NOT_NEGATIVE] | None
    num_sequences_in_batch: Count | None
    use_bias_correction_kl: bool
    sapo_temperature_pos: Annotated[float, POSITIVE]
    sapo_temperature_neg: Annotated[float, POSITIVE]
    vespo_k_pos: NotNegative
    vespo_lambda_pos: NotNegative
    vespo_k_neg: NotNegative
    vespo_lambda_neg: NotNegative
    entropy_coef: Finite | Tensor
    validate: bool | None


_RANGES = {
    name: part.__metadata__[0]
    for name, hint in get_type_hints(LossOptions, include_extras=True).items()
    for part in (hint, *get_args(hint))
    if hasattr(part, "__metadata__")
}
_COUNTS = {"num_items_in_batch": NOT_NEGATIVE, "num_sequences_in_batch": POSITIVE}
_INPUTS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "mask": (None, ("0 or 1",)),
    "advantages": ("floating point", ("finite",)),
    "old_logprobs": ("floating point", ("finite",)),
    "weights": ("floating point", ("finite", ">= 0")),
    "ref_logprobs": ("floating point", ("finite",)),
    "sampling_logprobs": ("floating point", ("finite or nan",)),
}
"""Tensors (B, T), advantages also (B,): their dtype, if it matters, and the bounds of values that the mask counts."""
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
    options: PolicyOptions


def check_batch(
    function: str,
    source: Tensor,
    shape: torch.Size,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    options: LossOptions,
) -> CheckedBatch:
    """Check all but the log-probs or logits of `function`: `source`, of `shape` (B, T) in its first dimensions."""
    device, dtype, validate = source.device, compute_dtype(source.dtype), options.get("validate")
    if unknown := options.keys() - LossOptions.__annotations__.keys():
        raise TypeError(f"{function}() got an unexpected keyword argument {min(unknown)!r}")
    if 0 in shape:
        raise ValueError(f"a loss needs at least one row and one token, got (B, T) = {tuple(shape)}")
    loss_type, level = check_level(options)
    kl = check_choice("kl_estimator", options.get("kl_estimator", "k3"), KL_ESTIMATORS)
    check_ranges(options)
    length, entropy_coef = options.get("max_completion_length") or 0, options.get("entropy_coef", 0.0)
    if loss_type == "dr_grpo" and length <= 0:
        raise ValueError(f"loss_type='dr_grpo' needs max_completion_length > 0, got {length or None}")
    items, sequences = (_check_count(name, options.get(name), validate) for name in _COUNTS)  # type: ignore[arg-type]
    weights, ref_logprobs = options.get("weights"), options.get("ref_logprobs")
    if options.get("beta", 0.0) != 0 and ref_logprobs is None:
        raise ValueError(f"beta={options['beta']} needs ref_logprobs (B, T), got None")

    sampling_logprobs, correction = options.get("sampling_logprobs"), check_correction(options, loss_type, level)
    tensors = (mask, advantages, old_logprobs, weights, ref_logprobs, sampling_logprobs)
    columns: dict[str, Any] = dict(zip(_INPUTS, tensors, strict=True))
    inputs = {name: own for name, own in columns.items() if own is not None or name in ("mask", "advantages")}
    for name, tensor in inputs.items():
        shapes = [shape[:1], shape] if name == "advantages" else [shape]
        check_tensor(name, tensor, shapes, device, _INPUTS[name][0])
    keep = mask != 0
    inputs["advantages"] = advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    if should_validate(validate, mask):
        for name, tensor in inputs.items():
            for bound in _INPUTS[name][1]:
                check_values(name, tensor, keep, bound)
        if weights is not None:
            check_weights(weights, keep, loss_type, level)

    items = keep.sum() if items is None else items
    items = items.clamp(min=1) if isinstance(items, Tensor) else max(items, 1)
    kind = LOSS_TYPES[loss_type]
    divisor = kind.divisor(keep.to(dtype), items, keep.size(0) if sequences is None else sequences, length)
    entropy_scale = None
    if isinstance(entropy_coef, Tensor) or entropy_coef != 0:
        if not isinstance(entropy_coef, Tensor):  # it is written there: to send it would be a wait
            entropy_coef = torch.full((), entropy_coef, dtype=dtype, device=device)
        entropy_scale = entropy_coef.to(device, dtype) / items
    scale = keep.to(dtype) / divisor
    tokens = Tokens(old_logprobs, advantages, weights, ref_logprobs, sampling_logprobs, scale)
    numbers: dict[str, Any] = {name: options[name] for name in NUMBERS if options.get(name) is not None}  # type: ignore[literal-required]
    numbers |= {"loss_type": kind.token_loss, "level": level, "correction": correction, "kl_estimator": kl}
    kept_tokens = tokens.map(lambda tensor: counted(tensor.detach(), keep, dtype))
    return CheckedBatch(keep, kept_tokens, entropy_scale, PolicyOptions(**numbers))


def check_level(options: Mapping[str, Any]) -> tuple[str, str]:
    """Return the loss type and the level of its ratio, which must have a meaning together."""
    loss_type = check_choice("loss_type", options.get("loss_type", "dapo"), tuple(LOSS_TYPES))
    level = check_choice("importance_sampling_level", options.get("importance_sampling_level", "token"), LEVELS)
    if level not in (levels := LOSS_TYPES[loss_type].levels):
        names = " or ".join(map(repr, levels))
        raise ValueError(f"importance_sampling_level must be {names} with loss_type={loss_type!r}, got {level!r}")
    return loss_type, level


def check_ranges(options: Mapping[str, Any]) -> None:
    """Raise `ValueError` naming the first number that is out of its range; tensors are left to the device."""
    for name, interval in _RANGES.items():
        if not isinstance(value := options.get(name), Tensor):
            interval.check(**{name: value})


def check_correction(options: Mapping[str, Any], loss_type: str, level: str) -> str:
    """Return the correction for sampling by another policy, "" for none."""
    mode, low, high = (options.get(name) for name in ("sampling_mode", "sampling_clip_min", "sampling_clip_max"))
    threshold, given = options.get("off_policy_mask_threshold"), options.get("sampling_logprobs") is not None
    wants = {"sampling_mode": mode, "off_policy_mask_threshold": threshold}
    for name, value in wants.items():
        if value is not None and not given:
            raise ValueError(f"{name}={value!r} needs sampling_logprobs (B, T), got None")
    if mode is None:
        if low is not None or high is not None:
            raise ValueError("sampling_clip_min and sampling_clip_max are not read without a sampling_mode")
        return ""
    check_choice("sampling_mode", mode, CORRECTIONS)
    if (low or 0.0) > (math.inf if high is None else high):
        raise ValueError(f"sampling_clip_min must not exceed sampling_clip_max, got {low} and {high}")
    if mode.startswith("token") and weights_sequences(loss_type, level):
        raise ValueError(
            f"sampling_mode={mode!r} differs from token to token, and importance_sampling_level='sequence' has one "
            "ratio for a row; use a sequence's mode, or importance_sampling_level='sequence_token'"
        )
    if loss_type == "vespo" and not mode.startswith("token"):
        raise ValueError(
            f"sampling_mode={mode!r} corrects a row, and loss_type='vespo' weighs it by the product of its tokens' own "
            "ratios; use 'token_truncate' or 'token_mask'"
        )
    return mode


def by_sequence(options: Mapping[str, Any]) -> bool:
    """Whether a correction, a mask or the loss type joins a sequence's tokens, whatever the level."""
    mode, threshold = options.get("sampling_mode") or "", options.get("off_policy_mask_threshold")
    return PolicyOptions(
        loss_type=options.get("loss_type", "dapo"), correction=mode,
        off_policy_mask_threshold=math.inf if threshold is None else threshold,
    ).joins_tokens  # fmt: skip


def counted(tensor: Tensor, keep: Tensor, dtype: torch.dtype) -> Tensor:
    """Broadcast `tensor` to (B, T) in `dtype`, with 0, also in the gradient, where tokens are not counted."""
    return torch.where(keep, tensor, 0).to(dtype)


def should_validate(validate: bool | None, tensor: Tensor) -> bool:
    """Whether to check values: by default where that neither waits for a GPU nor breaks a compiled graph."""
    if validate is None:
        return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
    return validate


def _check_count(name: str, value: Any, validate: bool | None) -> Count | None:
    """Check a total of the step, a number or 0-d; its value is read only where that does not wait for a device."""
    if not isinstance(value, Tensor | Real | None):
        raise TypeError(f"{name} must be a number or a tensor, got {type(value).__name__}")
    if not isinstance(value, Tensor):
        _COUNTS[name].check(**{name: value})
        return value  # type: ignore[return-value]
    if value.numel() != 1:
        raise ValueError(f"{name} must be a single number, got shape {tuple(value.shape)}")
    if should_validate(validate, value):
        _COUNTS[name].check(**{name: value.item()})
    return value.reshape(())


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    """Return `value`, one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")
    return value


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


def weights_sequences(loss_type: str, level: str) -> bool:
    """Whether only the sum of a row's weights acts, since its tokens share the ratio that carries the gradient."""
    return level == "sequence" and not (loss_type in LOSS_TYPES and LOSS_TYPES[loss_type].weighs_tokens)


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
            "use importance_sampling_level='sequence_token', the same ratio with each token's own gradient"
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
    if hidden.dim() == 2 and (rows is None or rows.shape != hidden.shape[:1]):
        got = None if rows is None else tuple(rows.shape)
        raise ValueError(f"hidden of shape {tuple(hidden.shape)} needs rows of shape ({len(hidden)},), got {got}")
    check_tensor("lm_head", lm_head, [torch.Size((max(len(lm_head), 1), hidden.size(-1)))], hidden.device)
    if bias is not None:
        check_tensor("bias", bias, [lm_head.shape[:1]], hidden.device)


def check_rows(rows: Tensor, batch: CheckedBatch, with_entropy: bool, validate: bool) -> None:
    """Check that `rows` of `linear_policy_loss` are indices that, if `validate`, leave no token out."""
    check_tensor("rows", rows, [torch.Size((rows.numel(),))], rows.device, "torch.int64")
    if not validate:
        return
    rows = rows.to(batch.keep.device)
    expected = contributing(batch.tokens, batch.options, with_entropy=with_entropy).flatten()
    if rows.numel() and (rows.min() < 0 or rows.max() >= expected.numel()):
        raise ValueError(f"rows must be in [0, {expected.numel()}), got {rows.min().item()} to {rows.max().item()}")
    counts = torch.bincount(rows, minlength=expected.numel())
    if (wrong := (counts > 1) | (expected & (counts == 0))).any():
        index = int(wrong.nonzero()[0])
        row, token = divmod(index, batch.keep.size(1))
        raise ValueError(
            "rows must hold each token that contributes to the loss once; "
            f"row {row}, token {token} is there {int(counts[index])} times"
        )
