"""Sum up blocks of a row of logits in one pass, so that neither a sum nor the likeliest tokens need another one.

The PyTorch form is `block_sums_reference`. The largest logits of a row are in the blocks with the largest maxima.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from .dispatch import resolve_backend
from .operator_arguments import call
from .tuning import tuned

WIDTH = 32  # logits of a block
_IN_CACHE = 2**17  # logits that a CPU's cache holds


def block_sums(logits: Tensor, temperature: float, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Compute the maximum and `sum(exp((logit - maximum) / temperature))` of each block of `WIDTH` logits of a row.

    Args:
        logits: (B, V), of which the last block of a row may have fewer; -inf stands for what cannot be drawn.
        temperature: what logits are divided by.
        backend: one of `dispatch.BACKENDS`.

    Returns:
        Maxima (B, n) fp32, and sums (B, n) float64: of terms in fp32, 0 where all logits are -inf, nan where one
        is nan or inf.
    """
    backend = resolve_backend(backend, logits)
    maxima, sums = call(block_sums_op, logits=logits, temperature=temperature, backend=backend)
    return maxima, sums


@torch.library.custom_op("cfa_kernels::block_sums", mutates_args=())
def block_sums_op(logits: Tensor, temperature: float, backend: str) -> tuple[Tensor, Tensor]:
    """Compute `block_sums`; an operator, so that who counts launches sees one."""
    if backend == "torch":
        rows = max(1, _IN_CACHE // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
        parts = [block_sums_reference(part, temperature) for part in logits.split(rows)]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    (rows, vocabulary), options = logits.shape, tuned("block_sums_kernel")
    maxima = torch.empty(rows, triton.cdiv(vocabulary, WIDTH), dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(maxima, dtype=torch.float64)
    with torch.cuda.device_of(logits):
        block_sums_kernel[(rows, triton.cdiv(maxima.shape[1], options["BLOCKS"]))](
            logits, maxima, sums, vocabulary, maxima.shape[1], logits.stride(0), temperature, WIDTH=WIDTH, **options,
        )  # fmt: skip
    return maxima, sums


def block_sums_reference(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute `block_sums` of rows."""
    missing = -logits.shape[1] % WIDTH
    blocks = (pad(logits, (0, missing), value=-torch.inf) if missing else logits).float().unflatten(1, (-1, WIDTH))
    maxima = blocks.amax(-1, keepdim=True)
    # Divided first: the weights of single tokens are rounded alike.
    below = (blocks / temperature).sub_(maxima.masked_fill(maxima == -torch.inf, 0) / temperature)
    return maxima[..., 0], below.exp_().sum(-1).double()


@triton.jit
def block_sums_kernel(
    p_logits, p_maxima, p_sums, V, n, stride_b, temperature, WIDTH: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Compute `block_sums_reference` for some blocks of a row."""
    i_b = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    o_v = o_n[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    b_logits = tl.load(p_logits + i_b * stride_b + o_v, mask=o_v < V, other=-float("inf")).to(tl.float32)
    b_max = tl.max(b_logits, 1)
    b_from = tl.where(b_max == -float("inf"), 0.0, b_max) / temperature
    b_sum = tl.sum(tl.exp(b_logits / temperature - b_from[:, None]), 1)  # nan from a nan, which a maximum leaves out
    tl.store(p_maxima + i_b * n + o_n, b_max, mask=o_n < n)
    tl.store(p_sums + i_b * n + o_n, b_sum.to(tl.float64), mask=o_n < n)
