"""Compute the log-prob and entropy of rows of logits and their gradient by the logits, in one pass over each row."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .row_softmax import (
    LogitRows,
    RowLogprobs,
    probabilities,
    row_gradients_reference,
    row_logprobs_reference,
    row_sums,
    target_logprob,
    write_gradient,
    write_zeros,
)
from .triton_math import LOG2E
from .tuning import tuned


@triton.jit(do_not_specialize=["N", "T"])  # lengths never recompile
def row_logprobs_kernel(
    p_logits, p_bias, p_targets, p_counted, p_rows, N, T, V, stride_b, stride_t, stride_v,
    inv_temperature, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Compute `row_logprobs_reference` for one row. p_rows is (4, N): the fields of `RowLogprobs`."""
    i_n = tl.program_id(0).to(tl.int64)
    logprob = 0.0
    entropy = 0.0
    row_max = 0.0
    log_sum = 0.0
    if tl.load(p_counted + i_n) > 0:
        p_logits += i_n // T * stride_b + i_n % T * stride_t
        target = tl.load(p_targets + i_n)
        logprob, row_max, log_sum, entropy = target_logprob(
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
    """Compute `row_gradients_reference` for one row. p_rows, if there, is the output of `row_logprobs_kernel`."""
    i_n = tl.program_id(0).to(tl.int64)
    p_logits += i_n // T * stride_b + i_n % T * stride_t
    p_gradient += i_n // T * stride_gb + i_n % T * stride_gt
    by_logprob = tl.load(p_by_logprob + i_n)
    by_entropy = tl.load(p_by_entropy + i_n) if WITH_ENTROPY else 0.0
    if (by_logprob == 0) & (by_entropy == 0):
        write_zeros(p_gradient, V, stride_gv, BLOCK, VECTOR)
    else:
        if HAS_ROWS:
            entropy = tl.load(p_rows + N + i_n)
            row_max = tl.load(p_rows + 2 * N + i_n)
            log_sum = tl.load(p_rows + 3 * N + i_n)
        else:
            row_max, log_sum, entropy = row_sums(
                p_logits, p_bias, V, stride_v, inv_temperature, softcap,
                HAS_BIAS, HAS_SOFTCAP, WITH_ENTROPY, BLOCK, VECTOR, LOG2E,
            )  # fmt: skip
        write_gradient(
            p_logits, p_bias, p_gradient, tl.load(p_targets + i_n), V, stride_v, stride_gv,
            row_max, log_sum, entropy, by_logprob, by_entropy, inv_temperature, softcap,
            HAS_BIAS, HAS_SOFTCAP, WITH_ENTROPY, OVERLAPS, BLOCK, VECTOR, LOG2E,
        )  # fmt: skip


def launch_options(vocabulary: int, element_size: int, *, hip: bool = False) -> dict[str, int]:
    """Return the tile of a row's logits and the number of warps, by `TUNED`."""
    # By nothing else, so a row's log-prob is the same bits whatever batch or chunk it is in. A lane loads 16 bytes.
    largest = tuned("row kernels", "hip" if hip else "cuda")
    block = min(triton.next_power_of_2(max(vocabulary, 64)), largest["BLOCK"])
    warps = max(largest["num_warps"] * block // largest["BLOCK"], 1)
    return {"BLOCK": block, "VECTOR": 16 // element_size, "num_warps": warps}


def run_softmax(
    kernel: Any,
    rows: LogitRows,
    gradient: Tensor | None,
    *tensors: Tensor | None,
    numbers: tuple[float, ...] = (),
    **constexprs: Any,
) -> None:
    """Launch a kernel of `LogitRows`; one that writes `gradient` gets its strides and whether memory overlaps."""
    logits, bias, softmax = rows.logits, rows.bias, rows.softmax
    strides, b, t, v = logits.stride(), *logits.shape
    if gradient is not None:
        strides, tensors = strides + gradient.stride(), (gradient, *tensors)
        constexprs["OVERLAPS"] = gradient.dtype != logits.dtype and gradient.data_ptr() == logits.data_ptr()
    options = launch_options(v, logits.element_size(), hip=torch.version.hip is not None)
    with torch.cuda.device_of(logits):
        kernel[(b * t,)](
            logits, bias, *tensors, b * t, t, v, *strides, 1 / softmax.temperature, softmax.softcap, *numbers,
            HAS_BIAS=bias is not None, HAS_SOFTCAP=(softmax.softcap != 0) * (1 + rows.restricted), LOG2E=LOG2E,
            **constexprs, **options,
        )  # fmt: skip


def row_logprobs(
    rows: LogitRows,
    counted: Tensor,
    *,
    with_entropy: bool,
    gradient: Tensor | None = None,
    entropy_gradient: bool = False,
) -> RowLogprobs:
    """Compute the log-prob of the target of each row, and the sums that its gradient needs, in the compute dtype.

    Rows that are not `counted` (N,) give zeros and are not read. Entropies are 0 without `with_entropy`. With
    `gradient` (memory for `row_gradients`) the PyTorch form keeps probabilities, there if they fit.
    """
    if rows.backend == "torch":
        keep_below = gradient is not None and entropy_gradient
        softmaxed = probabilities(rows, counted, with_entropy=with_entropy, keep_below=keep_below, out=gradient)
        values = row_logprobs_reference(softmaxed, counted)
        return values if gradient is None else values._replace(softmaxed=softmaxed)
    sums = torch.empty(4, rows.targets.numel(), dtype=torch.float32, device=rows.logits.device)
    run_softmax(row_logprobs_kernel, rows, None, rows.targets, counted, sums, WITH_ENTROPY=with_entropy)
    return RowLogprobs(*sums)


def row_gradients(
    rows: LogitRows,
    gradient: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor | None,
    row_values: RowLogprobs | None = None,
) -> None:
    """Write the gradient by logits, given those by log-probs and entropies, (N,).

    `gradient` (B, T, V) may be the logits themselves, or of a narrower dtype over their memory if both start at one
    address in every row. `row_values`, the result of `row_logprobs` for these very bits, saves the kernel a reading.
    """
    if rows.backend == "torch":
        softmaxed = None if row_values is None else row_values.softmaxed
        if softmaxed is None:
            softmaxed = probabilities(rows, by_logprob != 0, keep_below=by_entropy is not None, out=gradient)
        gradient.copy_(row_gradients_reference(softmaxed, by_logprob, by_entropy, rows.softmax))
        return
    sums = None if row_values is None else torch.stack(row_values[:4])
    run_softmax(
        row_gradients_kernel, rows, gradient, rows.targets, sums, by_logprob, by_entropy,
        HAS_ROWS=sums is not None, WITH_ENTROPY=by_entropy is not None,
    )  # fmt: skip
