"""Compute the log-prob of a target per row under a linear head, without the rows x vocabulary logits.

One Triton kernel multiplies tiles of hidden states and head and keeps a few sums per row and tile, one merges those
sums; the backward recomputes strips of logits and takes the row gradient of the policy loss.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..options import check_class
from .dispatch import architecture, resolve_backend
from .head_matmul import HeadGradients, autocast_operands, empty_strip, write_logits
from .kept_tokens import KeptTokens, Support
from .matmul import multiply
from .operator_arguments import arguments_of
from .row_logprobs import row_gradients, row_logprobs
from .row_softmax import LogitRows, Softmax, check_logits_dtype, compute_dtype
from .triton_math import LOG2E, minimum, tanh
from .tuning import tuned

STATISTICS_ROWS = 32768  # rows of one launch: the sums of its tiles take rows * V / BLOCK_N * 8 bytes
REFERENCE_COLUMNS, REFERENCE_ELEMENTS = 1024, 2**20  # columns of the head, and logits, of the PyTorch form at a time
STRIP_BYTES = {"cpu": 2**27, "cuda": 2**30}  # size of a backward strip of logits, by device type


def linear_logprob(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
    kept_tokens: KeptTokens | None = None,
    backend: str | None = None,
) -> Any:
    """Compute the log-prob (nats) of `targets[n]` under `softmax(logits[n] / temperature)`, for each of N rows.

    `logits = softcap * tanh(logit_scale * (hidden @ lm_head.T + bias) / softcap)`, without the tanh if `softcap` is
    None, formed and summed in float32. A row's result is the same bits whatever other rows there are (Triton).

    Args:
        hidden: (N, H) float32, bfloat16 or float16, rows of any stride, H contiguous; float64 on the PyTorch form.
        lm_head: (V, H) of that dtype, likewise. Under autocast both are cast as for a linear layer.
        targets: (N,) integers in [0, V).
        bias: (V,), any of those dtypes.
        temperature, softcap, logit_scale: > 0, within float32 as their inverses are.
        return_entropy: also return the entropy of each row's distribution.
        kept_tokens: the ids that each row's target was drawn from, its own among them: the distribution is normalised
            over them, as are entropies and gradients. Logits are then made in strips, as in the backward.
        backend: `"triton"` or `"torch"`; by default what the device has.

    Returns:
        (N,) float32, and with `return_entropy` also the entropies (N,), nats; both are differentiable once by hidden,
        lm_head and bias. float32 GEMMs of the backward follow torch's TF32 setting; the forward does not (Triton), so
        where TF32 is allowed it differs from `linear_policy_loss`, which follows it, by some 0.02 nats.

    Raises:
        ValueError: other values than tensors; shapes, devices, strides or numbers that do not fit; kept ids outside
            [0, V), or, on a CPU, a target outside [0, V) or its kept ids; on a GPU such a row gives nan or -inf, as a
            check would wait for the device.
        TypeError: wrong dtypes.
    """
    check_class(Tensor, hidden=hidden, lm_head=lm_head, targets=targets)
    hidden, lm_head = autocast_operands(hidden, lm_head)
    chosen = resolve_backend(backend, hidden)
    _check(hidden, lm_head, targets, bias, chosen)
    softmax = Softmax.of(temperature, softcap, logit_scale)
    kept: tuple[Tensor | None, Tensor | None] = (None, None)
    if kept_tokens is not None:
        check_class(KeptTokens, kept_tokens=kept_tokens)
        kept = kept_tokens.checked(
            "kept_tokens[{}]".format, len(hidden), vocabulary=len(lm_head),
            targets=targets if targets.device.type == "cpu" else None,
        )[:2]  # fmt: skip
    rows = linear_logprob_op(hidden, lm_head, targets.long(), bias, *kept, *softmax, return_entropy, chosen)
    return (rows[0], rows[1]) if return_entropy else rows[0]


def _check(hidden: Tensor, lm_head: Tensor, targets: Tensor, bias: Tensor | None, backend: str) -> None:
    check_logits_dtype("hidden", hidden, backend)
    if lm_head.dtype != hidden.dtype:
        raise TypeError(f"lm_head must have hidden's dtype {hidden.dtype}, got {lm_head.dtype}")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise TypeError(f"targets must be integers, got {targets.dtype}")
    if bias is not None:
        check_class(Tensor, bias=bias)
        check_logits_dtype("bias", bias, backend)
    for name, tensor in (("hidden", hidden), ("lm_head", lm_head)):
        if tensor.dim() != 2:
            raise ValueError(f"{name} must have 2 dimensions, got shape {tuple(tensor.shape)}")
        if 0 in tensor.shape[name == "hidden" :]:
            raise ValueError(f"{name} must not be empty, got shape {tuple(tensor.shape)}")
        if tensor.stride(1) != 1 and tensor.size(1) > 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}")
    (n, width), vocabulary = hidden.shape, len(lm_head)
    shapes = {"lm_head": (vocabulary, width), "targets": (n,), "bias": (vocabulary,)}
    for (name, shape), other in zip(shapes.items(), (lm_head, targets, bias), strict=True):
        if other is not None and other.shape != shape:
            raise ValueError(f"{name} must be {shape} as hidden is {tuple(hidden.shape)}, got {tuple(other.shape)}")
        if other is not None and other.device != hidden.device:
            raise ValueError(f"{name} must be on hidden's device {hidden.device}, got {other.device}")


def linear_logprob_reference(
    hidden: Tensor, lm_head: Tensor, targets: Tensor, bias: Tensor | None, softmax: Softmax, with_entropy: bool
) -> Tensor:
    """Compute `linear_logprob_op` by blocks of the vocabulary and of rows; nan for a target outside the vocabulary.

    With `z` the logit over the temperature, blocks are merged by `max`, `sum of exp(z - max)` and, for the
    entropy, `sum of (z - max) exp(z - max)`.
    """
    exact = compute_dtype(hidden.dtype)
    hidden, n = hidden.to(exact), len(hidden)
    lowest = torch.finfo(exact).min
    total, tilt = hidden.new_zeros(2, n)
    row_max = hidden.new_full((n,), lowest)
    chosen = hidden.new_full((n,), float("nan"))
    height = max(REFERENCE_ELEMENTS // min(len(lm_head), REFERENCE_COLUMNS), 1)
    for start in range(0, len(lm_head), REFERENCE_COLUMNS):
        columns = slice(start, min(start + REFERENCE_COLUMNS, len(lm_head)))
        head = lm_head[columns].to(exact).t()
        shift = None if bias is None else bias[columns].to(exact)
        for first in range(0, n, height):
            rows = slice(first, first + height)
            some = hidden[rows]
            z = multiply(some, head, some.new_empty(len(some), head.size(1)))
            if shift is not None:
                z += shift
            if softmax.softcap:
                z.div_(softmax.softcap).tanh_().mul_(softmax.softcap)
            if softmax.temperature != 1:
                z.div_(softmax.temperature)
            column = targets[rows, None] - start
            here = (column >= 0) & (column < z.size(1))
            at_target = z.gather(1, torch.where(here, column, 0))
            chosen[rows] = torch.where(here, at_target, chosen[rows, None]).squeeze(1)
            block_max = z.clamp_min_(lowest).amax(1)  # finite, should a block hold nothing but -inf
            block_log_sum = -z.log_softmax(1).amax(1)  # torch vectorises that on every CPU, unlike exp
            new_max = torch.maximum(row_max[rows], block_max)
            gap, block_gap = row_max[rows] - new_max, block_max - new_max
            decay, block_sum = gap.exp(), (block_gap + block_log_sum).exp()
            if with_entropy:
                mean = (z.softmax(1) * z.sub_(block_max[:, None])).sum(1)  # of z - block_max under the block's softmax
                tilt[rows] = decay * (tilt[rows] + gap * total[rows]) + block_sum * (mean + block_gap)
            total[rows] = decay * total[rows] + block_sum
            row_max[rows] = new_max
    log_sum = total.log()
    entropy = log_sum - tilt / total if with_entropy else torch.zeros_like(log_sum)
    return torch.stack([chosen - row_max - log_sum, entropy])


@triton.jit(do_not_specialize=["n_rows", "group"])  # the number of rows never recompiles
def tile_statistics_kernel(
    hidden, lm_head, p_bias, p_tiles, n_rows, vocabulary, width, stride_h, stride_w,
    inner, outer, group,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr, FLATTEN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute sums over tiles of `z = cap(hidden @ lm_head.T + bias)`, where cap(x) is x or `tanh(inner * x)`."""
    # p_tiles (2 or 3, tiles of the vocabulary, n_rows): per row and tile the maximum of z, the sum of 2^y with `y = (z
    # - max) * outer`, and for the entropy the sum of y 2^y. The maximum is taken off before the factor, so a large
    # common shift of the logits loses nothing. `hidden` and `lm_head` are descriptors if TMA, else pointers. Tiles of
    # `group` blocks of rows are taken together, rows first, so that both operands are found in the L2 cache. FLATTEN
    # fetches the next tile during the sums of this one, which must then be free of branches.
    n_m = tl.cdiv(n_rows, BLOCK_M)
    n_v = tl.cdiv(vocabulary, BLOCK_N)
    for i_tile in tl.range(tl.program_id(0), n_m * n_v, tl.num_programs(0), flatten=FLATTEN):
        i_group = i_tile // (group * n_v)
        i_within = i_tile - i_group * (group * n_v)
        members = tl.minimum(n_m - i_group * group, group)
        i_v = i_within // members
        i_m = i_group * group + i_within % members
        o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
        o_n = tl.arange(0, BLOCK_N)
        o_v = i_v * BLOCK_N + o_n
        if not TMA:
            o_k = tl.arange(0, BLOCK_K)
            p_hidden = hidden + tl.minimum(o_m, n_rows - 1).to(tl.int64)[:, None] * stride_h + o_k[None, :]
            p_head = lm_head + tl.minimum(o_v, vocabulary - 1).to(tl.int64)[None, :] * stride_w + o_k[:, None]
        b_z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i_k in range(tl.cdiv(width, BLOCK_K)):
            if TMA:
                b_hidden = hidden.load([i_m * BLOCK_M, i_k * BLOCK_K])
                b_head = lm_head.load([i_v * BLOCK_N, i_k * BLOCK_K]).T
            else:
                m_k = o_k < width - i_k * BLOCK_K
                b_hidden = tl.load(p_hidden + i_k * BLOCK_K, mask=m_k[None, :], other=0.0)
                b_head = tl.load(p_head + i_k * BLOCK_K, mask=m_k[:, None], other=0.0)
            if WIDEN:
                b_hidden = b_hidden.to(tl.float32)
                b_head = b_head.to(tl.float32)
            b_z = tl.dot(b_hidden, b_head, b_z, input_precision="ieee")
        if HAS_BIAS:
            b_z += tl.load(p_bias + o_v, mask=o_v < vocabulary, other=0.0).to(tl.float32)[None, :]
        if HAS_SOFTCAP:
            b_z = tanh(b_z * inner)
        # Columns beyond the vocabulary must not count: a logit of 0 there would outweigh negative real ones.
        if FLATTEN or (i_v + 1) * BLOCK_N > vocabulary:
            b_z += tl.where(o_v < vocabulary, 0.0, float("-inf"))[None, :]
        b_max = tl.max(b_z, 1)
        b_shift = tl.where(b_max == float("-inf"), 0.0, b_max)
        b_y = (b_z - b_shift[:, None]) * outer
        b_p = tl.exp2(b_y)
        m_m = o_m < n_rows
        p_tile = p_tiles + i_v.to(tl.int64) * n_rows + o_m
        one = n_v.to(tl.int64) * n_rows
        tl.store(p_tile, b_max, mask=m_m)
        tl.store(p_tile + one, tl.sum(b_p, 1), mask=m_m)
        if WITH_ENTROPY:
            b_tilt = tl.sum(tl.where(b_p > 0, b_p * b_y, b_p), 1)  # a logit of -inf adds nothing, nan remains
            tl.store(p_tile + 2 * one, b_tilt, mask=m_m)


@triton.jit(do_not_specialize=["n_rows", "n_out", "n_tiles"])  # a single tile would make n_tiles a Python int
def merge_tiles_kernel(
    p_hidden, p_head, p_bias, p_tiles, p_targets, p_out, n_rows, n_out, n_tiles, vocabulary, width, stride_h, stride_w,
    inner, outer,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Merge the sums of a row's tiles, in an order that depends on V only, into its log-prob and entropy."""
    # The target's logit is a separate product, so that no tile has to look for it. It rounds otherwise than the
    # tiles' logit, by as much as any logit does; a log-prob stays at most 0. p_out points to this launch's rows of
    # log-probs; entropies are n_out behind them.
    LN2: tl.constexpr = 0.6931471805599453
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_r = o_r < n_rows
    one = n_tiles.to(tl.int64) * n_rows
    b_max = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    for i in range(0, n_tiles, BLOCK_T):
        o_t = i + tl.arange(0, BLOCK_T)
        m = (o_t < n_tiles)[:, None] & m_r[None, :]
        p_tile = p_tiles + o_t.to(tl.int64)[:, None] * n_rows + o_r[None, :]
        b_max = tl.maximum(b_max, tl.max(tl.load(p_tile, mask=m, other=float("-inf")), 0))
    b_shift = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_total = tl.zeros((BLOCK_R,), tl.float32)
    b_tilt = tl.zeros((BLOCK_R,), tl.float32)
    for i in range(0, n_tiles, BLOCK_T):
        o_t = i + tl.arange(0, BLOCK_T)
        m = (o_t < n_tiles)[:, None] & m_r[None, :]
        p_tile = p_tiles + o_t.to(tl.int64)[:, None] * n_rows + o_r[None, :]
        b_gap = tl.load(p_tile, mask=m, other=float("-inf"))
        b_gap = (b_gap - b_shift[None, :]) * outer
        b_decay = tl.exp2(b_gap)
        b_sum = tl.load(p_tile + one, mask=m, other=0.0)
        b_total += tl.sum(b_decay * b_sum, 0)
        if WITH_ENTROPY:
            b_tilted = tl.load(p_tile + 2 * one, mask=m, other=0.0) + b_sum * b_gap
            b_tilt += tl.sum(tl.where(b_decay > 0, b_decay * b_tilted, 0.0), 0)
    b_log = tl.log2(b_total)
    b_target = tl.load(p_targets + o_r, mask=m_r, other=-1)
    m_valid = (b_target >= 0) & (b_target < vocabulary)
    p_hidden += tl.minimum(o_r, n_rows - 1).to(tl.int64)[:, None] * stride_h
    p_head += tl.where(m_valid, b_target, 0)[:, None] * stride_w
    b_products = tl.zeros((BLOCK_R, BLOCK_H), tl.float32)
    for i in range(0, width, BLOCK_H):
        o_h = i + tl.arange(0, BLOCK_H)[None, :]
        b_state = tl.load(p_hidden + o_h, mask=o_h < width, other=0.0).to(tl.float32)
        b_products += b_state * tl.load(p_head + o_h, mask=o_h < width, other=0.0).to(tl.float32)
    b_chosen = tl.sum(b_products, 1)
    if HAS_BIAS:
        b_chosen += tl.load(p_bias + b_target, mask=m_valid, other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        b_chosen = tanh(b_chosen * inner)
    b_chosen = tl.where(m_valid, b_chosen, float("nan"))
    b_entropy = tl.zeros((BLOCK_R,), tl.float32)
    if WITH_ENTROPY:
        b_entropy = (b_log - b_tilt / b_total) * LN2
    p_row = p_out + o_r
    tl.store(p_row, minimum(((b_chosen - b_max) * outer - b_log) * LN2, 0.0), mask=m_r)
    tl.store(p_row + n_out, b_entropy, mask=m_r)


def launch_options(architecture: str, dtype: torch.dtype, *, aligned: bool) -> dict[str, Any]:
    """Return the constexprs of `tile_statistics_kernel` and its compiler's options, by `TUNED`."""
    options = tuned("tile_statistics_kernel", architecture, dtype, aligned=aligned)
    return options | {"WIDEN": architecture == "cpu"}  # the interpreter has no bf16 dot


MERGE_OPTIONS = tuned("merge_tiles_kernel")


def _row_stride(tensor: Tensor) -> int:
    return tensor.stride(0) if len(tensor) > 1 else tensor.size(1)  # strides say nothing of a single row


def _is_aligned(tensor: Tensor) -> bool:
    stride = _row_stride(tensor)
    return tensor.data_ptr() % 16 == 0 and stride * tensor.element_size() % 16 == 0 and stride >= tensor.size(1)


def linear_logprob_triton(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    softmax: Softmax,
    with_entropy: bool,
    options: dict[str, Any] | None = None,
) -> Tensor:
    """Compute `linear_logprob_reference` by Triton, with `options` or else `launch_options`."""
    (n, width), vocabulary = hidden.shape, len(lm_head)
    if options is None:
        aligned = _is_aligned(hidden) and _is_aligned(lm_head)
        options = launch_options(architecture(hidden.device), hidden.dtype, aligned=aligned)
    block_m, block_n, block_k = options["BLOCK_M"], options["BLOCK_N"], options["BLOCK_K"]
    cap = softmax.softcap or 1.0
    features = {"HAS_BIAS": bias is not None, "HAS_SOFTCAP": softmax.softcap != 0, "WITH_ENTROPY": with_entropy}
    # Rows whose hidden states together take up to 16 MiB, which the L2 cache holds next to some columns.
    group = max(2**24 // (block_m * width * hidden.element_size()), 4)
    n_tiles = triton.cdiv(vocabulary, block_n)
    out = torch.empty(2, n, dtype=torch.float32, device=hidden.device)
    for start in range(0, n, STATISTICS_ROWS):
        part = slice(start, min(start + STATISTICS_ROWS, n))
        rows = hidden[part]
        sizes = (
            vocabulary, width, _row_stride(rows), _row_stride(lm_head), 1 / cap, cap * LOG2E / softmax.temperature
        )  # fmt: skip
        tiles = out.new_empty(3 if with_entropy else 2, n_tiles, len(rows))
        operands: list[Any] = [rows, lm_head]
        if options["TMA"]:
            operands = [
                TensorDescriptor(operand, list(operand.shape), [_row_stride(operand), 1], [block, block_k])
                for operand, block in ((rows, block_m), (lm_head, block_n))
            ]
        programs = triton.cdiv(len(rows), block_m) * n_tiles
        if options["FLATTEN"]:
            # One a multiprocessor; a few in the interpreter.
            on_gpu = hidden.device.type == "cuda"
            most = torch.cuda.get_device_properties(hidden.device).multi_processor_count if on_gpu else 3
            programs = min(programs, most)
        with torch.cuda.device_of(hidden):
            tile_statistics_kernel[(programs,)](
                *operands, bias, tiles, len(rows), *sizes, group, **features, **options
            )  # fmt: skip
            merge_tiles_kernel[(triton.cdiv(len(rows), MERGE_OPTIONS["BLOCK_R"]),)](
                rows, lm_head, bias, tiles, targets[part], out[:, part], len(rows), n, n_tiles, *sizes,
                **features, **MERGE_OPTIONS,
            )  # fmt: skip
    return out


# As operators, so that torch.compile sees one node each


@torch.library.custom_op("cfa_kernels::linear_logprob", mutates_args=())
def linear_logprob_op(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    kept_offsets: Tensor | None,
    kept_ids: Tensor | None,
    temperature: float,
    softcap: float,
    with_entropy: bool,
    backend: str,
) -> Tensor:
    """Return (2, N): log-probs and entropies (0 without `with_entropy`), by a `Softmax` of those numbers.

    kept_offsets and kept_ids, on the host, are the rows' `KeptTokens`.
    """
    if targets.device.type == "cpu":
        outside = ((targets < 0) | (targets >= len(lm_head))).nonzero()
        if len(outside):
            row = int(outside[0])
            raise ValueError(f"targets[{row}] must be in [0, {len(lm_head)}), got {int(targets[row])}")
    run = linear_logprob_triton if backend == "triton" else linear_logprob_reference
    softmax = Softmax(temperature, softcap)
    bias, targets = None if bias is None else bias.contiguous(), targets.contiguous()
    with torch.autocast(hidden.device.type, enabled=False):
        if kept_offsets is None or kept_ids is None:
            return run(hidden, lm_head, targets, bias, softmax, with_entropy)
        out = hidden.new_zeros(2, len(hidden), dtype=compute_dtype(hidden.dtype))
        counted = torch.ones_like(targets, dtype=torch.bool)
        support = Support.of(lm_head, bias, targets, KeptTokens(kept_offsets, kept_ids))
        for part, _, rows, _ in _strips(hidden, support, softmax, backend):
            out[0, part], out[1, part], *_ = row_logprobs(rows, counted[part], with_entropy=with_entropy)
        return out


def _strips(
    hidden: Tensor, support: Support, softmax: Softmax, backend: str
) -> Iterator[tuple[slice, Tensor, LogitRows, Tensor]]:
    """Yield which n rows, their states, logits (1, n, U) with targets, and memory for the gradient (n, U)."""
    size = STRIP_BYTES.get(hidden.device.type, STRIP_BYTES["cpu"])
    vocabulary, restricted = len(support.head), support.kept is not None
    height = (
        max(size // (16 * vocabulary * compute_dtype(hidden.dtype).itemsize), 1) * 16
    )  # every strip's slices are aligned alike
    logits, gradient = empty_strip(min(height, max(len(hidden), 1)), vocabulary, hidden.dtype, hidden.device)
    for start in range(0, len(hidden), height):
        part = slice(start, min(start + height, len(hidden)))
        states = hidden[part]
        strip = logits[: len(states)]
        write_logits(states, support.head, strip)
        support.restrict(strip, part)
        rows = LogitRows(strip.unsqueeze(0), support.bias, support.targets[part], softmax, backend, restricted)
        yield part, states, rows, gradient[: len(states)]


_Arguments = arguments_of(linear_logprob_op)
_SAVED = ("hidden", "lm_head", "targets", "bias", "kept_offsets", "kept_ids")


@linear_logprob_op.register_fake
def _(*inputs: Any) -> Tensor:
    hidden, *_ = inputs
    return hidden.new_empty((2, len(hidden)), dtype=compute_dtype(hidden.dtype))


@torch.library.custom_op("cfa_kernels::linear_logprob_backward", mutates_args=())
def linear_logprob_backward_op(
    by_rows: Tensor,
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    kept_offsets: Tensor | None,
    kept_ids: Tensor | None,
    temperature: float,
    softcap: float,
    with_entropy: bool,
    needs_gradient: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients by hidden, lm_head and bias, empty if not needed, from those by rows (2, N)."""
    # Strips of logits are multiplied by another routine than the forward's, so their probabilities are normalised by
    # their own sums: against the forward's, the logits' rounding would be the probabilities' relative error.
    targets, bias = targets.contiguous(), None if bias is None else bias.contiguous()
    dtypes, unit = (hidden.dtype, lm_head.dtype, (bias if bias is not None else lm_head).dtype), None
    if backend == "torch" and hidden.device.type == "cpu":
        # No product of halves with float32 sums there: convert the head once, not for every strip.
        hidden, lm_head = hidden.to(by_rows.dtype), lm_head.to(by_rows.dtype)
    if hidden.dtype == torch.float16 and len(hidden):
        # Gradients of a mean over many rows are below what float16 resolves: take a power of two out of them.
        unit = torch.ldexp(by_rows.new_ones(()), torch.frexp(by_rows.abs().amax())[1])
        by_rows = by_rows / unit
    kept = None if kept_offsets is None or kept_ids is None else KeptTokens(kept_offsets, kept_ids)
    support = Support.of(lm_head, bias, targets, kept)
    gradients = HeadGradients(hidden, support.head, needs_gradient)
    for part, states, rows, by_logits in _strips(hidden, support, Softmax(temperature, softcap), backend):
        by_logprob, by_entropy = by_rows[:, part].contiguous()
        row_gradients(rows, by_logits.unsqueeze(0), by_logprob, by_entropy if with_entropy else None)
        gradients.add(part, states, by_logits)
    by_hidden, *by_others = gradients.finish()
    sums = by_hidden, *(support.widened(total, len(lm_head)) for total in by_others)
    by_hidden, by_head, by_bias = (
        (total if unit is None else total.mul_(unit)).to(dtype) for total, dtype in zip(sums, dtypes, strict=True)
    )
    return by_hidden, by_head, by_bias


@linear_logprob_backward_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, hidden, lm_head, _, bias, *_, needs_gradient, _ = inputs
    return (
        hidden.new_empty(hidden.shape if needs_gradient[0] else (0,)),
        lm_head.new_empty(lm_head.shape if needs_gradient[1] else (0,)),
        (lm_head if bias is None else bias).new_empty(lm_head.shape[:1] if needs_gradient[2] else (0,)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    arguments = _Arguments(*inputs)
    ctx.save_for_backward(*(getattr(arguments, name) for name in _SAVED))
    ctx.options = {name: getattr(arguments, name) for name in ("temperature", "softcap", "with_entropy", "backend")}


def _backward(ctx: Any, by_rows: Tensor) -> tuple[Tensor | None, ...]:
    names, needed = ("hidden", "lm_head", "bias"), _Arguments(*ctx.needs_input_grad)
    needs_gradient = [getattr(needed, name) for name in names]
    saved = dict(zip(_SAVED, ctx.saved_tensors, strict=True))
    gradients = linear_logprob_backward_op(by_rows=by_rows, **saved, **ctx.options, needs_gradient=needs_gradient)
    return tuple(_Arguments(**{name: g for name, g, one in zip(names, gradients, needs_gradient, strict=True) if one}))


linear_logprob_op.register_autograd(_backward, setup_context=_setup_context)
