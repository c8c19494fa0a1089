"""The weighted clipped policy loss, the last step before the optimizer: log-probs and token weights to a scalar.

The formula of one token is `ops.policy_loss.token_terms`; this module checks the input, sums the tokens as each
`loss_type` does, and reports metrics. Formulas, names and defaults follow TRL 1.16's GRPO trainer.
"""

import math
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from .ops.dispatch import resolve_backend
from .ops.head_strips import autocast_operands
from .ops.linear_policy_loss import contributing, linear_policy_loss_op
from .ops.logits_policy_loss import LogitsPolicyLossInPlace, logits_policy_loss_op
from .ops.policy_loss import PolicyOptions, Tokens, policy_terms, refuse_second_derivative
from .ops.policy_rows import LOGIT_DTYPES, Softmax, compute_dtype

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")
LEVELS = ("token", "sequence")


class _Batch(NamedTuple):
    """Checked input of a loss; the loss is `sum(token loss * scale) - entropy_scale * sum(entropy)`."""

    keep: Tensor  # (B, T) bool, the mask
    tokens: Tokens  # (B, T) each, in the compute dtype, 0 where the mask is 0
    entropy_scale: Tensor | None  # 0-d
    options: PolicyOptions


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    weights: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    epsilon: float = 0.2,
    epsilon_high: float = 0.28,
    delta: float | None = None,
    beta: float = 0.0,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    num_items_in_batch: Tensor | float | None = None,
    max_completion_length: int | None = None,
    num_sequences_in_batch: Tensor | float | None = None,
    use_bias_correction_kl: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    entropies: Tensor | None = None,
    entropy_coef: float = 0.0,
    validate: bool | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted clipped policy-gradient loss from log-probs; differentiable in `logprobs` and `entropies`, once.

    Tensors
        logprobs (B, T): log pi(token), nats, any float dtype; float64 is computed in float64, the rest in float32.
        old_logprobs (B, T) or None: under the sampling policy; None means on-policy, `logprobs.detach()`.
        advantages (B,) or (B, T).
        mask (B, T): 0 or 1 of any dtype; tokens with 0 may hold anything, NaN included.
        weights (B, T), finite and >= 0: multiply the clipped policy term, never the KL term. A token of weight 0
            stays in every denominator and counts as unclipped.
        ref_logprobs (B, T): needed when `beta != 0`; without beta they give the `kl` metric only.
        entropies (B, T): nats; `entropy_coef` times their mean over the counted tokens is taken off the loss.

    How tokens are summed (l = token loss, m = mask, n = m.sum(1))
        grpo, sapo   sum_b( sum_t(l * m) / max(n, 1) ) / B
        bnpo         sum(l * m) / max(sum(m), 1)
        dr_grpo      sum(l * m) / (B * max_completion_length)
        dapo, cispo  sum(l * m) / max(N, 1), N = num_items_in_batch or else sum(m)
        luspo        sum(l * m) / B
    Gradient accumulation: give every micro-batch the step's totals and add the losses up, and the result does not
    depend on the split. The totals are `num_items_in_batch`, the counted tokens of the step (dapo, cispo, entropy
    bonus), and `num_sequences_in_batch`, which replaces B; with gradients averaged over processes divide both by
    the number of processes. bnpo normalises by its own micro-batch, by definition.

    At `importance_sampling_level="sequence"` (GSPO) the log-ratio of a token is the mean over its sequence. For
    cispo `epsilon_high` bounds the ratio itself. `delta` caps the ratio outside the clip (two-sided clipping).
    `use_bias_correction_kl=True` multiplies KL by the ratio (TRL's default; ours is plain k3). Log-ratios above
    40 nats are cut off there: no overflow in float32, and no gradient beyond.

    `validate`: None checks the values of CPU tensors only, since looking at a GPU tensor waits for the GPU; True
    checks always, False never. Options and shapes are always checked.

    Returns the 0-d loss and metrics as detached 0-d tensors that were never moved to the host: `ratio_mean`
    (over counted tokens with a non-zero weighted advantage), `kl` (given ref_logprobs), `entropy` (given
    entropies), `clip_ratio/low_mean`, `/high_mean`, `/region_mean`, `/low_min`, `/high_max` or, for
    cispo, `cispo_clip_ratio`. Means are over tokens; those of clip ratios at the sequence level over sequences.

    Raises ValueError for a wrong option, shape or value (naming row and token), TypeError for a wrong dtype, and
    RuntimeError from a backward with `create_graph=True`.
    """
    _check_float("logprobs", logprobs)
    if logprobs.dim() != 2:
        raise ValueError(f"logprobs must be (B, T), got shape {tuple(logprobs.shape)}")
    batch = _prepare(
        logprobs.shape,
        logprobs.device,
        torch.float64 if logprobs.dtype == torch.float64 else torch.float32,
        old_logprobs,
        advantages,
        mask,
        weights=weights,
        ref_logprobs=ref_logprobs,
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        delta=delta,
        beta=beta,
        loss_type=loss_type,
        importance_sampling_level=importance_sampling_level,
        num_items_in_batch=num_items_in_batch,
        max_completion_length=max_completion_length,
        num_sequences_in_batch=num_sequences_in_batch,
        use_bias_correction_kl=use_bias_correction_kl,
        sapo_temperature_pos=sapo_temperature_pos,
        sapo_temperature_neg=sapo_temperature_neg,
        entropy_coef=entropy_coef,
        validate=validate,
    )
    if entropies is not None:
        _check_tensor("entropies", entropies, [batch.keep.shape], batch.keep.device)
    elif entropy_coef != 0:
        raise ValueError(f"entropy_coef={entropy_coef} needs entropies (B, T), got None")
    if _should_validate(validate, logprobs):
        _check_finite("logprobs", logprobs, batch.keep)
        if entropies is not None:
            _check_finite("entropies", entropies, batch.keep)

    with torch.no_grad():
        current = _counted(logprobs, batch.keep, batch.tokens.scale.dtype)
        terms, gradient = policy_terms(current, batch.tokens, batch.options)
        value = (terms.loss * batch.tokens.scale).sum()
    loss = _WithGradient.apply(value, logprobs, gradient)
    entropy = None
    if entropies is not None:
        entropy = _counted(entropies, batch.keep, batch.tokens.scale.dtype)
        if batch.entropy_scale is not None:
            loss = loss - entropy.sum() * batch.entropy_scale
        entropy = entropy.detach()
    return loss, _metrics(batch, terms.ratio, terms.kl, terms.clip, entropy)


class LossOptions(TypedDict, total=False):
    """The keyword options that all three losses share; `policy_loss` says what they mean."""

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


def logits_policy_loss(
    logits: Tensor,
    targets: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    compute_entropy: bool = False,
    inplace: bool = False,
    backend: str | None = None,
    **options: Unpack[LossOptions],
) -> tuple[Tensor, dict[str, Tensor]]:
    """`policy_loss` from logits: `log_softmax(softcap * tanh(logit_scale * logits / softcap) / temperature)`.

    Without a softcap there is no tanh, as in a model without one.
    logits (B, T, V): float32, bfloat16 or float16 of any strides (float64 too on the PyTorch backend); float32
    arithmetic. Where the mask is 0 they may hold anything. targets (B, T) int64. The other tensors and the options
    are those of `policy_loss`; `entropy_coef` needs no entropies here. `compute_entropy=True` adds the
    `entropy` metric. A target outside the vocabulary is an error where values are checked, else the loss is nan.

    The gradient by the logits is made in the forward pass, in one pass over each row at the token level (Triton),
    in memory of their size. `inplace=True` puts it over the logits themselves, where one is wanted: then the
    logits are lost, backward runs once, and PyTorch raises its version error if another operation, such as a tanh
    that made them, needs them for its own backward.

    Returns and raises as `policy_loss` does. Kernel: `ops/policy_rows.py`.
    """
    _check_float("logits", logits)
    if logits.dim() != 3:
        raise ValueError(f"logits must be (B, T, V), got shape {tuple(logits.shape)}")
    if not logits.size(2):
        raise ValueError(f"logits must not be empty, got shape {tuple(logits.shape)}")
    chosen = resolve_backend(backend, logits)
    _check_dtype("logits", logits, chosen)
    softmax = _softmax(temperature, softcap, logit_scale)
    shape, vocabulary = logits.shape[:2], logits.size(2)
    batch = _prepare(shape, logits.device, compute_dtype(logits.dtype), old_logprobs, advantages, mask, **options)
    checked = _should_validate(options.get("validate"), logits)
    _check_targets(targets, batch.keep, vocabulary, checked)
    with_gradient = torch.is_grad_enabled() and logits.requires_grad
    with_entropy = compute_entropy or batch.entropy_scale is not None
    arguments = (
        *(_flat(targets), *batch.tokens.map(_flat), batch.entropy_scale),
        *(batch.options.surrogate, batch.options.level, batch.options.numbers(), list(softmax)),
    )
    if inplace and with_gradient:
        loss, stats = LogitsPolicyLossInPlace.apply(logits, *arguments, with_entropy, chosen)
    else:
        loss, stats, _, _ = logits_policy_loss_op(logits, *arguments, with_entropy, with_gradient, chosen)
    return loss, _metrics_of_rows(batch, stats, with_entropy, checked, "logits")


def linear_policy_loss(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    compute_entropy: bool = False,
    rows: Tensor | None = None,
    drop_inactive: bool | None = None,
    chunk_size: int | None = None,
    fp32_logits: bool = True,
    backend: str | None = None,
    **options: Unpack[LossOptions],
) -> tuple[Tensor, dict[str, Tensor]]:
    """`logits_policy_loss` of `hidden @ lm_head.T + bias`, whose logits never exist as a whole.

    hidden (B, T, H) and lm_head (V, H) share a dtype: float32, bfloat16 or float16 (float64 too on the PyTorch
    backend); under autocast both are cast to its dtype, as `torch.nn.functional.linear` would. bias (V,). All three
    may require gradients, which are ready when this returns: the head's, a sum in float32, is made only if it
    trains, so a frozen head costs two GEMMs instead of three (one more at the sequence level).

    `chunk_size`: rows of logits that exist at a time (4096; 512 on a CPU). `fp32_logits=True` keeps them in
    float32 as the GEMM summed them; False rounds them to the dtype of `hidden`, at half the memory traffic.

    Tokens that add nothing (mask 0; also advantage or weight 0, if neither ref_logprobs nor the entropy want them)
    need no GEMM. How many they are is known on a CPU only, so there they are dropped by default, and on a GPU not,
    where looking would wait for the device in every step. Pass `rows`, the flattened indices from
    `contributing_rows`, made where the batch is made; or accept the wait with `drop_inactive=True`, which also
    drops clipped tokens from the gradients' GEMMs. Loss, gradients and metrics are the same in every case.

    The rest, and what is returned and raised, is as in `logits_policy_loss`. Kernels: `ops/linear_policy_loss.py`.
    """
    for name, tensor, dims in (("hidden", hidden, "(B, T, H)"), ("lm_head", lm_head, "(V, H)")):
        _check_float(name, tensor)
        if tensor.dim() != dims.count(",") + 1:
            raise ValueError(f"{name} must be {dims}, got shape {tuple(tensor.shape)}")
        if 0 in tensor.shape[-2 if name == "lm_head" else -1 :]:
            raise ValueError(f"{name} must not be empty, got shape {tuple(tensor.shape)}")
    if hidden.size(2) != lm_head.size(1):
        raise ValueError(f"hidden has H={hidden.size(2)}, lm_head has H={lm_head.size(1)}")
    if hidden.device != lm_head.device:
        raise ValueError(f"lm_head must be on {hidden.device} like hidden, got {lm_head.device}")
    if bias is not None:
        _check_tensor("bias", bias, [lm_head.shape[:1]], hidden.device)
    hidden, lm_head = autocast_operands(hidden, lm_head)
    if hidden.dtype != lm_head.dtype:
        raise TypeError(f"hidden and lm_head must share a dtype, got {hidden.dtype} and {lm_head.dtype}")
    chosen = resolve_backend(backend, hidden)
    _check_dtype("hidden", hidden, chosen)
    device = hidden.device.type
    if chunk_size is None:
        chunk_size = 512 if device == "cpu" else 4096
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    batch = _prepare(
        hidden.shape[:2], hidden.device, compute_dtype(hidden.dtype), old_logprobs, advantages, mask, **options
    )
    checked = _should_validate(options.get("validate"), hidden)
    _check_targets(targets, batch.keep, len(lm_head), checked)
    with_entropy = compute_entropy or batch.entropy_scale is not None
    if rows is not None:
        _check_given_rows(rows, batch, with_entropy, checked)
    loss, stats, *_ = linear_policy_loss_op(
        hidden.reshape(-1, hidden.size(2)),
        lm_head,
        None if bias is None else bias.contiguous(),
        targets.contiguous(),
        *batch.tokens.map(torch.Tensor.contiguous),
        batch.entropy_scale,
        rows,
        batch.options.surrogate,
        batch.options.level,
        batch.options.numbers(),
        list(_softmax(temperature, softcap, logit_scale)),
        with_entropy,
        [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, lm_head, bias)],
        device == "cpu" if drop_inactive is None else drop_inactive,
        chunk_size,
        fp32_logits,
        chosen,
    )
    return loss, _metrics_of_rows(batch, stats, with_entropy, checked, "hidden and lm_head")


def contributing_rows(
    mask: Tensor,
    advantages: Tensor,
    *,
    weights: Tensor | None = None,
    importance_sampling_level: str = "token",
    all_counted: bool = False,
) -> Tensor:
    """Flattened indices (M,) int64 of the tokens that `linear_policy_loss` has to look at, for its `rows`.

    mask (B, T), advantages (B,) or (B, T), weights (B, T), as in `policy_loss`. Set `all_counted` where ref_logprobs
    or the entropy are used. Waits for the device if the tensors are on a GPU: call it where they are still on the
    CPU, and copy the result.

    Raises ValueError for a wrong level, shape or device, TypeError for advantages or weights that are no floats.
    """
    if importance_sampling_level not in LEVELS:
        raise ValueError(f"importance_sampling_level must be one of {LEVELS}, got {importance_sampling_level!r}")
    if mask.dim() != 2:
        raise ValueError(f"mask must be (B, T), got shape {tuple(mask.shape)}")
    _check_tensor("advantages", advantages, [mask.shape[:1], mask.shape], mask.device)
    if weights is not None:
        _check_tensor("weights", weights, [mask.shape], mask.device)
    keep = mask != 0
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    tokens = Tokens(None, advantages.expand_as(mask), weights, None, keep.float())
    options = PolicyOptions(level=importance_sampling_level)
    return contributing(tokens, options, all_counted=all_counted).flatten().nonzero().squeeze(1)


def _metrics_of_rows(batch: _Batch, stats: Tensor, with_entropy: bool, checked: bool, source: str) -> dict[str, Tensor]:
    """Metrics from the `STATS` (5, N) that the kernels give; raises where a log-prob is not finite."""
    logprobs, entropy, ratio, kl, clip = stats.detach().view(-1, *batch.keep.shape)
    if checked:
        _check_finite(f"the target's log-prob from {source}", logprobs, batch.keep)
    return _metrics(batch, ratio, kl, clip, entropy if with_entropy else None)


def _flat(tensor: Tensor) -> Tensor:
    """(N,) contiguous; flattening alone keeps the strides of a single row."""
    return tensor.contiguous().flatten()


def _softmax(temperature: float, softcap: float | None, logit_scale: float) -> Softmax:
    for name, number in (("temperature", temperature), ("softcap", softcap), ("logit_scale", logit_scale)):
        if number is not None and not 0 < number < float("inf"):
            raise ValueError(f"{name} must be > 0 and finite, got {number}")
    return Softmax(temperature / logit_scale, (softcap or 0.0) / logit_scale)


def _prepare(
    shape: torch.Size,
    device: torch.device,
    dtype: torch.dtype,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    weights: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    epsilon: float = 0.2,
    epsilon_high: float = 0.28,
    delta: float | None = None,
    beta: float = 0.0,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    num_items_in_batch: Tensor | float | None = None,
    max_completion_length: int | None = None,
    num_sequences_in_batch: Tensor | float | None = None,
    use_bias_correction_kl: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    entropy_coef: float = 0.0,
    validate: bool | None = None,
) -> _Batch:
    """Check everything but the log-probs (or logits) themselves; `shape` is (B, T). See `policy_loss`."""
    if 0 in shape:
        raise ValueError(f"a loss needs at least one row and one token, got (B, T) = {tuple(shape)}")
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type must be one of {LOSS_TYPES}, got {loss_type!r}")
    if importance_sampling_level not in LEVELS:
        raise ValueError(f"importance_sampling_level must be one of {LEVELS}, got {importance_sampling_level!r}")
    if loss_type == "dr_grpo" and (max_completion_length is None or max_completion_length <= 0):
        raise ValueError(f"loss_type='dr_grpo' needs max_completion_length > 0, got {max_completion_length}")
    if beta != 0 and ref_logprobs is None:
        raise ValueError(f"beta={beta} needs ref_logprobs (B, T), got None")
    for name, number in (("epsilon", epsilon), ("epsilon_high", epsilon_high), ("beta", beta)):
        if not number >= 0:
            raise ValueError(f"{name} must be >= 0, got {number}")
    for name, number in (("beta", beta), ("entropy_coef", entropy_coef)):
        if not abs(number) < math.inf:
            raise ValueError(f"{name} must be finite, got {number}")
    if isinstance(num_items_in_batch, int | float) and not 0 <= num_items_in_batch < math.inf:
        raise ValueError(f"num_items_in_batch must be >= 0 and finite, got {num_items_in_batch}")
    if isinstance(num_sequences_in_batch, int | float) and not 0 < num_sequences_in_batch < math.inf:
        raise ValueError(f"num_sequences_in_batch must be > 0 and finite, got {num_sequences_in_batch}")
    for name, number in (
        ("delta", 1.0 if delta is None else delta),
        ("sapo_temperature_pos", sapo_temperature_pos),
        ("sapo_temperature_neg", sapo_temperature_neg),
    ):
        if not number > 0:
            raise ValueError(f"{name} must be > 0, got {number}")

    _check_tensor("mask", mask, [shape], device, floating=False)
    _check_tensor("advantages", advantages, [shape[:1], shape], device)
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    optional = {"old_logprobs": old_logprobs, "weights": weights, "ref_logprobs": ref_logprobs}
    for name, tensor in optional.items():
        if tensor is not None:
            _check_tensor(name, tensor, [shape], device)
    keep = mask != 0
    if _should_validate(validate, mask):
        _check_rows("mask", mask, keep & (mask != 1), "must be 0 or 1")
        _check_finite("advantages", advantages, keep)
        for name, tensor in optional.items():
            if tensor is not None:
                _check_finite(name, tensor, keep)
        if weights is not None:
            _check_rows("weights", weights, keep & (weights < 0), "must be >= 0")

    options = PolicyOptions(
        surrogate=loss_type if loss_type in ("cispo", "sapo") else "clip",
        level=importance_sampling_level,
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        delta=float("inf") if delta is None else delta,
        beta=beta,
        use_bias_correction_kl=use_bias_correction_kl,
        sapo_temperature_pos=sapo_temperature_pos,
        sapo_temperature_neg=sapo_temperature_neg,
    )
    scale = _token_scale(keep, dtype, loss_type, num_items_in_batch, max_completion_length or 0, num_sequences_in_batch)
    entropy_scale = None
    if entropy_coef != 0:
        count = keep.sum() if num_items_in_batch is None else num_items_in_batch
        entropy_scale = torch.full((), entropy_coef, dtype=dtype, device=device) / _at_least_one(count)
    tokens = Tokens(old_logprobs, advantages, weights, ref_logprobs, scale)
    return _Batch(keep, tokens.map(lambda tensor: _counted(tensor.detach(), keep, dtype)), entropy_scale, options)


def _token_scale(
    keep: Tensor,
    dtype: torch.dtype,
    loss_type: str,
    num_items: Tensor | float | None,
    max_completion_length: int,
    num_sequences: Tensor | float | None,
) -> Tensor:
    """(B, T) factor of each token's loss in the sum that is the loss; 0 where the mask is 0."""
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


class _WithGradient(torch.autograd.Function):
    """The identity on a loss whose gradient by `source` is already known."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, source: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.dtype = source.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor, None]:
        refuse_second_derivative()
        (gradient,) = ctx.saved_tensors
        return None, (gradient * upstream).to(ctx.dtype), None


@torch.no_grad()
def _metrics(batch: _Batch, ratio: Tensor, kl: Tensor, clip: Tensor, entropy: Tensor | None) -> dict[str, Tensor]:
    """The metrics of `policy_loss` from (B, T) values of the counted tokens."""
    keep, tokens = batch.keep, batch.tokens
    per_sequence = keep.sum(1)
    count = per_sequence.sum().clamp(min=1)
    moving = keep & (tokens.advantages != 0)
    if tokens.weights is not None:
        moving = moving & (tokens.weights != 0)
    metrics = {"ratio_mean": torch.where(moving, ratio, 0).sum() / moving.sum().clamp(min=1)}
    if tokens.ref_logprobs is not None:
        metrics["kl"] = torch.where(keep, kl, 0).sum() / count
    if entropy is not None:
        metrics["entropy"] = torch.where(keep, entropy, 0).sum() / count

    def clip_ratio(flag: Tensor) -> tuple[Tensor, Tensor]:
        """Overall mean, and share of each sequence (B,)."""
        clipped = (flag & keep).sum(1)
        share = clipped / per_sequence.clamp(min=1)
        return (share.mean() if batch.options.level == "sequence" else clipped.sum() / count), share

    high_mean, high = clip_ratio(clip > 0)
    if batch.options.surrogate == "cispo":
        metrics["cispo_clip_ratio"] = high_mean
    elif batch.options.surrogate == "clip":
        low_mean, low = clip_ratio(clip < 0)
        nonempty = per_sequence > 0
        metrics["clip_ratio/low_mean"] = low_mean
        metrics["clip_ratio/high_mean"] = high_mean
        metrics["clip_ratio/region_mean"] = clip_ratio(clip != 0)[0]
        metrics["clip_ratio/low_min"] = torch.where(nonempty, low, low.max()).min()
        metrics["clip_ratio/high_max"] = high.max()
    return metrics


def _counted(tensor: Tensor, keep: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` broadcast to (B, T) in `dtype`, with 0 (whatever it held, also in the gradient) where not counted."""
    return torch.where(keep, tensor, 0).to(dtype)


def _should_validate(validate: bool | None, tensor: Tensor) -> bool:
    if validate is None:
        return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
    return validate


def _check_float(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {tensor.dtype}")


def _check_tensor(
    name: str, tensor: Tensor, shapes: list[torch.Size], device: torch.device, floating: bool = True
) -> None:
    if floating:
        _check_float(name, tensor)
    elif not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.shape not in shapes:
        wanted = " or ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} as the log-probs or logits are, got {tensor.device}")


def _check_finite(name: str, tensor: Tensor, keep: Tensor) -> None:
    _check_rows(name, tensor, keep & ~torch.isfinite(tensor), "must be finite")


def _check_rows(name: str, tensor: Tensor, bad: Tensor, rule: str) -> None:
    """Raise for the first true element of `bad` (B, T); `tensor` is (B, T) or (B, 1)."""
    if not bad.any():
        return
    row, token = bad.nonzero()[0].tolist()
    value = tensor.expand_as(bad)[row, token].item()
    raise ValueError(f"{name} {rule} where the mask is 1; row {row}, token {token} is {value}")


def _check_dtype(name: str, tensor: Tensor, backend: str) -> None:
    allowed = LOGIT_DTYPES if backend == "triton" else (*LOGIT_DTYPES, torch.float64)
    if tensor.dtype not in allowed:
        raise TypeError(f"{name} must be one of {allowed} for backend {backend!r}, got {tensor.dtype}")


def _check_targets(targets: Tensor, keep: Tensor, vocabulary: int, checked: bool) -> None:
    _check_tensor("targets", targets, [keep.shape], keep.device, floating=False)
    if targets.dtype != torch.int64:
        raise TypeError(f"targets must be int64, got {targets.dtype}")
    if checked:
        _check_rows(
            "targets", targets, keep & ((targets < 0) | (targets >= vocabulary)), f"must be in [0, {vocabulary})"
        )


def _check_given_rows(rows: Tensor, batch: _Batch, with_entropy: bool, checked: bool) -> None:
    if rows.dim() != 1 or rows.dtype != torch.int64:
        raise ValueError(f"rows must be 1-D int64, got {rows.dtype} of shape {tuple(rows.shape)}")
    if rows.device != batch.keep.device:
        raise ValueError(f"rows must be on {batch.keep.device} as the mask is, got {rows.device}")
    if not checked:
        return
    needs_all = with_entropy or batch.tokens.ref_logprobs is not None
    missing = contributing(batch.tokens, batch.options, all_counted=needs_all)
    if rows.numel() and (rows.min() < 0 or rows.max() >= missing.numel()):
        raise ValueError(f"rows must be in [0, {missing.numel()}), got {rows.min().item()} to {rows.max().item()}")
    if rows.unique().numel() != rows.numel():
        raise ValueError(f"rows must not repeat, got {rows.numel()} of which {rows.unique().numel()} differ")
    missing.view(-1)[rows] = False
    if missing.any():
        row, token = missing.nonzero()[0].tolist()
        raise ValueError(f"rows leaves out row {row}, token {token}, which contributes to the loss")
