"""Compute gradients of tree attention on a GPU, by one kernel for queries and one for keys and values.

With `P` the probabilities by the forward's log-sum-exp, `delta = rowsum(dO * O)` and `dS = P * (dO V^T - delta)`, the
gradients are `dS K`, `dS^T Q` and `P^T dO`. Nothing is added atomically, so a pack gives the same bits every time.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.dispatch import TRITON_BEFORE_3_7, architecture
from ..ops.triton_math import LOG2E, tanh
from ..ops.tuning import tuned
from .attention_options import AttentionRule, RuleKinds
from .segment_table import SegmentTable

QUERY_ROWS_PER_PROGRAM = 2048
"""Rows times heads of a key head that one program adds up for a tile of keys; more programs share longer lists."""

PARTIAL_SUM_BYTES = 2**30
"""Most memory of their sums; a pack that needs more has more rows a program. Bits do not depend on the device."""


def stride_unit(strides: Sequence[int]) -> int:
    """Return how many elements make one of a kernel's strides."""
    # Triton knows of a stride whether 16 divides it. Heads 72 or 120 wide have strides that 8 divides, enough for
    # loads of 16 bytes: a kernel that multiplies by 8 itself shows the compiler so.
    return 8 if any(x % 16 for x in strides) and not any(x % 8 for x in strides) else 1


@triton.jit
def load_columns(p_rows, o_d, DIM: tl.constexpr, STOP: tl.constexpr, WIDEN: tl.constexpr):
    """Load columns `o_d`, up to STOP, of heads DIM wide; zeros beyond the head."""
    if STOP > DIM:
        b_x = tl.load(p_rows + o_d[None, :], mask=(o_d < DIM)[None, :], other=0.0)
    else:
        b_x = tl.load(p_rows + o_d[None, :])
    return b_x.to(tl.float32) if WIDEN else b_x


@triton.jit
def tile_rows(o_m, first, stop, i_head, GROUP: tl.constexpr):
    """Return whether rows `o_m` of a tile have a token, the token, at most `stop - 1`, and the query head."""
    o_m = o_m.to(tl.uint32)  # whose division by a group that is not a power of two takes the fewest registers
    o_token = first + (o_m // GROUP).to(tl.int32)
    return o_token < stop, tl.minimum(o_token, stop - 1), i_head * GROUP + (o_m % GROUP).to(tl.int32)


@triton.jit
def _load_rows(p_rows, COLUMN: tl.constexpr):
    """Load a vector; with COLUMN as a column, whose loads are spread over lanes like a matrix's."""
    return tl.sum(tl.load(p_rows[:, None]), 1) if COLUMN else tl.load(p_rows)


@triton.jit
def round_for_product(b_x, p_like, WIDEN: tl.constexpr):
    """Round `b_x` for a matrix product with elements like those of `p_like`."""
    b_x = b_x.to(p_like.dtype.element_ty)
    return b_x.to(tl.float32) if WIDEN else b_x


@triton.jit
def _probabilities(b_s, b_lse, visible, scale, softcap, HAS_SOFTCAP: tl.constexpr, LOG2E: tl.constexpr):
    """Return the forward's probabilities, and the derivative of logits by `scale * b_s`; `b_s` are products q . k."""
    if HAS_SOFTCAP:
        b_s = tanh(b_s * (scale / softcap))
        b_slope = 1.0 - b_s * b_s
        factor = softcap * LOG2E
    else:
        b_slope = 1.0
        factor = scale * LOG2E
    return tl.where(visible, tl.exp2(b_s * factor - b_lse), 0.0), b_slope


@triton.jit
def query_gradient_kernel(
    p_q, p_k, p_v, p_out, p_by_out, p_lse, p_delta, p_by_q, p_work, p_context,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_gt, stride_gh, n_heads,
    scale, softcap, span,
    STRIDE_UNIT: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, LOG2E: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of q and delta for one tile of the forward."""
    # Grid, work list and the order of keys are those of `tree_attention_kernel`, so that a row's gradient does not
    # depend on the rest of the pack either. `p_out`, `p_lse`, `p_delta` and `p_by_q` are contiguous. Strides count
    # STRIDE_UNIT elements.
    i_head = tl.program_id(1).to(tl.int64)
    p_work += tl.program_id(0).to(tl.int64) * 5
    row_start = tl.load(p_work)
    length = tl.load(p_work + 1)
    p_context += tl.load(p_work + 2).to(tl.int64)
    context_length = tl.load(p_work + 3)
    first = tl.load(p_work + 4)
    first_again = tl.load(p_work + 4, volatile=True)

    # Tile rows beyond the last token repeat it, so that every row sees a key; they are not stored.
    stop = tl.minimum(first + BLOCK_M // GROUP, length)
    m_token, o_token, o_head = tile_rows(tl.arange(0, BLOCK_M), first, stop, i_head, GROUP)
    o_row = (row_start + o_token).to(tl.int64)
    o_entry = o_row * n_heads + o_head
    o_query = context_length + o_token
    oldest = context_length + first
    high = context_length + stop
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(oldest - span + 1, 0) // BLOCK_N * BLOCK_N
    if HAS_CHUNK:
        o_first = o_query // span * span
        low = oldest // span * span // BLOCK_N * BLOCK_N

    o_dk = tl.arange(0, KEY_BLOCK)
    o_dv = tl.arange(0, VALUE_BLOCK)
    p_k += i_head * stride_kh * STRIDE_UNIT
    p_v += i_head * stride_vh * STRIDE_UNIT
    p_rows = p_q + (o_row[:, None] * stride_qt + o_head[:, None] * stride_qh) * STRIDE_UNIT
    b_q = load_columns(p_rows, o_dk, KEY_DIM, KEY_BLOCK, WIDEN)
    p_rows = p_by_out + (o_row[:, None] * stride_gt + o_head[:, None] * stride_gh) * STRIDE_UNIT
    b_by_out = load_columns(p_rows, o_dv, VALUE_DIM, VALUE_BLOCK, WIDEN)
    b_out = load_columns(p_out + o_entry[:, None] * VALUE_DIM, o_dv, VALUE_DIM, VALUE_BLOCK, WIDEN)
    b_delta = tl.sum(b_by_out.to(tl.float32) * b_out.to(tl.float32), 1)
    tl.store(p_delta + o_entry, b_delta, mask=m_token)
    b_lse = tl.load(p_lse + o_entry)
    b_acc = tl.zeros([BLOCK_M, KEY_BLOCK], tl.float32)

    # Row numbers come one block ahead: loads of keys and values then depend only on registers and can be pipelined.
    shift = row_start - context_length
    o_next = low + tl.arange(0, BLOCK_N)
    b_next = tl.load(p_context + o_next, mask=o_next < context_length, other=0)
    for start in range(low, high, BLOCK_N):
        o_key = start + tl.arange(0, BLOCK_N)
        o_next = o_key + BLOCK_N
        b_row = tl.where(o_key < context_length, b_next, shift + tl.minimum(o_key, high - 1)).to(tl.int64)
        b_next = tl.load(p_context + o_next, mask=o_next < context_length, other=0)
        b_k = load_columns(p_k + b_row[:, None] * stride_kt * STRIDE_UNIT, o_dk, KEY_DIM, KEY_BLOCK, WIDEN)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_v = load_columns(p_v + b_row[:, None] * stride_vt * STRIDE_UNIT, o_dv, VALUE_DIM, VALUE_BLOCK, WIDEN)
        b_by_p = tl.dot(b_by_out, tl.trans(b_v), input_precision=PRECISION)
        b_age = o_query[:, None] - o_key[None, :]  # for both bounds: one more number a row would not fit the registers
        visible = b_age >= 0
        if HAS_WINDOW:
            visible = visible & (b_age < span)
        if HAS_CHUNK:
            visible = visible & (o_key[None, :] >= o_first[:, None])
        b_p, b_slope = _probabilities(b_s, b_lse[:, None], visible, scale, softcap, HAS_SOFTCAP, LOG2E)
        b_by_s = b_p * b_slope * (b_by_p - b_delta[:, None])
        b_acc = tl.dot(round_for_product(b_by_s, p_k, WIDEN), b_k, b_acc, input_precision=PRECISION)

    # Worked out once more, as the forward does, for two programs on a multiprocessor.
    o_m = tl.arange(0, BLOCK_M) + (first_again - first)
    m_token, o_token, o_head = tile_rows(o_m, first, stop, i_head, GROUP)
    o_entry = (row_start + o_token).to(tl.int64) * n_heads + o_head
    p_by_q += o_entry[:, None] * KEY_DIM
    b_by_q = (b_acc * scale).to(p_by_q.dtype.element_ty)
    tl.store(p_by_q + o_dk[None, :], b_by_q, mask=m_token[:, None] & (o_dk < KEY_DIM)[None, :])


@triton.jit
def _readers(
    p_readers, n_readers, o_query, own, base, first, row_start, position, end,
    HAS_REACH: tl.constexpr,
):  # fmt: skip
    """Return packed row, number of visible keys of the tile, and position of its queries `o_query`."""
    # Queries from `end` on see none and have the tile's first row: a gradient there that is not finite is in this
    # tile's sums anyway, and must not come, times 0, into those of others.
    m_listed = (o_query >= own) & (o_query < end)
    p_listed = p_readers + (base + o_query)
    b_row = row_start + o_query
    b_row = tl.where(o_query < own, b_row, tl.load(p_listed, mask=m_listed, other=row_start))
    b_limit = tl.load(p_listed + n_readers, mask=m_listed, other=0) - first
    b_limit = tl.where(o_query < own, o_query + 1, b_limit)
    b_limit = tl.where(o_query < end, b_limit, 0)
    b_position = position + o_query
    if HAS_REACH:
        b_position = tl.where(o_query < own, b_position, tl.load(p_listed + 2 * n_readers, mask=m_listed, other=0))
    return b_row, b_limit, b_position


@triton.jit(do_not_specialize=["n_readers"])
def key_gradient_kernel(
    p_q, p_k, p_v, p_by_out, p_lse, p_delta, p_by_k, p_by_v, p_parts, p_work, p_readers, n_readers,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_gt, stride_gh, n_heads,
    scale, softcap, span,
    STRIDE_UNIT: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    OF_KEYS: tl.constexpr, OF_VALUES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, LOG2E: tl.constexpr, WIDEN: tl.constexpr, COLUMN_LOADS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of k, v or both for one tile of BLOCK_N rows of a segment and one key head."""
    # Grid: (entries of `SegmentTable.key_work`, key heads). All query heads of the key head and all rows that see the
    # tile, heads first, add to the same float32 sums, BLOCK_M at a time; those are rounded once, or go to `p_parts`,
    # (partial sums, key heads, BLOCK_N, KEY_BLOCK + VALUE_BLOCK), for `sum_parts_kernel`.
    i_head = tl.program_id(1).to(tl.int64)
    p_work += tl.program_id(0).to(tl.int64) * 9
    row_start = tl.load(p_work)
    keys = tl.load(p_work + 1)
    first = tl.load(p_work + 2)
    position = tl.load(p_work + 3)
    own = tl.load(p_work + 4)
    base = tl.load(p_work + 5)
    begin = tl.load(p_work + 6)
    end = tl.load(p_work + 7)
    slot = tl.load(p_work + 8).to(tl.int64)

    o_n = tl.arange(0, BLOCK_N)
    o_dk = tl.arange(0, KEY_BLOCK)
    o_dv = tl.arange(0, VALUE_BLOCK)
    o_key_row = (row_start + tl.minimum(o_n, keys - 1)).to(tl.int64)
    p_keys = p_k + (o_key_row[:, None] * stride_kt + i_head * stride_kh) * STRIDE_UNIT
    b_k = load_columns(p_keys, o_dk, KEY_DIM, KEY_BLOCK, WIDEN)
    if OF_KEYS:
        p_values = p_v + (o_key_row[:, None] * stride_vt + i_head * stride_vh) * STRIDE_UNIT
        b_v = load_columns(p_values, o_dv, VALUE_DIM, VALUE_BLOCK, WIDEN)
        b_by_k = tl.zeros([BLOCK_N, KEY_BLOCK], tl.float32)
    if OF_VALUES:
        b_by_v = tl.zeros([BLOCK_N, VALUE_BLOCK], tl.float32)

    HAS_REACH: tl.constexpr = HAS_WINDOW or HAS_CHUNK
    o_next = begin * GROUP + tl.arange(0, BLOCK_M)
    b_row, b_limit, b_position = _readers(
        p_readers, n_readers, o_next // GROUP, own, base, first, row_start, position, end, HAS_REACH
    )
    for _ in range(begin * GROUP, end * GROUP, BLOCK_M):
        b_reader, b_sees, b_at = b_row.to(tl.int64), b_limit, b_position
        o_head = i_head * GROUP + o_next % GROUP
        o_next += BLOCK_M
        b_row, b_limit, b_position = _readers(
            p_readers, n_readers, o_next // GROUP, own, base, first, row_start, position, end, HAS_REACH
        )
        p_rows = p_q + (b_reader[:, None] * stride_qt + o_head[:, None] * stride_qh) * STRIDE_UNIT
        b_q = load_columns(p_rows, o_dk, KEY_DIM, KEY_BLOCK, WIDEN)
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # (keys, queries)
        p_rows = p_by_out + (b_reader[:, None] * stride_gt + o_head[:, None] * stride_gh) * STRIDE_UNIT
        b_by_out = load_columns(p_rows, o_dv, VALUE_DIM, VALUE_BLOCK, WIDEN)
        visible = o_n[:, None] < b_sees[None, :]
        if HAS_WINDOW:
            visible = visible & ((position + o_n)[:, None] > (b_at - span)[None, :])
        if HAS_CHUNK:
            visible = visible & ((position + o_n)[:, None] >= (b_at // span * span)[None, :])
        b_lse = _load_rows(p_lse + b_reader * n_heads + o_head, COLUMN_LOADS)
        b_p, b_slope = _probabilities(b_s, b_lse[None, :], visible, scale, softcap, HAS_SOFTCAP, LOG2E)
        if OF_VALUES:
            b_by_v = tl.dot(round_for_product(b_p, p_by_out, WIDEN), b_by_out, b_by_v, input_precision=PRECISION)
        if OF_KEYS:
            b_delta = _load_rows(p_delta + b_reader * n_heads + o_head, COLUMN_LOADS)
            b_by_p = tl.dot(b_v, tl.trans(b_by_out), input_precision=PRECISION)
            b_by_s = b_p * (b_by_p - b_delta[None, :]) * b_slope
            b_by_k = tl.dot(round_for_product(b_by_s, p_q, WIDEN), b_q, b_by_k, input_precision=PRECISION)

    n_key_heads = tl.num_programs(1)
    if slot < 0:
        o_entry = o_key_row * n_key_heads + i_head
        if OF_KEYS:
            p_columns = p_by_k + o_entry[:, None] * KEY_DIM + o_dk[None, :]
            m_stored = (o_n < keys)[:, None] & (o_dk < KEY_DIM)[None, :]
            tl.store(p_columns, (b_by_k * scale).to(p_by_k.dtype.element_ty), mask=m_stored)
        if OF_VALUES:
            p_columns = p_by_v + o_entry[:, None] * VALUE_DIM + o_dv[None, :]
            m_stored = (o_n < keys)[:, None] & (o_dv < VALUE_DIM)[None, :]
            tl.store(p_columns, b_by_v.to(p_by_v.dtype.element_ty), mask=m_stored)
    else:
        o_part = ((slot * n_key_heads + i_head) * BLOCK_N + o_n) * (KEY_BLOCK + VALUE_BLOCK)
        if OF_KEYS:
            tl.store(p_parts + o_part[:, None] + o_dk[None, :], b_by_k * scale)
        if OF_VALUES:
            tl.store(p_parts + KEY_BLOCK + o_part[:, None] + o_dv[None, :], b_by_v)


@triton.jit
def sum_parts_kernel(
    p_parts, p_by_k, p_by_v, p_splits,
    BLOCK_N: tl.constexpr, KEY_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of a tile of keys in their order. Grid: (split tiles, key heads, BLOCK_N // ROWS)."""
    i_head = tl.program_id(1).to(tl.int64)
    n_heads = tl.num_programs(1)
    p_splits += tl.program_id(0).to(tl.int64) * 4
    row_start = tl.load(p_splits)
    keys = tl.load(p_splits + 1)
    slot = tl.load(p_splits + 2).to(tl.int64)
    count = tl.load(p_splits + 3)
    o_n = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    o_dk = tl.arange(0, KEY_BLOCK)
    o_dv = tl.arange(0, VALUE_BLOCK)
    p_part = p_parts + ((slot * n_heads + i_head) * BLOCK_N + o_n)[:, None] * (KEY_BLOCK + VALUE_BLOCK)
    stride = n_heads * BLOCK_N * (KEY_BLOCK + VALUE_BLOCK)
    b_by_k = tl.zeros([ROWS, KEY_BLOCK], tl.float32)
    b_by_v = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    for _ in range(count):
        b_by_k += tl.load(p_part + o_dk[None, :])
        b_by_v += tl.load(p_part + KEY_BLOCK + o_dv[None, :])
        p_part += stride
    o_entry = (row_start + o_n).to(tl.int64) * n_heads + i_head
    m_n = (o_n < keys)[:, None]
    p_by_k += o_entry[:, None] * KEY_DIM
    tl.store(p_by_k + o_dk[None, :], b_by_k.to(p_by_k.dtype.element_ty), mask=m_n & (o_dk < KEY_DIM)[None, :])
    p_by_v += o_entry[:, None] * VALUE_DIM
    tl.store(p_by_v + o_dv[None, :], b_by_v.to(p_by_v.dtype.element_ty), mask=m_n & (o_dv < VALUE_DIM)[None, :])


def shared_options(
    kernel: str, architecture: str, dtype: torch.dtype, key_dim: int, value_dim: int, group: int, kinds: RuleKinds
) -> dict[str, Any]:
    """Return the constexprs that all kernels have, and the compiler's options, by `TUNED`."""
    options = tuned(kernel, architecture, dtype, key=key_dim, value=value_dim, group=group)
    if kernel != "key_gradient_kernel":
        options["BLOCK_M"] = max(options["BLOCK_M"], triton.next_power_of_2(group))
    return options | {
        "GROUP": group,
        "KEY_DIM": key_dim,
        "KEY_BLOCK": triton.next_power_of_2(max(key_dim, 16)),
        "VALUE_DIM": value_dim,
        "VALUE_BLOCK": triton.next_power_of_2(max(value_dim, 16)),
        "HAS_WINDOW": kinds.window,
        "HAS_CHUNK": kinds.chunk,
        "HAS_SOFTCAP": kinds.softcap,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "LOG2E": LOG2E,
        "WIDEN": architecture == "cpu",  # the interpreter has no bf16 dot
    }


@cache
def query_options(*sizes: Any) -> Mapping[str, Any]:
    """Return `shared_options` for the launch of `query_gradient_kernel`."""
    return MappingProxyType(shared_options("query_gradient_kernel", *sizes))


@cache
def key_options(architecture: str, *sizes: Any) -> Sequence[Mapping[str, Any]]:
    """Return `shared_options` of each launch of `key_gradient_kernel`; all of them together make all gradients."""
    options = shared_options("key_gradient_kernel", architecture, *sizes)
    # The older compiler loads a row's two numbers once for every lane that has a column of the row, and spills them.
    options["COLUMN_LOADS"] = architecture == "sm_90" and TRITON_BEFORE_3_7
    # The sums for keys and for values of wide heads do not fit the registers together.
    wide = max(options["KEY_DIM"], options["VALUE_DIM"]) > 128
    parts = [(True, False), (False, True)] if wide else [(True, True)]
    both = ({"OF_KEYS": of_keys, "OF_VALUES": of_values} for of_keys, of_values in parts)
    return tuple(MappingProxyType(options | part) for part in both)


def sum_options(key: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `sum_parts_kernel` after launches of `key_gradient_kernel` with the options `key`."""
    names = ("BLOCK_N", "KEY_DIM", "KEY_BLOCK", "VALUE_DIM", "VALUE_BLOCK")
    return {name: key[name] for name in names} | tuned("sum_parts_kernel")


@torch.library.custom_op("cfa_kernels::tree_attention_backward", mutates_args=())
def tree_attention_backward_op(
    by_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    handle: Tensor,
    segments: Tensor,
    contexts: Tensor,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
    attention_chunk_size: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients by q, k, v and sinks (or an empty one) from that of the result."""
    rule = AttentionRule(scale, sliding_window, attention_chunk_size, softcap, sinks)
    table = SegmentTable.of(handle, segments, contexts)
    if by_out.stride(-1) != 1:
        by_out = by_out.contiguous()
    heads, key_heads = q.shape[1], k.shape[1]
    sizes = (architecture(q.device), q.dtype, q.shape[2], v.shape[2], heads // key_heads, rule.kinds)
    by_query, by_key = query_options(*sizes), key_options(*sizes)
    keys_per_tile, tokens = by_key[0]["BLOCK_N"], max(QUERY_ROWS_PER_PROGRAM * key_heads // heads, 1)
    width = by_key[0]["KEY_BLOCK"] + by_key[0]["VALUE_BLOCK"]
    most_parts = PARTIAL_SUM_BYTES // (4 * key_heads * keys_per_tile * width)
    work, context_rows = table.on_device(q.device, by_query["BLOCK_M"] // by_query["GROUP"])
    key_work, splits, readers, n_parts = table.key_work_on_device(
        q.device, keys_per_tile, tokens, rule.reach, most_parts
    )
    by_q, by_k, by_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty_like(lse)
    parts = lse.new_empty(n_parts, key_heads, keys_per_tile, width)
    strides = [stride for x in (q, k, v, by_out) for stride in x.stride()[:2]]
    unit = stride_unit(strides)
    strides = [stride // unit for stride in strides]
    numbers = (rule.scale, rule.softcap or 0.0, rule.reach.span)
    with torch.cuda.device_of(q):
        query_gradient_kernel[(work.shape[0], key_heads)](
            q, k, v, out, by_out, lse, delta, by_q, work, context_rows, *strides, heads, *numbers,
            STRIDE_UNIT=unit, **by_query,
        )  # fmt: skip
        for options in by_key:
            key_gradient_kernel[(key_work.shape[0], key_heads)](
                q, k, v, by_out, lse, delta, by_k, by_v, parts, key_work, readers, readers.shape[1],
                *strides, heads, *numbers, STRIDE_UNIT=unit, **options,
            )  # fmt: skip
        if len(splits):
            options = sum_options(by_key[0])
            grid = (len(splits), key_heads, keys_per_tile // options["ROWS"])
            sum_parts_kernel[grid](parts, by_k, by_v, splits, **options)
    by_sinks = q.new_empty(0)
    if sinks is not None:
        by_sinks = -(torch.exp2(sinks.float() * LOG2E - lse) * delta).sum(0).to(sinks.dtype)
    return by_q, by_k, by_v, by_sinks


@tree_attention_backward_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    _, q, k, v, sinks, *_ = inputs
    return *(x.new_empty(x.shape) for x in (q, k, v)), q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
