"""Define the log-prob and entropy of a row of logits and their derivative, once for every kernel of rows.

The plain PyTorch form is first, for rows (B, T, V) at once; the Triton functions mirror it for one row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..options import POSITIVE
from .triton_math import tanh

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of the kernels; the PyTorch form also takes float64
FLOAT32_NOISE = 3e-5  # typical error (nats) of a log-prob computed in float32; a floor for measured noise
LOWEST = -1.0e30  # stand-in for -inf in `p * log p`, so that a forbidden token adds 0 and not nan
_IN_CACHE = 2**17  # elements of a block of rows that a CPU's cache holds


class Softmax(NamedTuple):
    """Options of `log_softmax(softcap * tanh(logits / softcap) / temperature)`; a softcap of 0 is none."""

    temperature: float = 1.0
    softcap: float = 0.0

    @classmethod
    def of(cls, temperature: float, softcap: float | None, logit_scale: float) -> "Softmax":
        """Put a scale of the logits into both; raises `ValueError` unless all three are `options.POSITIVE`."""
        cap = {} if softcap is None else {"softcap": softcap}
        POSITIVE.check(temperature=temperature, logit_scale=logit_scale, **cap)
        return cls(temperature / logit_scale, (softcap or 0.0) / logit_scale)


def compute_dtype(logits: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and exponentials: float64 for float64, else float32."""
    return torch.float64 if logits == torch.float64 else torch.float32


def check_logits_dtype(name: str, tensor: Tensor, backend: str) -> None:
    """Raise `TypeError` for a dtype that the backend does not take."""
    allowed = LOGIT_DTYPES if backend == "triton" else (*LOGIT_DTYPES, torch.float64)
    if tensor.dtype not in allowed:
        raise TypeError(f"{name} must be one of {allowed} for backend={backend!r}, got {tensor.dtype}")


# The plain PyTorch form


class LogitRows(NamedTuple):
    """Rows of logits with their targets, and how log-probs are made of them."""

    logits: Tensor  # (B, T, V) of any strides; N = B * T
    bias: Tensor | None  # (V,), added to each row
    targets: Tensor  # (N,) int64
    softmax: Softmax = Softmax()
    backend: str = "torch"
    restricted: bool = False  # some logits are -inf, and stay so under the softcap


class Probabilities(NamedTuple):
    """Softmax of logits; z are those in the compute dtype after bias and softcap."""

    p: Tensor  # (B, T, V)
    below: Tensor | None  # (B, T, V): (z - row_max) / temperature, at least LOWEST; with `keep_below`
    tilt: Tensor | None  # (B, T, 1): the sum of p * below; with `with_entropy`
    targets: Tensor  # (B, T, 1), 0 where a row has none
    chosen: Tensor  # (B, T, 1): (z - row_max) / temperature at the target
    row_max: Tensor  # (B, T, 1)
    log_sum: Tensor  # (B, T, 1): log of the sum of exp((z - row_max) / temperature)
    slope: Tensor | None  # (B, T, V): the softcap's


class RowLogprobs(NamedTuple):
    """Log-prob of the target, entropy (nats) and `logsumexp = row_max / temperature + log_sum` of each of N rows."""

    logprobs: Tensor
    entropy: Tensor
    row_max: Tensor
    log_sum: Tensor
    softmaxed: Probabilities | None = None  # of the same rows, where a gradient follows


def probabilities(
    rows: LogitRows,
    has_target: Tensor,
    *,
    with_entropy: bool = False,
    keep_below: bool = False,
    out: Tensor | None = None,
) -> Probabilities:
    """Compute the parts that log-probs and gradients share, in the compute dtype.

    Targets are read where has_target (N,) is True; `keep_below` prepares the entropy's gradient. If `out` (B, T, V),
    perhaps the logits' own memory, has the compute dtype, `p` goes there unless `below` is kept.
    """
    # Allocating memory of the size of the logits takes longer than all the arithmetic, hence `out`.
    logits, bias, targets, softmax, _, restricted = rows
    z = logits.to(compute_dtype(logits.dtype))
    if out is not None and out.dtype != z.dtype:
        out = None
    if bias is not None:
        z = torch.add(z, bias.to(z.dtype), out=out)
    slope = None
    if softmax.softcap:
        closed = z == -torch.inf if restricted else None
        squashed = torch.div(z, softmax.softcap, out=out).tanh_()
        slope = 1 - squashed * squashed
        z = squashed.mul_(softmax.softcap)
        if closed is not None:
            z.masked_fill_(closed, -torch.inf)
    row_max = z.amax(-1, keepdim=True)
    below = torch.sub(z, row_max, out=out)
    if softmax.temperature != 1:
        below.div_(softmax.temperature)
    index = torch.where(has_target, targets, 0).view(*logits.shape[:2], 1)
    chosen = below.gather(-1, index)
    p, tilt = below, torch.zeros_like(chosen) if with_entropy else None
    if keep_below:
        p = torch.empty_like(below)
    if keep_below or with_entropy:
        on_cpu, size = below.device.type == "cpu", max(below.size(0) * below.size(2), 1)
        height = max(_IN_CACHE // size if on_cpu else below.size(1), 1)
        for start in range(0, below.size(1), height):
            part = slice(start, start + height)
            some = below[:, part]
            block = torch.softmax(some, -1)
            some.clamp_(min=LOWEST)
            if tilt is not None:
                tilt[:, part] = (block * some).sum(-1, keepdim=True)
            p[:, part] = block
    else:
        torch.softmax(below, -1, out=p)
    log_sum = -p.amax(-1, keepdim=True).log()  # torch vectorises softmax on every CPU, unlike exp
    return Probabilities(p, below if keep_below else None, tilt, index, chosen, row_max, log_sum, slope)


def row_logprobs_reference(softmaxed: Probabilities, counted: Tensor) -> RowLogprobs:
    """Return `RowLogprobs`, with entropy if there is a `tilt`, and zeros for rows that do not count."""
    chosen, log_sum, tilt = softmaxed.chosen, softmaxed.log_sum, softmaxed.tilt
    entropy = torch.zeros_like(log_sum) if tilt is None else log_sum - tilt
    fields = torch.stack([field.flatten() for field in (chosen - log_sum, entropy, softmaxed.row_max, log_sum)])
    return RowLogprobs(*torch.where(counted, fields, 0))


def row_gradients_reference(
    softmaxed: Probabilities, by_logprob: Tensor, by_entropy: Tensor | None, softmax: Softmax
) -> Tensor:
    """Compute the derivative by the logits (B, T, V) from those by each row's log-prob and entropy, (N,).

    `p * (prob_coeff - by_entropy * log p) + by_logprob * onehot` with
    `prob_coeff = -by_logprob - by_entropy * entropy`, times the slopes of temperature and cap. Rows whose
    derivatives are both 0 get zeros. It is written over `p`, and an entropy's derivative needs `below`.
    """
    p, below = softmaxed.p, softmaxed.below
    dead = by_logprob == 0 if by_entropy is None else (by_logprob == 0) & (by_entropy == 0)
    by_logprob = by_logprob.view_as(softmaxed.chosen) / softmax.temperature
    if by_entropy is None:
        gradient = p.mul_(-by_logprob)
    else:
        assert below is not None
        by_entropy = by_entropy.view_as(softmaxed.chosen) / softmax.temperature
        p_logp = below.sub_(softmaxed.log_sum).mul_(p)
        entropy = -p_logp.sum(-1, keepdim=True)
        gradient = p.mul_(-by_logprob - by_entropy * entropy).sub_(p_logp.mul_(by_entropy))
    gradient.scatter_add_(-1, softmaxed.targets, by_logprob)
    if softmaxed.slope is not None:
        gradient.mul_(softmaxed.slope)
    if dead.any():
        gradient.masked_fill_(dead.view_as(softmaxed.chosen), 0)
    return gradient


# Triton


@triton.jit
def load_logits(
    p_logits, p_bias, o_v, m_v, stride_v, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Load some logits of a row in fp32 after bias and softcap, -inf outside the mask, and the cap's slope."""
    # LAST: nobody here reads them again, so that they are the first to leave the L2 cache.
    p_some = p_logits + o_v.to(tl.int64) * stride_v
    eviction: tl.constexpr = "evict_first" if LAST else ""
    b_z = tl.load(p_some, mask=m_v, other=float("-inf"), eviction_policy=eviction).to(tl.float32)
    if HAS_BIAS:
        b_z += tl.load(p_bias + o_v, mask=m_v, other=0.0).to(tl.float32)
    b_slope = 1.0
    if HAS_SOFTCAP:
        b_squashed = tanh(b_z / softcap)
        m_open = m_v
        if HAS_SOFTCAP == 2:  # `LogitRows.restricted`
            m_open = m_v & (b_z != float("-inf"))
        b_z = tl.where(m_open, softcap * b_squashed, float("-inf"))
        b_slope = 1.0 - b_squashed * b_squashed
    return b_z, b_slope


@triton.jit
def row_tile(i, V, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """Return columns (BLOCK // VECTOR, VECTOR) of tile i of a row, and which of its rows are within V."""
    # A lane holds whole rows of it, VECTOR logits each, of which all or none are read: one access of 16 bytes, of
    # whatever V is a multiple. The logits left over are `row_rest`.
    o_v = i * BLOCK + tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR
    return o_v + tl.arange(0, VECTOR)[None, :], o_v + VECTOR <= V


@triton.jit
def row_rest(V, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """Return columns (BLOCK // VECTOR,) behind the last VECTOR that is whole, and which of them are within V."""
    tl.static_assert(BLOCK >= VECTOR * VECTOR)
    o_v = V // VECTOR * VECTOR + tl.arange(0, BLOCK // VECTOR)
    return o_v, o_v < V


@triton.jit
def row_sums(
    p_logits, p_bias, V, stride_v, inv_temperature, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Return the largest logit of a row, log of the sum of exponentials from there, and the entropy."""
    # Every VECTOR logits that a lane holds have their own maximum and sums, so a tile costs one exponential per
    # logit and no exchange between lanes. The row is read from its end: its beginning, which the gradient reads first,
    # is then still in cache.
    LOWEST: tl.constexpr = -1.0e38  # finite, so that no difference of two maxima is undefined
    LANES: tl.constexpr = BLOCK // VECTOR
    factor = inv_temperature * LOG2E
    b_max = tl.full([LANES], LOWEST, tl.float32)
    b_sum = tl.zeros([LANES], tl.float32)
    b_tilt = tl.zeros([LANES], tl.float32)  # sum of (z - max) * exp((z - max) / temperature)
    if V % VECTOR != 0:
        o_rest, m_rest = row_rest(V, BLOCK, VECTOR)
        b_rest, _slope = load_logits(p_logits, p_bias, o_rest, m_rest, stride_v, softcap, HAS_BIAS, HAS_SOFTCAP, False)
        b_max = tl.maximum(b_max, b_rest)
        b_sum = tl.exp2(b_rest - b_max)  # 1, or 0 where there is no logit, or nan
    n_tiles = tl.cdiv(V, BLOCK)
    for i in range(0, n_tiles):
        o_v, m_v = row_tile(n_tiles - 1 - i, V, BLOCK, VECTOR)
        b_z, _ = load_logits(p_logits, p_bias, o_v, m_v, stride_v, softcap, HAS_BIAS, HAS_SOFTCAP, False)
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
def target_logprob(
    p_logits, p_bias, target, V, stride_v, inv_temperature, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Return the log-prob of the target, nan if it is outside the vocabulary, then `row_sums`."""
    # The target's logit comes first: behind the sums, whose barriers are the last before a gradient goes over the
    # logits, one warp could read it when another has overwritten it.
    valid = (target >= 0) & (target < V)
    chosen, _ = load_logits(p_logits, p_bias, target, valid, stride_v, softcap, HAS_BIAS, HAS_SOFTCAP, False)
    chosen = tl.where(valid, chosen, float("nan"))
    row_max, log_sum, entropy = row_sums(
        p_logits, p_bias, V, stride_v, inv_temperature, softcap,
        HAS_BIAS, HAS_SOFTCAP, WITH_ENTROPY, BLOCK, VECTOR, LOG2E,
    )  # fmt: skip
    return (chosen - row_max) * inv_temperature - log_sum, row_max, log_sum, entropy


@triton.jit
def write_zeros(p_gradient, V, stride_v, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """Write zeros for the gradient of a row."""
    b_zero = tl.zeros([BLOCK // VECTOR, VECTOR], p_gradient.dtype.element_ty)
    for i in range(0, tl.cdiv(V, BLOCK)):
        o_v, m_v = row_tile(i, V, BLOCK, VECTOR)
        tl.store(p_gradient + o_v.to(tl.int64) * stride_v, b_zero, mask=m_v, eviction_policy="evict_first")
    o_rest, m_rest = row_rest(V, BLOCK, VECTOR)
    b_zero_rest = tl.zeros([BLOCK // VECTOR], p_gradient.dtype.element_ty)
    tl.store(p_gradient + o_rest.to(tl.int64) * stride_v, b_zero_rest, mask=m_rest, eviction_policy="evict_first")


@triton.jit
def _write_some(
    p_logits, p_bias, p_gradient, o_v, m_v, target, near, stride_v, stride_gv,
    row_max, log2_sum, factor, softcap, prob_coeff, label_coeff, entropy_coeff,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Do `write_gradient` for some columns; `near` is whether the target may be one of them."""
    # Logits and gradient leave the L2 cache before the logits of other rows, which are yet to be read a second time.
    b_z, b_slope = load_logits(p_logits, p_bias, o_v, m_v, stride_v, softcap, HAS_BIAS, HAS_SOFTCAP, True)
    b_log2p = (b_z - row_max) * factor - log2_sum
    b_p = tl.exp2(b_log2p)
    b_gradient = b_p * prob_coeff
    if WITH_ENTROPY:
        b_gradient -= b_p * entropy_coeff * tl.maximum(b_log2p, -1.0e30)
    if near:
        b_gradient = tl.where(o_v == target, b_gradient + label_coeff, b_gradient)
    b_gradient = b_gradient * b_slope
    if OVERLAPS:
        tl.debug_barrier()
    p_some = p_gradient + o_v.to(tl.int64) * stride_gv
    tl.store(p_some, b_gradient.to(p_gradient.dtype.element_ty), mask=m_v, eviction_policy="evict_first")


@triton.jit
def write_gradient(
    p_logits, p_bias, p_gradient, target, V, stride_v, stride_gv,
    row_max, log_sum, entropy, by_logprob, by_entropy, inv_temperature, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    OVERLAPS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a row by its logits, perhaps over them; see `row_gradients_reference`."""
    # OVERLAPS: the gradient's elements are narrower than the logits' and start at the same address. Then tile i of the
    # gradient covers tiles <= i of the logits, and no lane may store before all have loaded.
    prob_coeff = -by_logprob
    if WITH_ENTROPY:
        prob_coeff -= by_entropy * entropy
    prob_coeff *= inv_temperature
    label_coeff = by_logprob * inv_temperature
    # Log-probs are to base 2, so that a logit's takes one multiplication and addition.
    entropy_coeff = by_entropy * inv_temperature / LOG2E
    factor = inv_temperature * LOG2E
    log2_sum = log_sum * LOG2E
    # 32 bytes of logits a lane at a time: 16 float32 logits, their bias, cap and gradient do not fit 64 registers.
    STEP: tl.constexpr = BLOCK * VECTOR // 8
    for i in range(0, tl.cdiv(V, STEP)):
        o_v, m_v = row_tile(i, V, STEP, VECTOR)
        near = (target >= i * STEP) & (target < (i + 1) * STEP)
        _write_some(
            p_logits, p_bias, p_gradient, o_v, m_v, target, near, stride_v, stride_gv,
            row_max, log2_sum, factor, softcap, prob_coeff, label_coeff, entropy_coeff,
            HAS_BIAS, HAS_SOFTCAP, WITH_ENTROPY, OVERLAPS,
        )  # fmt: skip
    if V % VECTOR != 0:
        o_rest, m_rest = row_rest(V, BLOCK, VECTOR)
        _write_some(
            p_logits, p_bias, p_gradient, o_rest, m_rest, target, True, stride_v, stride_gv,
            row_max, log2_sum, factor, softcap, prob_coeff, label_coeff, entropy_coeff,
            HAS_BIAS, HAS_SOFTCAP, WITH_ENTROPY, OVERLAPS,
        )  # fmt: skip
