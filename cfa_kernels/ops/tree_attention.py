"""Attention over a packed tree of token sequences.

Rows of one packed sequence form *segments*. A segment's rows attend to the segment's context, a list of earlier
rows in the order of their positions, and causally to the segment itself. No padding, no dense mask, no cache:
that is what lets masked branches, completions and prompts share everything up to where they differ.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from .dispatch import architecture, resolve_backend
from .elementwise import LOG2E, tanh
from .segment_table import SegmentTable

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: SegmentTable,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention of packed rows along the tree that `table` describes.

    Args:
        q: (N, H, D) queries; fp32, bf16 or fp16 (the PyTorch reference also takes float64).
        k: (N, Hkv, D) keys, Hkv dividing H (grouped-query attention).
        v: (N, Hkv, D) values.
        table: the segments of the N rows.
        scale: factor on `q . k`; default `D ** -0.5`.
        sliding_window: a row sees only keys fewer than this many positions back (its own counts as one).
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        backend: `"triton"`, `"torch"` or None (by device, see `ops/dispatch.py`).

    Returns:
        (N, H, D) in q's dtype. A row's result is bitwise the same whatever else is in the pack (Triton).

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit; the message names the argument.
        NotImplementedError: Triton backend with gradients enabled on an input that requires them.

    Differentiable on the PyTorch backend.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    _check(q, k, v, table, scale, sliding_window, softcap)
    if resolve_backend(backend, q) == "torch":
        return tree_attention_reference(q, k, v, table, scale, sliding_window, softcap)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise NotImplementedError(
            "tree_attention has no Triton backward: call it under torch.no_grad() or with backend='torch'"
        )
    return _tree_attention_triton(q, k, v, table, scale, sliding_window, softcap)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: SegmentTable,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> None:
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"tree_attention takes q (N, H, D) and k, v (N, Hkv, D), got {shapes}")
    if q.shape[0] != k.shape[0] or q.shape[0] != table.num_rows:
        raise ValueError(f"table has {table.num_rows} rows, q {q.shape[0]} and k {k.shape[0]}; they must agree")
    if q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(f"heads of q {tuple(q.shape[1:])} do not fit those of k {tuple(k.shape[1:])}")
    if not (q.dtype == k.dtype == v.dtype):
        raise ValueError(f"q, k, v must share one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not (q.device == k.device == v.device):
        raise ValueError(f"q, k, v must be on one device, got {q.device}, {k.device}, {v.device}")
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, got {softcap}")


# The query rows of a long segment are taken in blocks, so that masks and scores stay small.
_REFERENCE_BLOCK = 512


def tree_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: SegmentTable,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The definition of `tree_attention` in plain PyTorch, segment by segment; also the CPU path.

    Softmax runs in fp32, or in float64 for float64 inputs.
    """
    context_rows = torch.from_numpy(table.context_rows).to(q.device)
    segments = zip(table.row_start, table.length, table.context_start, table.context_length, strict=True)
    outputs = []
    for row, length, start, context in (tuple(map(int, segment)) for segment in segments):
        keys, values = k[row : row + length], v[row : row + length]
        if context:
            before = context_rows[start : start + context]
            keys = torch.cat([k.index_select(0, before), keys])
            values = torch.cat([v.index_select(0, before), values])
        for first in range(0, length, _REFERENCE_BLOCK):
            last = min(first + _REFERENCE_BLOCK, length)
            low = 0 if sliding_window is None else max(0, context + first - sliding_window + 1)
            seen = slice(low, context + last)  # no row of this block sees other keys
            visible = torch.ones(last - first, context + last - low, dtype=torch.bool, device=q.device)
            visible = visible.tril_(context + first - low)
            if sliding_window is not None:
                visible = visible.triu_(context + first - low - sliding_window + 1)
            rows = q[row + first : row + last]
            outputs.append(_attend_reference(rows, keys[seen], values[seen], visible, scale, softcap))
    return torch.cat(outputs)


def _attend_reference(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Masked attention of q (L, H, D) to k, v (K, Hkv, D) with `visible` (L, K); PyTorch's own without softcap."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # (1, heads, rows, D)
    if softcap is None:
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = softcap * torch.tanh(q @ k.transpose(2, 3) * (scale / softcap))
    scores = scores.masked_fill(~visible, float("-inf"))
    probs = torch.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return (probs.to(q.dtype) @ v)[0].transpose(0, 1)


@triton.jit
def _attend(
    b_acc, b_max, b_sum, b_q, o_query, o_d, m_d,
    p_k, p_v, p_context, stride_kt, stride_vt,
    row_start, context_length, low, high, scale, softcap, window,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    PAD_D: tl.constexpr, PRECISION: tl.constexpr, LOG2E: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys at positions [low, high), in blocks aligned to multiples of BLOCK_N.

    Blocks are cut by position alone, never by where the rows lie, so a row's sums are formed in the same order
    in every pack.
    """
    # Row numbers come one block ahead: loads of keys and values then depend on registers alone and can be pipelined.
    o_next = low + tl.arange(0, BLOCK_N)
    b_next = tl.load(p_context + o_next, mask=o_next < context_length, other=0)
    for start in range(low, high, BLOCK_N):
        o_key = start + tl.arange(0, BLOCK_N)
        o_next = o_key + BLOCK_N
        b_row = tl.where(o_key < context_length, b_next.to(tl.int64), row_start + (o_key - context_length))
        b_next = tl.load(p_context + o_next, mask=o_next < context_length, other=0)
        if MASKED:
            m_key = o_key < high
            m_load = m_key[:, None] & m_d[None, :]
            b_k = tl.load(p_k + b_row[:, None] * stride_kt + o_d[None, :], mask=m_load, other=0.0)
        elif PAD_D:
            b_k = tl.load(p_k + b_row[:, None] * stride_kt + o_d[None, :], mask=m_d[None, :], other=0.0)
        else:
            b_k = tl.load(p_k + b_row[:, None] * stride_kt + o_d[None, :])
        if WIDEN:
            b_k = b_k.to(tl.float32)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        factor = scale * LOG2E
        if HAS_SOFTCAP:
            b_s = tanh(b_s * (scale / softcap))
            factor = softcap * LOG2E
        if MASKED:
            visible = (o_key[None, :] <= o_query[:, None]) & m_key[None, :]
            if HAS_WINDOW:
                visible = visible & (o_query[:, None] - o_key[None, :] < window)
            b_s = tl.where(visible, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1) * factor)
        # A row that has seen no key yet keeps -inf; subtracting it from itself would give nan.
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new) if MASKED else b_new
        b_p = tl.exp2(b_s * factor - b_safe[:, None])
        b_decay = tl.exp2(b_max - b_safe)
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_acc = b_acc * b_decay[:, None]
        if MASKED:
            b_v = tl.load(p_v + b_row[:, None] * stride_vt + o_d[None, :], mask=m_load, other=0.0)
        elif PAD_D:
            b_v = tl.load(p_v + b_row[:, None] * stride_vt + o_d[None, :], mask=m_d[None, :], other=0.0)
        else:
            b_v = tl.load(p_v + b_row[:, None] * stride_vt + o_d[None, :])
        b_p = b_p.to(b_v.dtype)
        if WIDEN:
            b_p = b_p.to(tl.float32)
            b_v = b_v.to(tl.float32)
        b_acc = tl.dot(b_p, b_v, b_acc, input_precision=PRECISION)
        b_max = b_new
    return b_acc, b_max, b_sum


@triton.jit
def tree_attention_kernel(
    p_q, p_k, p_v, p_out, p_work, p_segments, p_context,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh,
    scale, softcap, window,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, LOG2E: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """One tile: BLOCK_M // GROUP_PAD tokens of one segment times the query heads of one key head.

    The definition is `tree_attention_reference`. Grid: (work items, key heads).
    """
    i_work = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    i_segment = tl.load(p_work + i_work * 2).to(tl.int64)
    first = tl.load(p_work + i_work * 2 + 1)
    row_start = tl.load(p_segments + i_segment * 4).to(tl.int64)
    length = tl.load(p_segments + i_segment * 4 + 1)
    p_context += tl.load(p_segments + i_segment * 4 + 2).to(tl.int64)
    context_length = tl.load(p_segments + i_segment * 4 + 3)

    TOKENS: tl.constexpr = BLOCK_M // GROUP_PAD
    PAD_D: tl.constexpr = HEAD_DIM != BLOCK_D
    o_m = tl.arange(0, BLOCK_M)
    o_token = first + o_m // GROUP_PAD
    o_group = o_m % GROUP_PAD
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    m_q = ((o_token < length) & (o_group < GROUP))[:, None] & m_d[None, :]
    o_head = i_head * GROUP + o_group
    o_row = row_start + o_token
    b_q = tl.load(p_q + o_row[:, None] * stride_qt + o_head[:, None] * stride_qh + o_d[None, :], mask=m_q, other=0.0)
    if WIDEN:
        b_q = b_q.to(tl.float32)
    o_query = context_length + o_token
    p_k += i_head * stride_kh
    p_v += i_head * stride_vh

    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # Positions up to `full` are seen by every row of the tile, so they need no mask; unless there is a window.
    oldest = context_length + first
    high = context_length + tl.minimum(first + TOKENS, length)
    if HAS_WINDOW:
        full = tl.maximum(oldest - window + 1, 0) // BLOCK_N * BLOCK_N
    else:
        full = (oldest + 1) // BLOCK_N * BLOCK_N
        b_acc, b_max, b_sum = _attend(
            b_acc, b_max, b_sum, b_q, o_query, o_d, m_d, p_k, p_v, p_context, stride_kt, stride_vt,
            row_start, context_length, 0, full, scale, softcap, window,
            BLOCK_N, False, HAS_WINDOW, HAS_SOFTCAP, PAD_D, PRECISION, LOG2E, WIDEN,
        )  # fmt: skip
    b_acc, b_max, b_sum = _attend(
        b_acc, b_max, b_sum, b_q, o_query, o_d, m_d, p_k, p_v, p_context, stride_kt, stride_vt,
        row_start, context_length, full, high, scale, softcap, window,
        BLOCK_N, True, HAS_WINDOW, HAS_SOFTCAP, PAD_D, PRECISION, LOG2E, WIDEN,
    )  # fmt: skip

    # Rows of padding may have seen no key at all; they are not stored.
    b_out = b_acc / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    p_out += o_row[:, None] * stride_ot + o_head[:, None] * stride_oh + o_d[None, :]
    tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=m_q)


def launch_options(
    architecture: str,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    *,
    sliding_window: bool = False,
    softcap: bool = False,
) -> dict[str, Any]:
    """The shipped compile-time configuration of the kernel: constexprs, `num_warps`, `num_stages`.

    Chosen by what is given here alone, so results and compilations never depend on lengths. The tiles are the
    largest that compile without spills (`tests/test_aot_tree_attention.py`).
    """
    wide = head_dim > 128
    if dtype == torch.float32:  # full precision has no tensor cores
        block_m, block_n, num_warps, num_stages = 16, 16, 4 if wide else 8, 1
    elif architecture == "hip":
        block_m, block_n, num_warps, num_stages = 64, 32, 4, 1
    elif architecture.startswith("sm_8") and head_dim > 64:
        block_m, block_n, num_warps, num_stages = (64, 32, 8, 2) if wide else (128, 32, 8, 3)
    else:
        block_m, block_n, num_warps, num_stages = (64, 64, 8, 2) if wide else (128, 64, 8, 3)
    group_pad = triton.next_power_of_2(group)
    return {
        "GROUP": group,
        "GROUP_PAD": group_pad,
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_M": max(block_m, group_pad),
        "BLOCK_N": block_n,
        "HAS_WINDOW": sliding_window,
        "HAS_SOFTCAP": softcap,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "LOG2E": LOG2E,
        "WIDEN": architecture == "cpu",  # the interpreter has no bf16 dot
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


def _tree_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: SegmentTable,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    head_dim = q.shape[-1]
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"q: head dimension {head_dim} is not one of {HEAD_DIMS} (backend='triton')")
    if q.dtype not in DTYPES:
        raise ValueError(f"q: dtype {q.dtype} is not one of {DTYPES} (backend='triton')")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}: the head dimension must be contiguous, got strides {tensor.stride()}")
    if sliding_window is not None and sliding_window >= table.longest:
        sliding_window = None  # hides nothing here, and the kernel without it masks fewer blocks
    options = launch_options(
        architecture(q.device), q.dtype, head_dim, q.shape[1] // k.shape[1],
        sliding_window=sliding_window is not None, softcap=softcap is not None,
    )  # fmt: skip
    work, segments, context_rows = table.on_device(q.device, options["BLOCK_M"] // options["GROUP_PAD"])
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    tree_attention_kernel[(work.shape[0], k.shape[1])](
        q, k, v, out, work, segments, context_rows,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2],
        scale, softcap or 0.0, sliding_window or 0, **options,
    )  # fmt: skip
    return out
