"""Compute the policy loss of rows of logits and its gradient by the logits, in one pass over each row."""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.row_logprobs import run_softmax
from ..ops.row_softmax import LogitRows, target_logprob, write_gradient, write_zeros
from ..ops.triton_math import minimum
from .options import LossOptions
from .token_loss import LOG_RATIO_MAX, Tokens, policy_gradient, policy_terms
from .types import LOSS_TYPES

STATS = ("logprob", "entropy", "ratio", "kl", "clip")  # values of each token that metrics are made of


@triton.jit
def clipped_loss(
    logprob, old, advantage, weight, ref, low, high, delta, beta, log_ratio_max,
    CLIPS: tl.constexpr, HAS_REF: tl.constexpr,
):  # fmt: skip
    """Return the loss of one token, its derivative by the log-prob, ratio, kl (k3) and clip, fp32 scalars."""
    # Plain form: `token_loss.clipped`, or without CLIPS `token_loss.reinforce`, in `policy_terms`.
    log_ratio = logprob - old
    ratio = tl.exp(minimum(log_ratio, log_ratio_max))
    weighted = weight * advantage
    clip = 0.0
    if CLIPS:
        capped = minimum(ratio, delta)
        first = capped * weighted
        second = minimum(tl.maximum(ratio, low), high) * weighted
        loss = -minimum(first, second)
        unclipped = (ratio >= low) & (ratio <= high)
        passes = ((first <= second) & (ratio <= delta)) | ((first > second) & unclipped)
        slope = tl.where(passes & (log_ratio <= log_ratio_max), -ratio * weighted, 0.0)
        clip = tl.where((capped > high) & (weighted > 0), 1.0, 0.0)
        clip = tl.where((capped < low) & (weighted < 0), -1.0, clip)
    else:
        slope = -weighted
        loss = slope * logprob
    kl = 0.0
    if HAS_REF:
        gap = minimum(ref - logprob, log_ratio_max)
        kl = tl.exp(gap) - gap - 1.0
        loss += beta * kl
        slope += beta * tl.where(gap < log_ratio_max, 1.0 - tl.exp(gap), 0.0)
    return loss, slope, ratio, kl, clip


@triton.jit(do_not_specialize=["N", "T"])  # lengths never recompile
def policy_rows_kernel(
    p_logits, p_bias, p_gradient, p_targets, p_old, p_advantages, p_weights, p_ref, p_scale,
    p_entropy_scale, p_loss, p_stats, p_by_logprob, N, T, V, stride_b, stride_t, stride_v, stride_gb, stride_gt,
    stride_gv, inv_temperature, softcap, low, high, delta, beta, log_ratio_max,
    CLIPS: tl.constexpr, HAS_OLD: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    HAS_REF: tl.constexpr, HAS_ENTROPY_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    OVERLAPS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Compute one row where `has_kernel`: log-prob, loss, metrics and gradient. p_stats is (5, N): `STATS`."""
    # Plain form: `row_logprobs_reference`, then `policy_gradient`, then `row_gradients_reference`.
    i_n = tl.program_id(0).to(tl.int64)
    p_logits += i_n // T * stride_b + i_n % T * stride_t
    p_gradient += i_n // T * stride_gb + i_n % T * stride_gt
    scale = tl.load(p_scale + i_n)
    target = tl.load(p_targets + i_n)
    logprob = 0.0
    entropy = 0.0
    row_max = 0.0
    log_sum = 0.0
    loss = 0.0
    ratio = 0.0
    kl = 0.0
    clip = 0.0
    by_logprob = 0.0
    by_entropy = 0.0
    if scale > 0:
        logprob, row_max, log_sum, entropy = target_logprob(
            p_logits, p_bias, target, V, stride_v, inv_temperature, softcap,
            HAS_BIAS, HAS_SOFTCAP, WITH_ENTROPY, BLOCK, VECTOR, LOG2E,
        )  # fmt: skip
        old = tl.load(p_old + i_n) if HAS_OLD else logprob
        weight = tl.load(p_weights + i_n) if HAS_WEIGHTS else 1.0
        ref = tl.load(p_ref + i_n) if HAS_REF else 0.0
        loss, slope, ratio, kl, clip = clipped_loss(
            logprob, old, tl.load(p_advantages + i_n), weight, ref,
            low, high, delta, beta, log_ratio_max, CLIPS, HAS_REF,
        )  # fmt: skip
        loss = loss * scale
        by_logprob = slope * scale
        if HAS_ENTROPY_SCALE:
            entropy_scale = tl.load(p_entropy_scale)
            loss -= entropy * entropy_scale
            by_entropy = -entropy_scale
    tl.store(p_loss + i_n, loss)
    tl.store(p_by_logprob + i_n, by_logprob)
    tl.store(p_stats + i_n, logprob)
    tl.store(p_stats + N + i_n, entropy)
    tl.store(p_stats + 2 * N + i_n, ratio)
    tl.store(p_stats + 3 * N + i_n, kl)
    tl.store(p_stats + 4 * N + i_n, clip)
    if (by_logprob == 0) & (by_entropy == 0):
        write_zeros(p_gradient, V, stride_gv, BLOCK, VECTOR)
    else:
        write_gradient(
            p_logits, p_bias, p_gradient, target, V, stride_v, stride_gv,
            row_max, log_sum, entropy, by_logprob, by_entropy, inv_temperature, softcap,
            HAS_BIAS, HAS_SOFTCAP, WITH_ENTROPY, OVERLAPS, BLOCK, VECTOR, LOG2E,
        )  # fmt: skip


def policy_rows(
    rows: LogitRows,
    tokens: Tokens,
    entropy_scale: Tensor | None,
    options: LossOptions,
    gradient: Tensor,
    *,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the loss (), `STATS` (5, N) and the derivative by log-probs (N,); fill the `gradient` of `row_gradients`.

    `tokens` has fields (N,) in the compute dtype; `entropy_scale` is the 0-d factor of the entropies in the loss.
    """
    loss, by_logprob = torch.empty(2, rows.targets.numel(), dtype=torch.float32, device=rows.logits.device)
    stats = loss.new_empty(len(STATS), len(loss))
    numbers = (*options.bounds, options.delta or math.inf, options.beta, LOG_RATIO_MAX)
    run_softmax(
        policy_rows_kernel, rows, gradient, rows.targets, *tokens[:4], tokens.scale, entropy_scale, loss, stats,
        by_logprob, numbers=numbers, CLIPS=LOSS_TYPES[options.loss_type].formula == "clipped",
        HAS_OLD=tokens.old_logprobs is not None, HAS_WEIGHTS=tokens.weights is not None,
        HAS_REF=tokens.ref_logprobs is not None, HAS_ENTROPY_SCALE=entropy_scale is not None,
        WITH_ENTROPY=with_entropy,
    )  # fmt: skip
    return loss.sum(), stats, by_logprob


def has_kernel(tokens: Tokens, options: LossOptions) -> bool:
    """Whether one kernel computes rows whole: the losses that nearly all run, at the token level."""
    plain_kl = tokens.ref_logprobs is None or (options.kl_estimator == "k3" and not options.use_bias_correction_kl)
    formula, corrected = LOSS_TYPES[options.loss_type].formula, options.sampling_mode is not None
    return formula in ("clipped", "reinforce") and plain_kl and not corrected and not options.joins_tokens


def policy_of_logprobs(
    logprobs: Tensor,
    entropy: Tensor,
    tokens: Tokens,
    entropy_scale: Tensor | None,
    options: LossOptions,
    shape: Sequence[int],
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the loss (), `STATS` (5, N) from log-probs and entropies, (N,), and the derivatives (N,) by both.

    `shape` is (B, T); by log-probs the derivative is 0 unless the policy `learns`.
    """
    grid = tokens.map(lambda tensor: tensor.view(shape))
    if learns:
        terms, by_logprob = policy_gradient(logprobs.view(shape), grid, options)
    else:
        terms, by_logprob = policy_terms(logprobs.view(shape), grid, options), torch.zeros_like(logprobs)
    loss, by_entropy = (terms.loss * grid.scale).sum(), torch.zeros_like(entropy)
    if entropy_scale is not None:
        by_entropy = -entropy_scale * (tokens.scale > 0)
        loss = loss + (by_entropy * entropy).sum()
    per_token = (logprobs, entropy, terms.ratio, terms.kl, terms.clip)
    return loss, torch.stack([value.flatten() for value in per_token]), by_logprob.flatten(), by_entropy


def to_unit_scale(tokens: Tokens, entropy_scale: Tensor | None) -> tuple[Tokens, Tensor | None, Tensor]:
    """Take a factor () out of the scales of tokens and entropies, so that the largest of a token is 1."""
    # A token's gradient is of the order of 1 / (number of tokens), which half precision cannot resolve.
    unit = tokens.scale.amax()
    unit = torch.where(unit > 0, unit, torch.ones_like(unit))
    return tokens._replace(scale=tokens.scale / unit), None if entropy_scale is None else entropy_scale / unit, unit
