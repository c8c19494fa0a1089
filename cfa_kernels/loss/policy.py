"""Compute the weighted clipped policy loss from log-probs, logits or hidden states, with token weights.

The loss of a token is a formula of `loss.token_loss`. Formulas, names and defaults follow TRL 1.16's GRPO trainer.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..ops.dispatch import resolve_backend
from ..ops.head_matmul import autocast_operands
from ..ops.kept_tokens import KeptTokens
from ..ops.row_softmax import Softmax, check_logits_dtype
from ..ops.upload import upload
from ..options import check_class
from .centering import check_centering, check_joins
from .checks import (
    CheckedBatch,
    check_batch,
    check_linear,
    check_rows,
    check_targets,
    check_tensor,
    check_values,
    counted,
)
from .linear import contributing, linear_policy_loss_op
from .logits import LogitsLogprob
from .options import check_choice, should_validate
from .token_loss import Tokens, correction, drift_mask, fold_correction, gamma_weights, policy_terms
from .types import LEVELS, LOSS_TYPES


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    entropies: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the weighted clipped policy loss from log-probs; differentiable in `logprobs` and `entropies`.

    Args:
        logprobs: (B, T) log pi(token), nats, any float dtype; computed in float64 for float64, else in float32.
        old_logprobs: (B, T) under the sampling policy; None means on-policy.
        advantages: (B,) or (B, T).
        mask: (B, T) of 0 and 1, any dtype; tokens with 0 may hold anything, NaN included.
        entropies: (B, T), nats; `entropy_coef` times their mean over the counted tokens is subtracted.
        **options: three columns and the fields of `LossOptions`, or these together as `loss_options`:

    | option | default | what it is |
    |---|---|---|
    | weights | None | (B, T), finite, >= 0: factors of the policy term, never of the KL term |
    | ref_logprobs | None | (B, T), needed when `beta != 0`; without beta they give the `kl` metric only |
    | sampling_logprobs | None | (B, T) that the engine sampled with, nan where it gave none |
    | sampling_mode | None | how to correct for sampling_logprobs, see `correction`: TRL's, or "geometric_mask" |
    | sampling_clip_min, sampling_clip_max | None | its bounds |
    | off_policy_mask_threshold | None | nats, of `drift_mask`, by which sequences are left out |
    | epsilon, epsilon_high | 0.2, 0.28 | bounds around 1, or 0 as of `LossType.rests_at` |
    | delta | None | caps the ratio outside the clip (two-sided clipping), and that of dppo |
    | beta, kl_estimator | 0.0, "k3" | factor and kind of the KL term: k1, k2, k3 or abs, see `token_loss.KL` |
    | use_bias_correction_kl | False | multiplies the KL term by the ratio (TRL's default; ours is plain k3) |
    | loss_type | "dapo" | how tokens are summed, see below |
    | importance_sampling_level | "token" | "sequence" (GSPO): its sequence's mean; "sequence_token": see below |
    | num_items_in_batch | None | counted tokens of the whole step: dapo and its like, entropy bonus |
    | num_sequences_in_batch | None | sequences of the whole step, in place of B |
    | max_completion_length | None | tokens, needed by dr_grpo |
    | sapo_temperature_pos, sapo_temperature_neg | 1.0, 1.05 | of sapo's gate, by the sign of the advantage |
    | vespo_k_pos, vespo_lambda_pos | 2.0, 3.0 | k and lambda of vespo's weight at an advantage >= 0 |
    | vespo_k_neg, vespo_lambda_neg | 3.0, 2.0 | and below 0 |
    | entropy_coef | 0.0 | see `entropies`; a 0-d tensor is not read on the host |
    | validate | None | whether to check values; None checks them on a CPU only, as a GPU would have to be waited for |

    A token of weight 0 stays in every denominator and counts as unclipped. At level "sequence" only the sum of
    a row's weights acts (except in cispo, dppo and reinforce), so they must be equal within a row. "sequence_token"
    (GSPO-token) has the same ratios, each with its own token's gradient, and takes any. gmpo needs one of these two
    levels, vespo "token".

    Token losses are summed and divided: by sequence means and B (grpo, sapo, gmpo), by counted tokens (bnpo), by
    `B * max_completion_length` (dr_grpo), by B (luspo), or by `num_items_in_batch`, or else counted tokens (others).

    Gradient accumulation: give every micro-batch the step's totals (`num_items_in_batch`, `num_sequences_in_batch`,
    numbers or 0-d tensors) and add the losses; if gradients are averaged over processes, divide both by their number.
    bnpo normalises by its own micro-batch. Log-ratios are cut off at 40 nats; beyond that there is no gradient.

    Returns:
        The 0-d loss, and metrics under TRL's names as detached 0-d tensors on its device. Means of clip ratios are
        over counted tokens, at a sequence level over sequences, except in gmpo, which clips tokens. `ratio_mean` and
        metrics of sampling log-probs are over tokens or sequences with a weighted advantage. A metric over no token
        or sequence at all is nan: omit it from your log.

    Raises:
        ValueError: a wrong option, shape or value, naming row and token.
        TypeError: a wrong dtype, or an unknown option.
    """
    check_tensor("logprobs", logprobs)
    if logprobs.dim() != 2:
        raise ValueError(f"logprobs must be (B, T), got shape {tuple(logprobs.shape)}")
    batch = check_batch(logprobs, logprobs.shape, old_logprobs, advantages, mask, options)
    if entropies is not None:
        check_tensor("entropies", entropies, [batch.keep.shape], logprobs.device)
    elif batch.entropy_scale is not None:
        raise ValueError(f"entropy_coef={batch.options.entropy_coef} needs entropies (B, T), got None")
    if should_validate(batch.options.validate, logprobs):
        check_values("logprobs", logprobs, batch.keep, "finite")
        if entropies is not None:
            check_values("entropies", entropies, batch.keep, "finite")

    return _loss(batch, logprobs, entropies)


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
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute `policy_loss` from logits: `log_softmax(softcap * tanh(logit_scale * logits / softcap) / temperature)`.

    Args:
        logits: (B, T, V) float32, bfloat16 or float16 of any strides (float64 too on the PyTorch backend); the
            arithmetic is float32.
        targets: (B, T) int64 in the vocabulary.
        old_logprobs, advantages, mask, **options: as in `policy_loss`; `entropy_coef` needs no entropies here.
        temperature, logit_scale, softcap: > 0; a softcap of None for a model without one.
        compute_entropy: adds the `entropy` metric.
        inplace: the backward, which runs once, writes the gradient over the logits.
        backend: `"triton"` or `"torch"`; by default what the device has.

    Returns and raises as `policy_loss`, and `RuntimeError` from a backward with `create_graph=True`.
    """
    check_tensor("logits", logits)
    if logits.dim() != 3 or not logits.size(2):
        raise ValueError(f"logits must be (B, T, V) and not empty, got shape {tuple(logits.shape)}")
    chosen = resolve_backend(backend, logits)
    check_logits_dtype("logits", logits, chosen)
    softmax = Softmax.of(temperature, softcap, logit_scale)
    batch = check_batch(logits, logits.shape[:2], old_logprobs, advantages, mask, options)
    checked = should_validate(batch.options.validate, logits)
    check_targets(targets, batch.keep, logits.size(2), checked)
    with_entropy = compute_entropy or batch.entropy_scale is not None
    # Flattening by itself would keep the strides of a single row.
    flat = (tensor.contiguous().flatten() for tensor in (targets, batch.keep))
    values = LogitsLogprob.apply(inplace, logits, *flat, list(softmax), with_entropy, chosen)
    logprobs, entropies = (value.view_as(batch.keep) for value in values)
    if checked:
        check_values("the target's log-prob from logits", logprobs.detach(), batch.keep, "finite")
    return _loss(batch, logprobs, entropies if with_entropy else None)


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
    kept_tokens: KeptTokens | None = None,
    score_centering: bool = False,
    rows: Tensor | None = None,
    return_logprobs: bool = False,
    drop_inactive: bool | None = None,
    chunk_size: int | None = None,
    backend: str | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Compute `logits_policy_loss` of `hidden @ lm_head.T + bias` without ever holding all logits.

    float32 GEMMs follow torch's TF32 setting, which those of `linear_logprob` do not: take old log-probs from the same
    function, or train float32 weights with `torch.set_float32_matmul_precision("highest")`.

    Args:
        hidden: (B, T, H), or (M, H) for only the M tokens of `rows`, in their order; under autocast cast to its dtype.
        lm_head, bias: (V, H) and (V,), of that dtype, cast likewise.
        targets, old_logprobs, advantages, mask, temperature, softcap, logit_scale, compute_entropy, backend, **options:
            as in `logits_policy_loss`.
        kept_tokens: the ids that each of the B * T tokens was drawn from, if the sampler cut its distribution off
            (top-p, top-k, min-p): log-probs, entropies and gradients are normalised over these ids. `rows` on a GPU,
            and `drop_inactive` there, make the host wait then.
        score_centering: subtract from each token's gradient its mean over the sampler's distribution, at level "token",
            see `centering.subtract_expected_score`; kept_tokens must have log-probs, and old ones, if any, be those.
        rows: (M,) flattened indices from `contributing_rows`, on any device; other tokens need no GEMM. Sorted and on
            the host, a sequence-level loss computes each sequence's logits once, if `chunk_size` rows hold it.
        return_logprobs: also return the log-probs (B, T), detached, in the compute dtype; nan where dropped.
        drop_inactive: finds those tokens here, waiting for a GPU, and drops clipped ones from the gradients' GEMMs too;
            the default on a CPU.
        chunk_size: rows of logits that exist at a time; by default 4096, on a CPU 512.

    Returns and raises as `logits_policy_loss`; with `return_logprobs` the log-probs come third.
    """
    check_linear(hidden, lm_head, bias, rows)
    rows_alone = hidden.dim() == 2
    hidden, lm_head = autocast_operands(hidden, lm_head)
    if hidden.dtype != lm_head.dtype:
        raise TypeError(f"hidden and lm_head must share a dtype, got {hidden.dtype} and {lm_head.dtype}")
    chosen = resolve_backend(backend, hidden)
    check_logits_dtype("hidden", hidden, chosen)
    on_cpu = hidden.device.type == "cpu"
    chunk_size = (512 if on_cpu else 4096) if chunk_size is None else chunk_size
    drop_inactive = on_cpu if drop_inactive is None else drop_inactive
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    softmax = Softmax.of(temperature, softcap, logit_scale)
    shape = targets.shape if rows_alone else hidden.shape[:2]
    batch = check_batch(hidden, shape, old_logprobs, advantages, mask, options)
    checked = should_validate(batch.options.validate, hidden)
    check_targets(targets, batch.keep, len(lm_head), checked)
    with_entropy = compute_entropy or batch.entropy_scale is not None
    if rows is not None:
        check_rows(rows, batch, with_entropy, checked)
    kept = dict.fromkeys(("kept_offsets", "kept_ids", "kept_logprobs"))

    def place(n: int) -> str:
        return f"kept_tokens row {n // shape[1]}, token {n % shape[1]}"

    if kept_tokens is not None:
        check_class(KeptTokens, kept_tokens=kept_tokens)
        columns: dict[str, Any] = {"targets": targets.flatten(), "counted": batch.keep.flatten()} if checked else {}
        kept_tokens = kept_tokens.checked(place, batch.keep.numel(), vocabulary=len(lm_head), **columns)
        kept = dict(zip(kept, kept_tokens if score_centering else (*kept_tokens[:2], None), strict=True))
    if score_centering:
        check_joins(batch.options.joins_tokens)
        columns = {"moved": batch.keep & batch.tokens.moved(), **batch.tokens._asdict(), "targets": targets}
        names = ("targets", "moved", "old_logprobs", "sampling_logprobs") if checked else ()
        check_centering(
            kept_tokens, place, **{name: columns[name].flatten().cpu() for name in names if columns[name] is not None}
        )
    loss, stats, *_ = linear_policy_loss_op(
        hidden=hidden.reshape(-1, hidden.size(-1)),
        head=lm_head,
        bias=None if bias is None else bias.contiguous(),
        rows=rows,
        rows_alone=rows_alone,
        needs_gradient=[torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, lm_head, bias)],
        drop_rows=drop_inactive,
        chunk_size=chunk_size,
        targets=targets.contiguous(),
        **kept,
        **batch.tokens.map(Tensor.contiguous)._asdict(),
        entropy_scale=batch.entropy_scale,
        kinds=batch.options.kinds(),
        numbers=batch.options.numbers(),
        softmax=list(softmax),
        with_entropy=with_entropy,
        backend=chosen,
    )
    logprobs, entropy, ratio, kl, clip = stats.detach().view(-1, *batch.keep.shape)
    if checked:
        check_values("the target's log-prob from hidden and lm_head", logprobs, batch.keep, "finite")
    metrics = _metrics(batch, logprobs, ratio, kl, clip, entropy if with_entropy else None)
    if not return_logprobs:
        return loss, metrics
    looked_at = batch.keep
    if rows is not None:
        there = rows if rows.device == batch.keep.device else upload([rows], batch.keep.device)[0]
        looked_at = torch.zeros_like(batch.keep).flatten().index_fill_(0, there, True).view_as(batch.keep)
    elif drop_inactive:
        _, folded = fold_correction(batch.tokens, batch.options)
        looked_at = contributing(batch.tokens, joins_tokens=folded.joins_tokens, every=with_entropy)
    return loss, metrics, logprobs.masked_fill(~looked_at, math.nan)


def contributing_rows(
    mask: Tensor,
    advantages: Tensor,
    *,
    weights: Tensor | None = None,
    importance_sampling_level: str = "token",
    whole_rows: bool = False,
    all_counted: bool = False,
) -> Tensor:
    """Find the flattened indices (M,) of the tokens that `linear_policy_loss` depends on, for its `rows`.

    `mask` (B, T), `advantages` (B,) or (B, T), `weights` (B, T) and the level are those of the loss; `all_counted` is
    True if ref_logprobs or the entropy are used, `whole_rows` if `sampling_mode`, a mask or vespo reads sequences. On
    a GPU this waits: call it on the CPU.
    """
    check_choice("importance_sampling_level", importance_sampling_level, LEVELS)
    check_tensor("advantages", advantages, [mask.shape[:1], mask.shape], mask.device)
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    tokens = Tokens(None, advantages.expand_as(mask), weights, None, None, mask != 0)
    joins_tokens = whole_rows or importance_sampling_level != "token"
    return contributing(tokens, joins_tokens=joins_tokens, every=all_counted).flatten().nonzero().squeeze(1)


def _loss(batch: CheckedBatch, logprobs: Tensor, entropies: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    logprobs = counted(logprobs, batch.keep, batch.tokens.scale.dtype)
    terms = policy_terms(logprobs, batch.tokens, batch.options)
    loss = (terms.loss * batch.tokens.scale).sum()
    entropies = None if entropies is None else counted(entropies, batch.keep, logprobs.dtype)
    if entropies is not None and batch.entropy_scale is not None:
        loss = loss - entropies.sum() * batch.entropy_scale
    return loss, _metrics(batch, logprobs, terms.ratio, terms.kl, terms.clip, entropies)


@torch.no_grad()
def _metrics(
    batch: CheckedBatch, logprobs: Tensor, ratio: Tensor, kl: Tensor, clip: Tensor, entropy: Tensor | None
) -> dict[str, Tensor]:
    keep, tokens, _, options = batch
    factor = correction(logprobs, tokens, options)
    per_sequence, moving = keep.sum(1), keep & tokens.moved()  # where rows are omitted, only the others have log-probs
    metrics = {"ratio_mean": _mean(ratio, moving)}
    if tokens.ref_logprobs is not None:
        metrics["kl"] = _mean(kl, keep)
    if entropy is not None:
        metrics["entropy"] = _mean(entropy, keep)
    if tokens.sampling_logprobs is not None:
        gap, known = (logprobs - tokens.sampling_logprobs).abs(), moving & ~tokens.sampling_logprobs.isnan()
        metrics["sampling/sampling_logp_difference/mean"] = _mean(gap, known)
        metrics["sampling/sampling_logp_difference/max"] = _largest(gap, known)
        if options.off_policy_mask_threshold is not None:
            kept = drift_mask(logprobs, tokens, options.off_policy_mask_threshold)
            metrics["sampling/off_policy_mask/mean"] = _mean(
                kept[:, :1].to(logprobs.dtype), moving.any(1, keepdim=True)
            )
        if factor is not None:
            seen, name, own = moving, "sampling/importance_sampling_ratio", factor
            if (options.sampling_mode or "").startswith(("sequence", "geometric")):
                own, seen = factor[:, :1], seen.any(1, keepdim=True)
            metrics[f"{name}/mean"] = _mean(own, seen)
            metrics[f"{name}/min"] = -_largest(-own, seen)
            metrics[f"{name}/max"] = _largest(own, seen)

    loss_type, nonempty = options.loss_type, per_sequence > 0

    def clip_ratio(flag: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the overall mean, and the share of each sequence (B,)."""
        share = (flag & keep).sum(1) / per_sequence.clamp(min=1)
        if options.importance_sampling_level == "token" or loss_type == "gmpo":
            return _mean(flag.float(), keep), share
        return _mean(share, torch.ones_like(nonempty) & nonempty.any()), share

    high_mean, high = clip_ratio(clip > 0)
    measures = LOSS_TYPES[loss_type].metrics
    if measures == "upper clip":
        metrics["cispo_clip_ratio"] = high_mean
    elif measures == "sequence weight":
        phi = gamma_weights(logprobs, factor, tokens, options)
        of_rows = torch.where(moving, phi, 0).sum(1) / moving.sum(1).clamp(min=1)
        metrics["vespo/phi_seq_mean"] = _mean(of_rows, moving.any(1))
    elif measures == "clip":
        low_mean, low = clip_ratio(clip < 0)
        region_mean, extremes = clip_ratio(clip != 0)[0], (-_largest(-low, nonempty), _largest(high, nonempty))
        names = ("low_mean", "high_mean", "region_mean", "low_min", "high_max")
        values = (low_mean, high_mean, region_mean, *extremes)
        metrics |= {f"clip_ratio/{name}": value for name, value in zip(names, values, strict=True)}
    return metrics


def _mean(values: Tensor, where: Tensor) -> Tensor:
    """Average the values at some places, (); nan if there is none."""
    return torch.where(where, values, 0).sum() / where.sum()


def _largest(values: Tensor, where: Tensor) -> Tensor:
    """Find the largest of the values at some places, (); nan if there is none."""
    return torch.where(where.any(), torch.where(where, values, -math.inf).max(), math.nan)
