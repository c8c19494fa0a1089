"""Attend over a packed tree of token sequences.

Rows of one packed sequence form *segments*. A segment's rows attend to the segment's context, a list of earlier rows in
the order of their positions, and causally to the segment itself.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..ops.dispatch import architecture, resolve_backend
from ..ops.operator_arguments import arguments_of, call, is_traced
from ..ops.triton_math import tanh
from ..ops.tuning import column_blocks
from .attention_backward import (
    load_columns,
    round_for_product,
    shared_options,
    stride_unit,
    tile_rows,
    tree_attention_backward_op,
)
from .attention_options import AttentionRule
from .segment_table import SegmentTable

HEAD_DIM_STEP, WIDEST_HEAD = 8, 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: SegmentTable,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    first_query_row: int = 0,
    backend: str | None = None,
) -> Tensor:
    """Attend from packed rows to others along the tree that `table` describes.

    Args:
        q: (N - first_query_row, H, D) queries; fp32, bf16 or fp16 (the PyTorch reference also takes float64).
        k: (N, Hkv, D) keys, Hkv dividing H (grouped-query attention).
        v: (N, Hkv, Dv) values. The Triton kernel takes multiples of 8 up to 256 for D and Dv.
        table: the segments of the N rows.
        scale: factor on `q . k`; default `D ** -0.5`.
        sliding_window: a row sees only keys fewer than this many positions back (its own counts as one).
        attention_chunk_size: a row sees only keys of the same chunk of so many positions (Llama 4).
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        sinks: (H,) one more logit per query head, of any float dtype, that takes its share of the softmax and has no
            value (GPT-OSS); neither scale nor softcap applies to it.
        first_query_row: the first row of a segment; queries and results are those of the rows from there on.
        backend: `"triton"`, `"torch"` or None (by device).

    Returns:
        (N - first_query_row, H, Dv) in q's dtype; bitwise the same whatever else is in the pack (Triton).
        Differentiable in q, k, v and sinks without a first_query_row, on Triton once and to the same bits every time.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, or gradients for a table without `lineage`.
        NotImplementedError: gradients enabled on an input that requires them, with a first_query_row.
    """
    rule = AttentionRule(
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        sliding_window=sliding_window,
        attention_chunk_size=attention_chunk_size,
        softcap=softcap,
        sinks=sinks,
    )
    _check(q, k, v, table, sinks, first_query_row)
    chosen = resolve_backend(backend, q)
    wants_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    if wants_gradient and first_query_row:
        raise NotImplementedError(
            f"tree_attention has no gradient with first_query_row {first_query_row}: call it under torch.no_grad()"
        )
    if chosen == "torch":
        return tree_attention_reference(q, k, v, table, rule, first_query_row)
    _check_triton(q, k, v)
    arguments = {
        "q": q, "k": k, "v": v, "sinks": sinks, "handle": table.handle, "segments": table.segments,
        "contexts": table.contexts, "scale": rule.scale, "softcap": softcap, "sliding_window": sliding_window,
        "attention_chunk_size": attention_chunk_size, "first_query_row": first_query_row, "with_lse": wants_gradient,
    }  # fmt: skip
    if wants_gradient and not is_traced():
        return _TreeAttention.apply(*arguments.values())[0]  # type: ignore[no-any-return]
    return (tree_attention_op(**arguments) if wants_gradient else call(tree_attention_op, **arguments))[0]  # type: ignore[no-any-return]


def _check(q: Tensor, k: Tensor, v: Tensor, table: SegmentTable, sinks: Tensor | None, first_query_row: int) -> None:
    if q.ndim != 3 or k.ndim != 3 or k.shape[:2] != v.shape[:2] or v.ndim != 3:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"tree_attention takes q (N, H, D), k (N, Hkv, D) and v (N, Hkv, Dv), got {shapes}")
    if not 0 <= first_query_row < table.num_rows:
        raise ValueError(
            f"first_query_row must be one of the {table.num_rows} rows of the table, got {first_query_row}"
        )
    if k.shape[0] != table.num_rows or q.shape[0] != table.num_rows - first_query_row:
        after = f" after {first_query_row} rows without queries" if first_query_row else ""
        raise ValueError(f"table has {table.num_rows} rows, q {q.shape[0]}{after} and k {k.shape[0]}; they must agree")
    if q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(f"heads of q {tuple(q.shape[1:])} do not fit those of k {tuple(k.shape[1:])}")
    if not (q.dtype == k.dtype == v.dtype):
        raise ValueError(f"q, k, v must share one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not (q.device == k.device == v.device):
        raise ValueError(f"q, k, v must be on one device, got {q.device}, {k.device}, {v.device}")
    if sinks is not None and (sinks.shape != q.shape[1:2] or not sinks.is_floating_point()):
        kind = f"{sinks.dtype} of shape {tuple(sinks.shape)}"
        raise ValueError(f"sinks must be floats, one per head of q {tuple(q.shape[1:])}, got {kind}")
    if sinks is not None and sinks.device != q.device:
        raise ValueError(f"sinks must be on q's device {q.device}, got {sinks.device}")


_REFERENCE_BLOCK = 512  # query rows at a time, so that masks and scores stay small
_HALVES_BLOCK = 64
_HALVES = torch.bfloat16, torch.float16  # whose backward takes a CPU longer than that of float32


def tree_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, table: SegmentTable, rule: AttentionRule, first_query_row: int = 0
) -> Tensor:
    """Define `tree_attention` in plain PyTorch, segment by segment; also the CPU path."""
    table.require_start(first_query_row)
    dtype, rows_at_a_time = q.dtype, _REFERENCE_BLOCK
    if q.is_cpu and q.dtype in _HALVES:
        q, k, v, rows_at_a_time = q.float(), k.float(), v.float(), _HALVES_BLOCK
    context_rows = table.contexts.to(q.device)
    segments = zip(table.row_start, table.length, table.context_start, table.context_length, strict=True)
    outputs = []
    for row, length, start, context in (tuple(map(int, segment)) for segment in segments):
        if row < first_query_row:
            continue
        keys, values = k[row : row + length], v[row : row + length]
        if context:
            before = context_rows[start : start + context]
            keys = torch.cat([k.index_select(0, before), keys])
            values = torch.cat([v.index_select(0, before), values])
        for first in range(0, length, rows_at_a_time):
            last = min(first + rows_at_a_time, length)
            query = torch.arange(context + first, context + last, device=q.device)
            oldest = rule.reach.oldest_visible(query)
            low = int(oldest[0])  # no row of this block sees a key before it
            key = torch.arange(low, context + last, device=q.device)
            visible = (key <= query[:, None]) & (key >= oldest[:, None])
            seen = slice(low, context + last)
            queries = q[row + first - first_query_row : row + last - first_query_row]
            outputs.append(_attend_reference(queries, keys[seen], values[seen], visible, rule))
    return torch.cat(outputs).to(dtype)


def _attend_reference(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, rule: AttentionRule) -> Tensor:
    """Attend from q (L, H, D) to k (K, Hkv, D) and v (K, Hkv, Dv) with the mask `visible` (L, K)."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # (1, heads, rows, D)
    if rule.softcap is None and rule.sinks is None:
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=rule.scale, enable_gqa=True)
        return out[0].transpose(0, 1)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if rule.softcap is None:
        scores = q @ k.transpose(2, 3) * rule.scale
    else:
        scores = rule.softcap * torch.tanh(q @ k.transpose(2, 3) * (rule.scale / rule.softcap))
    scores = scores.masked_fill(~visible, float("-inf"))
    wide = torch.promote_types(q.dtype, torch.float32)
    if rule.sinks is not None:
        column = rule.sinks.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores.to(wide), column], dim=-1)
    probs = torch.softmax(scores, dim=-1, dtype=wide)[..., : len(k[0, 0])]
    return (probs.to(q.dtype) @ v)[0].transpose(0, 1)


@triton.jit(do_not_specialize=["first_query_row"])
def tree_attention_kernel(
    p_q, p_k, p_v, p_sinks, p_out, p_lse, p_work, p_context,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh,
    scale, softcap, span, first_query_row,
    STRIDE_UNIT: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, KEY_REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr, VALUE_REST: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    WITH_LSE: tl.constexpr, PRECISION: tl.constexpr, LOG2E: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute one tile: BLOCK_M // GROUP tokens of one segment times the query heads of one key head."""
    # The definition is `tree_attention_reference`. Grid: (work items, key heads). `span` is the positions of the
    # sliding window or of an attention chunk; rows before `first_query_row` have no query and no result. A head's
    # columns are one block, or a block and a narrower one for the rest. Blocks of keys are cut by position only, never
    # by where the rows are or where a tile starts, so a row's sums are formed in the same order in every pack.
    # WITH_LSE, p_lse (N, H) takes the logarithm, to base 2, of a row's sum of exponentials, sink included. Strides
    # count STRIDE_UNIT elements.
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
    o_row = (row_start - first_query_row + o_token).to(tl.int64)
    o_query = context_length + o_token
    oldest = context_length + first
    high = context_length + stop
    low = 0
    if HAS_WINDOW:
        o_first = o_query - span + 1
        low = tl.maximum(oldest - span + 1, 0) // BLOCK_N * BLOCK_N
    if HAS_CHUNK:
        o_first = o_query // span * span
        low = oldest // span * span // BLOCK_N * BLOCK_N

    o_dk = tl.arange(0, KEY_BLOCK)
    o_dv = tl.arange(0, VALUE_BLOCK)
    p_q += (o_row[:, None] * stride_qt + o_head[:, None] * stride_qh) * STRIDE_UNIT
    p_k += i_head * stride_kh * STRIDE_UNIT
    p_v += i_head * stride_vh * STRIDE_UNIT
    b_q = load_columns(p_q, o_dk, KEY_DIM, KEY_BLOCK, WIDEN)
    b_acc = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
    if KEY_REST:
        o_dk_rest = KEY_BLOCK + tl.arange(0, KEY_REST)
        b_q_rest = load_columns(p_q, o_dk_rest, KEY_DIM, KEY_BLOCK + KEY_REST, WIDEN)
    if VALUE_REST:
        o_dv_rest = VALUE_BLOCK + tl.arange(0, VALUE_REST)
        b_acc_rest = tl.zeros([BLOCK_M, VALUE_REST], tl.float32)

    factor = softcap * LOG2E if HAS_SOFTCAP else scale * LOG2E
    # Finite, so that a row that has seen no key yet does not subtract infinity from itself.
    b_max = tl.full([BLOCK_M], -1e30, tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    # Row numbers come one block ahead: loads of keys and values then depend only on registers and can be pipelined.
    shift = row_start - context_length
    o_next = low + tl.arange(0, BLOCK_N)
    b_next = tl.load(p_context + o_next, mask=o_next < context_length, other=0)
    for start in range(low, high, BLOCK_N):
        o_key = start + tl.arange(0, BLOCK_N)
        o_next = o_key + BLOCK_N
        b_row = tl.where(o_key < context_length, b_next, shift + tl.minimum(o_key, high - 1)).to(tl.int64)
        b_next = tl.load(p_context + o_next, mask=o_next < context_length, other=0)
        p_keys = p_k + b_row[:, None] * stride_kt * STRIDE_UNIT
        b_k = load_columns(p_keys, o_dk, KEY_DIM, KEY_BLOCK, WIDEN)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if KEY_REST:
            b_k_rest = load_columns(p_keys, o_dk_rest, KEY_DIM, KEY_BLOCK + KEY_REST, WIDEN)
            b_s = tl.dot(b_q_rest, tl.trans(b_k_rest), b_s, input_precision=PRECISION)
        if HAS_SOFTCAP:
            b_s = tanh(b_s * (scale / softcap))
        visible = o_key[None, :] <= o_query[:, None]
        if HAS_WINDOW or HAS_CHUNK:
            visible = visible & (o_key[None, :] >= o_first[:, None])
        b_s = tl.where(visible, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1) * factor)
        b_p = tl.exp2(b_s * factor - b_new[:, None])
        b_decay = tl.exp2(b_max - b_new)
        b_max = b_new
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_p = round_for_product(b_p, p_v, WIDEN)
        p_values = p_v + b_row[:, None] * stride_vt * STRIDE_UNIT
        b_v = load_columns(p_values, o_dv, VALUE_DIM, VALUE_BLOCK, WIDEN)
        b_acc = tl.dot(b_p, b_v, b_acc * b_decay[:, None], input_precision=PRECISION)
        if VALUE_REST:
            b_v_rest = load_columns(p_values, o_dv_rest, VALUE_DIM, VALUE_BLOCK + VALUE_REST, WIDEN)
            b_acc_rest = tl.dot(b_p, b_v_rest, b_acc_rest * b_decay[:, None], input_precision=PRECISION)

    # Worked out once more, from a number that the compiler cannot know to be 0: kept through the loop, they take
    # registers that two programs on a multiprocessor do not have.
    o_m = tl.arange(0, BLOCK_M) + (first_again - first)
    m_token, o_token, o_head = tile_rows(o_m, first, stop, i_head, GROUP)
    o_row = (row_start - first_query_row + o_token).to(tl.int64)
    if HAS_SINKS:
        b_sum += tl.exp2(tl.load(p_sinks + o_head).to(tl.float32) * LOG2E - b_max)
    if WITH_LSE:
        tl.store(p_lse + o_row * (tl.num_programs(1) * GROUP) + o_head, b_max + tl.log2(b_sum), mask=m_token)
    p_out += (o_row[:, None] * stride_ot + o_head[:, None] * stride_oh) * STRIDE_UNIT
    b_share = 1.0 / b_sum
    b_out = (b_acc * b_share[:, None]).to(p_out.dtype.element_ty)
    tl.store(p_out + o_dv[None, :], b_out, mask=m_token[:, None] & (o_dv < VALUE_DIM)[None, :])
    if VALUE_REST:
        b_out = (b_acc_rest * b_share[:, None]).to(p_out.dtype.element_ty)
        tl.store(p_out + o_dv_rest[None, :], b_out, mask=m_token[:, None] & (o_dv_rest < VALUE_DIM)[None, :])


@cache
def launch_options(*sizes: Any, lse: bool = False) -> Mapping[str, Any]:
    """Return `shared_options` of `sizes` for the kernel, and its own constexprs."""
    options = shared_options("tree_attention_kernel", *sizes)
    key_block, key_rest = column_blocks(options["KEY_DIM"])
    # Two accumulators beyond 128 columns take more registers than padding costs.
    value_block, value_rest = column_blocks(options["VALUE_DIM"]) if options["VALUE_DIM"] <= 128 else (256, 0)
    options |= {"KEY_BLOCK": key_block, "KEY_REST": key_rest, "VALUE_BLOCK": value_block, "VALUE_REST": value_rest}
    return MappingProxyType(options | {"HAS_SINKS": sizes[-1].sinks, "WITH_LSE": lse})


def _check_triton(q: Tensor, k: Tensor, v: Tensor) -> None:
    if any(dim % HEAD_DIM_STEP or not 0 < dim <= WIDEST_HEAD for dim in (q.shape[2], v.shape[2])):
        raise ValueError(
            f"q and v: head dimensions {q.shape[2]} and {v.shape[2]}; each must be a multiple of {HEAD_DIM_STEP} "
            f"up to {WIDEST_HEAD} (backend='triton')"
        )
    if q.dtype not in DTYPES:
        raise ValueError(f"q: dtype {q.dtype} is not one of {DTYPES} (backend='triton')")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}: the head dimension must be contiguous, got strides {tensor.stride()}")


# As operators, so that torch.compile and selective checkpointing see one node each


@torch.library.custom_op("cfa_kernels::tree_attention", mutates_args=())
def tree_attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    handle: Tensor,
    segments: Tensor,
    contexts: Tensor,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
    attention_chunk_size: int | None,
    first_query_row: int,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Run the kernel of `tree_attention`; also return, `with_lse`, the log-sum-exps (N, H) float32 for a backward.

    `handle`, `segments` and `contexts` are the table's, on the CPU.
    """
    table = SegmentTable.of(handle, segments, contexts)
    table.require_start(first_query_row)
    if with_lse:
        _ = table.lineage  # the backward will need it
    rule = AttentionRule(scale, sliding_window, attention_chunk_size, softcap, sinks)
    # A span also where it hides nothing in this pack: another build might round a row differently.
    sizes = (q.shape[2], v.shape[2], q.shape[1] // k.shape[1])
    options = launch_options(architecture(q.device), q.dtype, *sizes, rule.kinds, lse=with_lse)
    sinks = None if sinks is None else sinks.contiguous()
    tokens = options["BLOCK_M"] // options["GROUP"]
    work, device_rows = table.on_device(q.device, tokens, first_query_row)
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2] if with_lse else (0,), dtype=torch.float32, device=q.device)
    strides = [stride for x in (q, k, v, out) for stride in x.stride()[:2]]
    unit = stride_unit(strides)
    with torch.cuda.device_of(q):
        tree_attention_kernel[(work.shape[0], k.shape[1])](
            q, k, v, sinks, out, lse if with_lse else None, work, device_rows,
            *(stride // unit for stride in strides),
            scale, softcap or 0.0, rule.reach.span, first_query_row, STRIDE_UNIT=unit, **options,
        )  # fmt: skip
    return out, lse


_Arguments = arguments_of(tree_attention_op)


@tree_attention_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    q, _, v, *_, with_lse = inputs
    lse = q.new_empty(q.shape[:2] if with_lse else (0,), dtype=torch.float32)
    return q.new_empty(*q.shape[:2], v.shape[2]), lse


_SAVED = ("q", "k", "v", "sinks", "handle", "segments", "contexts")
_OPTIONS = ("scale", "softcap", "sliding_window", "attention_chunk_size")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    arguments = _Arguments(*inputs)
    if arguments.first_query_row or not arguments.with_lse:
        raise NotImplementedError("tree_attention has gradients only with with_lse and without first_query_row")
    ctx.save_for_backward(*output, *(getattr(arguments, name) for name in _SAVED))
    ctx.options = {name: getattr(arguments, name) for name in _OPTIONS}
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, by_out: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if by_out is None:
        return tuple(_Arguments())
    out, lse, *saved = ctx.saved_tensors  # once: a checkpoint unpacks them no second time
    inputs = dict(zip(_SAVED, saved, strict=True))
    inputs |= {"by_out": by_out, "out": out, "lse": lse, **ctx.options}
    by_q, by_k, by_v, by_sinks = call(tree_attention_backward_op, **inputs)
    return tuple(_Arguments(q=by_q, k=by_k, v=by_v, sinks=None if inputs["sinks"] is None else by_sinks))


tree_attention_op.register_autograd(_backward, setup_context=_setup_context)


class _TreeAttention(torch.autograd.Function):
    """The operator with its gradient, without the wrappers of one that `torch.compile` can see."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output: tuple[Tensor, Tensor] = tree_attention_op._init_fn(*inputs)
        _setup_context(ctx, inputs, output)  # by itself torch would inspect signatures at each call
        return output

    backward = staticmethod(once_differentiable(_backward))  # type: ignore[assignment]
