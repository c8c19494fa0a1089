"""From rows of logits to the policy loss and the gradient by the logits, in one pass over each row.

Rows are (B, T, V) logits of a model, or strips of them that `linear_policy_loss` makes. The plain PyTorch form
stands first; the Triton kernels follow it row by row. The formula of a token is in `policy_loss`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dispatch import interpreting
from .elementwise import LOG2E, tanh
from .policy_loss import LOG_RATIO_MAX, PolicyOptions, Tokens, policy_terms, token_terms_triton

STATS = ("logprob", "entropy", "ratio", "kl", "clip")
LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

LOWEST = -1.0e30
"""Stands in for -inf in `p * log p`, so that a forbidden token adds 0 and not nan."""


class Softmax(NamedTuple):
    """How logits become log-probs: `log_softmax(softcap * tanh(logits / softcap) / temperature)`; 0 is no cap."""

    temperature: float = 1.0
    softcap: float = 0.0


class RowLogprobs(NamedTuple):
    """Of each of N rows: the target's log-prob, the entropy (nats), and log-sum-exp in two parts.

    `logsumexp = row_max / temperature + log_sum`; apart, they lose nothing to a large common shift of the logits.
    """

    logprobs: Tensor
    entropy: Tensor
    row_max: Tensor
    log_sum: Tensor


# The plain PyTorch form


class Probabilities(NamedTuple):
    """Logits (B, T, V) after their softmax; z are those in the compute dtype after bias and softcap."""

    p: Tensor  # (B, T, V)
    below: Tensor | None  # (B, T, V): (z - row_max) / temperature, at least LOWEST; if kept
    targets: Tensor  # (B, T, 1), 0 where a row has none
    chosen: Tensor  # (B, T, 1): (z - row_max) / temperature at the target
    row_max: Tensor  # (B, T, 1)
    log_sum: Tensor  # (B, T, 1): log of the sum of exp((z - row_max) / temperature)
    slope: Tensor | None  # (B, T, V): the softcap's


def probabilities(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    has_target: Tensor,
    softmax: Softmax,
    *,
    keep_below: bool,
    room: Tensor | None = None,
) -> Probabilities:
    """What log-probs and gradients share; targets and has_target are (N,), N = B * T.

    `p` lies in `room` (B, T, V) if that has the compute dtype and `below` is not kept; it may be the logits' own
    memory. Fresh memory of that size takes longer than all the arithmetic. The sum is read off the largest
    probability: torch vectorises softmax on every CPU, unlike exp.
    """
    z = logits.to(compute_dtype(logits.dtype))
    if room is not None and room.dtype != z.dtype:
        room = None
    if bias is not None:
        z = torch.add(z, bias.to(z.dtype), out=room)
    slope = None
    if softmax.softcap:
        squashed = torch.div(z, softmax.softcap, out=room).tanh_()
        slope = 1 - squashed * squashed
        z = squashed.mul_(softmax.softcap)
    row_max = z.amax(-1, keepdim=True)
    below = torch.sub(z, row_max, out=room)
    if softmax.temperature != 1:
        below.div_(softmax.temperature)
    index = torch.where(has_target, targets, 0).view(*logits.shape[:2], 1)
    chosen = below.gather(-1, index)
    p = torch.softmax(below, -1, out=None if keep_below else below)
    log_sum = -p.amax(-1, keepdim=True).log()
    return Probabilities(p, below.clamp_(min=LOWEST) if keep_below else None, index, chosen, row_max, log_sum, slope)


def row_logprobs_reference(of: Probabilities, counted: Tensor) -> RowLogprobs:
    """`RowLogprobs`, with entropy if `below` was kept; rows that do not count hold zeros, whatever their logits are."""
    entropy = torch.zeros_like(of.log_sum)
    if of.below is not None:
        entropy = of.log_sum - (of.p * of.below).sum(-1, keepdim=True)
    fields = (of.chosen - of.log_sum, entropy, of.row_max, of.log_sum)
    return RowLogprobs(*(torch.where(counted, field.flatten(), 0) for field in fields))


def row_gradients_reference(
    of: Probabilities, by_logprob: Tensor, by_entropy: Tensor | None, softmax: Softmax
) -> Tensor:
    """(B, T, V) derivative by the logits, given that by each row's log-prob and entropy (N,); over `p`.

    `p * (prob_coeff - by_entropy * log p) + by_logprob * onehot` with
    `prob_coeff = -by_logprob - by_entropy * entropy`, times the slopes of temperature and cap. Rows whose
    derivatives are both 0 get zeros.
    """
    dead = by_logprob == 0 if by_entropy is None else (by_logprob == 0) & (by_entropy == 0)
    by_logprob = by_logprob.view_as(of.chosen) / softmax.temperature
    if by_entropy is None:
        gradient = of.p.mul_(-by_logprob)
    else:
        assert of.below is not None
        by_entropy = by_entropy.view_as(of.chosen) / softmax.temperature
        p_logp = of.below.sub_(of.log_sum).mul_(of.p)
        entropy = -p_logp.sum(-1, keepdim=True)
        gradient = of.p.mul_(-by_logprob - by_entropy * entropy).sub_(p_logp.mul_(by_entropy))
    gradient.scatter_add_(-1, of.targets, by_logprob)
    if of.slope is not None:
        gradient.mul_(of.slope)
    if dead.any():
        gradient.masked_fill_(dead.view_as(of.chosen), 0)
    return gradient


# Triton


@triton.jit
def _load_logits(p_logits, p_bias, o_v, m_v, stride_v, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Some logits of a row in fp32 after bias and softcap, -inf outside the mask, and the cap's slope."""
    b_z = tl.load(p_logits + o_v.to(tl.int64) * stride_v, mask=m_v, other=float("-inf")).to(tl.float32)
    if HAS_BIAS:
        b_z += tl.load(p_bias + o_v, mask=m_v, other=0.0).to(tl.float32)
    b_slope = 1.0
    if HAS_SOFTCAP:
        b_squashed = tanh(b_z / softcap)
        b_z = tl.where(m_v, softcap * b_squashed, float("-inf"))
        b_slope = 1.0 - b_squashed * b_squashed
    return b_z, b_slope


@triton.jit
def _tile(i, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """Columns (BLOCK // VECTOR, VECTOR) of tile i of a row. A lane holds whole rows of it, VECTOR logits each."""
    o_v = i * BLOCK + tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    return o_v


@triton.jit
def _row_sums(
    p_logits, p_bias, V, stride_v, inv_temperature, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Largest logit of a row, log of the sum of exponentials from there, and the entropy; see the reference.

    Every VECTOR logits that a lane holds keep a maximum and sums of their own, so a tile costs one exponential per
    logit and no exchange between lanes. The row is read from its end: its beginning, which the gradient reads
    first, is then still in cache.
    """
    LOWEST: tl.constexpr = -1.0e38  # finite, so that no difference of two maxima is undefined
    LANES: tl.constexpr = BLOCK // VECTOR
    factor = inv_temperature * LOG2E
    b_max = tl.full([LANES], LOWEST, tl.float32)
    b_sum = tl.zeros([LANES], tl.float32)
    b_tilt = tl.zeros([LANES], tl.float32)  # sum of (z - max) * exp((z - max) / temperature)
    n_tiles = tl.cdiv(V, BLOCK)
    for i in range(0, n_tiles):
        o_v = _tile(n_tiles - 1 - i, BLOCK, VECTOR)
        b_z, _ = _load_logits(p_logits, p_bias, o_v, o_v < V, stride_v, softcap, HAS_BIAS, HAS_SOFTCAP)
        b_new = tl.maximum(b_max, tl.max(b_z, 1))
        b_gap = b_max - b_new
        b_decay = tl.exp2(b_gap * factor)
        b_below = b_z - b_new[:, None]
        b_p = tl.exp2(b_below * factor)
        if WITH_ENTROPY:
            b_tilt = b_decay * (b_tilt + b_gap * b_sum) + tl.sum(b_p * tl.maximum(b_below, LOWEST), 1)
        b_sum = b_decay * b_sum + tl.sum(b_p, 1)
        b_max = b_new
    row_max = tl.max(b_max, 0)
    b_gap = b_max - row_max
    b_decay = tl.exp2(b_gap * factor)
    total = tl.sum(b_sum * b_decay, 0)
    log_sum = tl.log(total)
    entropy = 0.0
    if WITH_ENTROPY:
        tilt = tl.sum(b_decay * (b_tilt + b_gap * b_sum), 0)
        entropy = log_sum - tilt / total * inv_temperature
    return row_max, log_sum, entropy


@triton.jit
def _row_logprob(
    p_logits, p_bias, target, V, stride_v, inv_temperature, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Log-prob of the target, then `_row_sums`; nan for a target outside the vocabulary, which is never read.

    The target's logit comes first: behind the sums, whose barriers are the last before a gradient goes over the
    logits, one warp could read it when another has overwritten it.
    """
    valid = (target >= 0) & (target < V)
    chosen, _ = _load_logits(p_logits, p_bias, target, valid, stride_v, softcap, HAS_BIAS, HAS_SOFTCAP)
    chosen = tl.where(valid, chosen, float("nan"))
    row_max, log_sum, entropy = _row_sums(
        p_logits, p_bias, V, stride_v, inv_temperature, softcap,
        HAS_BIAS, HAS_SOFTCAP, WITH_ENTROPY, BLOCK, VECTOR, LOG2E,
    )  # fmt: skip
    return (chosen - row_max) * inv_temperature - log_sum, row_max, log_sum, entropy


@triton.jit
def _write_zeros(p_gradient, V, stride_v, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    for i in range(0, tl.cdiv(V, BLOCK)):
        o_v = _tile(i, BLOCK, VECTOR)
        b_zero = tl.zeros([BLOCK // VECTOR, VECTOR], p_gradient.dtype.element_ty)
        tl.store(p_gradient + o_v.to(tl.int64) * stride_v, b_zero, mask=o_v < V)


@triton.jit
def _write_gradient(
    p_logits, p_bias, p_gradient, target, V, stride_v, stride_gv,
    row_max, log_sum, entropy, by_logprob, by_entropy, inv_temperature, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    OVERLAPS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Gradient of a row by its logits; see `row_gradients_reference`. It may go over the logits themselves.

    OVERLAPS: the gradient's elements are narrower than the logits' and start at the same address. Then tile i of
    the gradient lies over tiles <= i of the logits, and no lane may store before all have loaded.
    """
    prob_coeff = -by_logprob
    if WITH_ENTROPY:
        prob_coeff -= by_entropy * entropy
    prob_coeff *= inv_temperature
    label_coeff = by_logprob * inv_temperature
    entropy_coeff = by_entropy * inv_temperature
    for i in range(0, tl.cdiv(V, BLOCK)):
        o_v = _tile(i, BLOCK, VECTOR)
        m_v = o_v < V
        b_z, b_slope = _load_logits(p_logits, p_bias, o_v, m_v, stride_v, softcap, HAS_BIAS, HAS_SOFTCAP)
        b_logp = (b_z - row_max) * inv_temperature - log_sum
        b_p = tl.exp2(b_logp * LOG2E)
        b_gradient = b_p * prob_coeff
        if WITH_ENTROPY:
            b_gradient -= b_p * entropy_coeff * tl.maximum(b_logp, -1.0e30)
        if (target >= i * BLOCK) & (target < (i + 1) * BLOCK):
            b_gradient = tl.where(o_v == target, b_gradient + label_coeff, b_gradient)
        b_gradient = b_gradient * b_slope
        if OVERLAPS:
            tl.debug_barrier()
        p_tile = p_gradient + o_v.to(tl.int64) * stride_gv
        tl.store(p_tile, b_gradient.to(p_gradient.dtype.element_ty), mask=m_v)


@triton.jit(do_not_specialize=["N", "T"])  # lengths never recompile
def row_logprobs_kernel(
    p_logits, p_bias, p_targets, p_counted, p_rows, N, T, V, stride_b, stride_t, stride_v,
    inv_temperature, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """One row: `row_logprobs_reference`. p_rows is (4, N): the fields of `RowLogprobs`."""
    i_n = tl.program_id(0).to(tl.int64)
    logprob = 0.0
    entropy = 0.0
    row_max = 0.0
    log_sum = 0.0
    if tl.load(p_counted + i_n) > 0:
        p_logits += i_n // T * stride_b + i_n % T * stride_t
        target = tl.load(p_targets + i_n)
        logprob, row_max, log_sum, entropy = _row_logprob(
            p_logits, p_bias, target, V, stride_v, inv_temperature, softcap,
            HAS_BIAS, HAS_SOFTCAP, WITH_ENTROPY, BLOCK, VECTOR, LOG2E,
        )  # fmt: skip
    tl.store(p_rows + i_n, logprob)
    tl.store(p_rows + N + i_n, entropy)
    tl.store(p_rows + 2 * N + i_n, row_max)
    tl.store(p_rows + 3 * N + i_n, log_sum)


@triton.jit(do_not_specialize=["N", "T"])  # lengths never recompile
def row_gradients_kernel(
    p_logits, p_bias, p_gradient, p_targets, p_rows, p_by_logprob, p_by_entropy,
    N, T, V, stride_b, stride_t, stride_v, stride_gb, stride_gt, stride_gv, inv_temperature, softcap,
    HAS_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    OVERLAPS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """One row: `row_gradients_reference`. p_rows, if it is there, is what `row_logprobs_kernel` wrote."""
    i_n = tl.program_id(0).to(tl.int64)
    p_logits += i_n // T * stride_b + i_n % T * stride_t
    p_gradient += i_n // T * stride_gb + i_n % T * stride_gt
    by_logprob = tl.load(p_by_logprob + i_n)
    by_entropy = 0.0
    if WITH_ENTROPY:
        by_entropy = tl.load(p_by_entropy + i_n)
    if (by_logprob == 0) & (by_entropy == 0):
        _write_zeros(p_gradient, V, stride_gv, BLOCK, VECTOR)
    else:
        if HAS_ROWS:
            entropy = tl.load(p_rows + N + i_n)
            row_max = tl.load(p_rows + 2 * N + i_n)
            log_sum = tl.load(p_rows + 3 * N + i_n)
        else:
            row_max, log_sum, entropy = _row_sums(
                p_logits, p_bias, V, stride_v, inv_temperature, softcap,
                HAS_BIAS, HAS_SOFTCAP, WITH_ENTROPY, BLOCK, VECTOR, LOG2E,
            )  # fmt: skip
        _write_gradient(
            p_logits, p_bias, p_gradient, tl.load(p_targets + i_n), V, stride_v, stride_gv,
            row_max, log_sum, entropy, by_logprob, by_entropy, inv_temperature, softcap,
            HAS_BIAS, HAS_SOFTCAP, WITH_ENTROPY, OVERLAPS, BLOCK, VECTOR, LOG2E,
        )  # fmt: skip


@triton.jit(do_not_specialize=["N", "T"])  # lengths never recompile
def policy_rows_kernel(
    p_logits, p_bias, p_gradient, p_targets, p_old, p_advantages, p_weights, p_ref, p_scale, p_entropy_scale,
    p_loss, p_stats, p_by_logprob, N, T, V, stride_b, stride_t, stride_v, stride_gb, stride_gt, stride_gv,
    inv_temperature, softcap, low, high, delta, beta, sapo_pos, sapo_neg, log_ratio_max,
    SURROGATE: tl.constexpr, HAS_OLD: tl.constexpr, HAS_WEIGHTS: tl.constexpr, HAS_REF: tl.constexpr,
    CORRECT_KL: tl.constexpr, HAS_ENTROPY_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    OVERLAPS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """One row at the token level: log-prob, loss, metrics and gradient. p_stats is (5, N): `STATS`.

    Plain form: `row_logprobs_reference`, then `policy_terms`, then `row_gradients_reference`.
    """
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
        logprob, row_max, log_sum, entropy = _row_logprob(
            p_logits, p_bias, target, V, stride_v, inv_temperature, softcap,
            HAS_BIAS, HAS_SOFTCAP, WITH_ENTROPY, BLOCK, VECTOR, LOG2E,
        )  # fmt: skip
        old = logprob
        weight = 1.0
        ref = 0.0
        if HAS_OLD:
            old = tl.load(p_old + i_n)
        if HAS_WEIGHTS:
            weight = tl.load(p_weights + i_n)
        if HAS_REF:
            ref = tl.load(p_ref + i_n)
        loss, slope, ratio, kl, clip = token_terms_triton(
            logprob, old, tl.load(p_advantages + i_n), weight, ref,
            low, high, delta, beta, sapo_pos, sapo_neg, log_ratio_max, SURROGATE, HAS_REF, CORRECT_KL,
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
        _write_zeros(p_gradient, V, stride_gv, BLOCK, VECTOR)
    else:
        _write_gradient(
            p_logits, p_bias, p_gradient, target, V, stride_v, stride_gv,
            row_max, log_sum, entropy, by_logprob, by_entropy, inv_temperature, softcap,
            HAS_BIAS, HAS_SOFTCAP, WITH_ENTROPY, OVERLAPS, BLOCK, VECTOR, LOG2E,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T"])  # lengths never recompile
def scale_rows_kernel(
    p_rows, p_out, p_factor, T, V, stride_b, stride_t, stride_v, stride_ob, stride_ot, stride_ov,
    INPLACE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One row times a factor that lies on the device; in place, nothing is read or written if it is 1."""
    i_n = tl.program_id(0).to(tl.int64)
    factor = tl.load(p_factor)
    if (not INPLACE) | (factor != 1.0):
        p_rows += i_n // T * stride_b + i_n % T * stride_t
        p_out += i_n // T * stride_ob + i_n % T * stride_ot
        for i in range(0, tl.cdiv(V, BLOCK)):
            o_v = _tile(i, BLOCK, VECTOR)
            b_row = tl.load(p_rows + o_v.to(tl.int64) * stride_v, mask=o_v < V, other=0.0).to(tl.float32)
            p_block = p_out + o_v.to(tl.int64) * stride_ov
            tl.store(p_block, (b_row * factor).to(p_out.dtype.element_ty), mask=o_v < V)


def launch_options(vocabulary: int, element_size: int, *, hip: bool = False) -> dict[str, int]:
    """The shipped tile of a row's logits and number of warps.

    They depend on V, the logits' bytes and the vendor alone, so a row's log-prob is the same bits whatever batch or
    chunk it is in. A lane loads 16 bytes at a time. One program fills a multiprocessor: more rows at once would not
    fit the L2 cache, from which the gradient is to read them again.
    """
    block = min(triton.next_power_of_2(max(vocabulary, 64)), 8192 if hip else 16384)
    lanes = block // 16  # 16 logits a lane and tile
    warps = max(lanes // (64 if hip else 32), 1)
    return {"BLOCK": block, "VECTOR": 16 // element_size, "num_warps": warps}


def _launch(logits: Tensor) -> dict[str, Any]:
    options: dict[str, Any] = launch_options(logits.size(-1), logits.element_size(), hip=torch.version.hip is not None)
    if interpreting():
        options["num_warps"] = 1
    return options


def _run(kernel: Any, logits: Tensor, *arguments: Any, **constexprs: Any) -> None:
    """Run a kernel with a program for each row of logits (B, T, V), on their device."""
    with torch.cuda.device_of(logits):
        kernel[(logits.size(0) * logits.size(1),)](*arguments, **constexprs, **_launch(logits))


def row_logprobs(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    counted: Tensor,
    softmax: Softmax,
    *,
    with_entropy: bool,
    backend: str,
) -> RowLogprobs:
    """`RowLogprobs` of logits (B, T, V) of any strides; targets (N,) int64 and counted (N,) bool, N = B * T."""
    if backend == "torch":
        return row_logprobs_reference(
            probabilities(logits, bias, targets, counted, softmax, keep_below=with_entropy), counted
        )
    n = logits.size(0) * logits.size(1)
    rows = torch.empty(4, n, dtype=torch.float32, device=logits.device)
    _run(
        row_logprobs_kernel, logits, logits, bias, targets, counted, rows,
        n, logits.size(1), logits.size(2), *logits.stride(),
        1 / softmax.temperature, softmax.softcap,
        HAS_BIAS=bias is not None, HAS_SOFTCAP=softmax.softcap != 0, WITH_ENTROPY=with_entropy, LOG2E=LOG2E,
    )  # fmt: skip
    return RowLogprobs(*rows)


def row_gradients(
    logits: Tensor,
    bias: Tensor | None,
    gradient: Tensor,
    targets: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor | None,
    softmax: Softmax,
    *,
    rows: RowLogprobs | None = None,
    backend: str,
) -> None:
    """Write the gradient by logits (B, T, V) into `gradient`, of the same shape, perhaps over the logits themselves.

    A narrower dtype over the logits' own memory is fine too if both start at one address in every row. `rows`, of
    these very logits bit by bit, saves the kernel a reading of them.
    """
    if backend == "torch":
        keep_below, has_target = by_entropy is not None, by_logprob != 0
        of = probabilities(logits, bias, targets, has_target, softmax, keep_below=keep_below, room=gradient)
        _copy_unless_there(row_gradients_reference(of, by_logprob, by_entropy, softmax), gradient)
        return
    _run(
        row_gradients_kernel, logits, logits, bias, gradient, targets, None if rows is None else torch.stack(rows),
        by_logprob, by_entropy,
        targets.numel(), logits.size(1), logits.size(2), *logits.stride(), *gradient.stride(),
        1 / softmax.temperature, softmax.softcap,
        HAS_ROWS=rows is not None, HAS_BIAS=bias is not None, HAS_SOFTCAP=softmax.softcap != 0,
        WITH_ENTROPY=by_entropy is not None,
        OVERLAPS=gradient.dtype != logits.dtype and gradient.data_ptr() == logits.data_ptr(), LOG2E=LOG2E,
    )  # fmt: skip


def policy_rows(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    tokens: Tokens,
    entropy_scale: Tensor | None,
    options: PolicyOptions,
    softmax: Softmax,
    gradient: Tensor | None,
    *,
    with_entropy: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of logits (B, T, V), `STATS` (5, N) and derivative by log-probs (N,); that by logits goes to `gradient`.

    targets (N,), fields of `tokens` (N,) in the compute dtype, N = B * T. The loss is a sum over tokens, so strips
    of rows may be taken one at a time, at the sequence level if no sequence is cut.
    """
    if gradient is not None and options.level == "token" and backend == "triton":
        return _policy_rows_fused(
            logits, bias, targets, tokens, entropy_scale, options, softmax, gradient, with_entropy
        )
    counted, shape = tokens.scale > 0, logits.shape[:2]
    if backend == "torch":
        of = probabilities(logits, bias, targets, counted, softmax, keep_below=with_entropy, room=gradient)
        rows = row_logprobs_reference(of, counted)
    else:
        rows = row_logprobs(logits, bias, targets, counted, softmax, with_entropy=with_entropy, backend=backend)
    loss, stats, by_logprob, by_entropy = policy_of_logprobs(
        rows.logprobs, rows.entropy, tokens, entropy_scale, options, shape
    )
    if gradient is not None and backend == "torch":
        _copy_unless_there(row_gradients_reference(of, by_logprob, by_entropy, softmax), gradient)
    elif gradient is not None:
        row_gradients(logits, bias, gradient, targets, by_logprob, by_entropy, softmax, rows=rows, backend=backend)
    return loss, stats, by_logprob


def _copy_unless_there(values: Tensor, out: Tensor) -> None:
    if values is not out:
        out.copy_(values)


def policy_of_logprobs(
    logprobs: Tensor,
    entropy: Tensor,
    tokens: Tokens,
    entropy_scale: Tensor | None,
    options: PolicyOptions,
    shape: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Loss, `STATS` (5, N), and the derivatives (N,) by log-probs and entropies, of N = B * T tokens of `shape`."""
    grid = tokens.map(lambda tensor: tensor.view(shape))
    terms, by_logprob = policy_terms(logprobs.view(shape), grid, options)
    counted = tokens.scale > 0
    loss = (terms.loss * grid.scale).sum()
    by_entropy = None
    if entropy_scale is not None:
        by_entropy = -entropy_scale * counted
        loss = loss + (by_entropy * entropy).sum()
    per_token = (logprobs, entropy, terms.ratio, terms.kl, terms.clip)
    stats = torch.stack([value.reshape(-1) for value in per_token])
    return loss, stats, by_logprob.reshape(-1), by_entropy


def _policy_rows_fused(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    tokens: Tokens,
    entropy_scale: Tensor | None,
    options: PolicyOptions,
    softmax: Softmax,
    gradient: Tensor,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    n = targets.numel()
    loss = torch.empty(n, dtype=torch.float32, device=logits.device)
    by_logprob = torch.empty_like(loss)
    stats = torch.empty(len(STATS), n, dtype=torch.float32, device=logits.device)
    cispo = options.surrogate == "cispo"
    _run(
        policy_rows_kernel, logits, logits, bias, gradient, targets, *tokens, entropy_scale, loss, stats, by_logprob,
        n, logits.size(1), logits.size(2), *logits.stride(), *gradient.stride(),
        1 / softmax.temperature, softmax.softcap,
        1 - options.epsilon, options.epsilon_high if cispo else 1 + options.epsilon_high, options.delta,
        options.beta, options.sapo_temperature_pos, options.sapo_temperature_neg, LOG_RATIO_MAX,
        SURROGATE=options.surrogate, HAS_OLD=tokens.old_logprobs is not None,
        HAS_WEIGHTS=tokens.weights is not None, HAS_REF=tokens.ref_logprobs is not None,
        CORRECT_KL=bool(options.use_bias_correction_kl), HAS_ENTROPY_SCALE=entropy_scale is not None,
        HAS_BIAS=bias is not None, HAS_SOFTCAP=softmax.softcap != 0, WITH_ENTROPY=with_entropy,
        OVERLAPS=gradient.dtype != logits.dtype and gradient.data_ptr() == logits.data_ptr(), LOG2E=LOG2E,
    )  # fmt: skip
    return loss.sum(), stats, by_logprob


def scale_rows(rows: Tensor, factor: Tensor, out: Tensor, *, backend: str) -> None:
    """Write (B, T, V) rows times a 0-d factor to `out`; in place, a factor of 1 costs nothing (Triton)."""
    if backend == "torch":
        out.copy_(rows.to(factor.dtype) * factor)
        return
    _run(
        scale_rows_kernel, rows, rows, out, factor, rows.size(1), rows.size(2), *rows.stride(), *out.stride(),
        INPLACE=out.data_ptr() == rows.data_ptr(),
    )  # fmt: skip


def compute_dtype(logits: torch.dtype) -> torch.dtype:
    """What sums and exponentials are formed in: float64 for float64, else float32."""
    return torch.float64 if logits == torch.float64 else torch.float32


def to_unit_scale(tokens: Tokens, entropy_scale: Tensor | None) -> tuple[Tokens, Tensor | None, Tensor]:
    """Tokens whose largest scale is 1, and the factor (0-d) that was taken out.

    Gradients of a token are of the order of 1 / (number of tokens), which half precision has no room for; without
    that factor they are of the order of the advantages.
    """
    unit = tokens.scale.amax()
    unit = torch.where(unit > 0, unit, torch.ones_like(unit))
    return tokens._replace(scale=tokens.scale / unit), None if entropy_scale is None else entropy_scale / unit, unit
