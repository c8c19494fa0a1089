"""Matrix products between hidden rows and the language-model head, one strip of logits at a time.

A strip is the logits of some rows. Half-precision operands, float32 sums: logits may stay in float32, and the
head's gradient is summed over strips in float32. On a CPU float32 products are oneDNN's: torch's own are MKL's, which
take twice as long where the processor is not Intel's.
"""

import torch
from torch import Tensor

_HALVES = (torch.bfloat16, torch.float16)

_BLOCK_ELEMENTS = 2**20
"""Numbers of a product that exist twice at a time, as oneDNN gave them and where they belong."""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What products of `dtype` are summed in: float32 for the half precisions, else `dtype` itself."""
    return torch.float32 if dtype in _HALVES else dtype


def autocast_operands(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Both as `torch.nn.functional.linear` would take them: under autocast in its dtype, float64 as it is."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device):
        return hidden, head
    dtype = torch.get_autocast_dtype(device)
    hidden, head = (tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in (hidden, head))
    return hidden, head


def empty_strip(
    rows: int, vocabulary: int, dtype: torch.dtype, gradient_dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Memory for logits and for their gradient, which lies over them if the device allows.

    Rows start at multiples of 64 elements, for GEMMs of any vocabulary size. A narrower gradient over the logits
    needs its loads before its stores, an order that a barrier on HIP does not give.

    Args:
        rows, vocabulary: shape of the strip.
        dtype, gradient_dtype: of logits and gradient, the latter not wider.
        device: where.

    Returns:
        Two tensors (rows, vocabulary) that hold anything.
    """

    def empty(dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, -(-vocabulary // 64) * 64, dtype=dtype, device=device)[:, :vocabulary]

    logits = empty(dtype)
    if gradient_dtype == dtype:
        return logits, logits
    if torch.version.hip is None:
        return logits, logits.view(gradient_dtype)[:, :vocabulary]
    return logits, empty(gradient_dtype)


def write_logits(hidden: Tensor, head: Tensor, out: Tensor) -> None:
    """`out = hidden @ head.T`: (n, H), (V, H) -> (n, V), rounded to the dtype of `out` alone."""
    multiply(hidden, head.t(), out)


def hidden_gradient(by_logits: Tensor, head: Tensor, out: Tensor | None = None) -> Tensor:
    """`by_logits @ head`: (n, V), (V, H) -> (n, H)."""
    if by_logits.dtype == torch.bfloat16 and by_logits.device.type == "cpu" and by_logits.size(1) % 2:
        by_logits = by_logits.contiguous()  # oneDNN on AMX multiplies what lies behind rows of odd length, nan as well
    return multiply(by_logits, head, by_logits.new_empty(len(by_logits), head.size(1)) if out is None else out)


def add_head_gradient(total: Tensor, by_logits: Tensor, hidden: Tensor, *, first: bool) -> None:
    """`total += by_logits.T @ hidden`: (n, V), (n, H) -> (V, H) in `sum_dtype`; `first` overwrites instead."""
    multiply(by_logits.t(), hidden, total, add=not first)


def multiply(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """`out = left @ right`, or with `add` `out += left @ right`, summed and rounded in the dtype of `out` alone.

    (n, K), (K, M) -> (n, M).
    """
    if not out.is_cuda:  # which has products of halves that keep their float32 sums
        left, right = left.to(out.dtype), right.to(out.dtype)
    if _has_onednn(out) and left.numel() and out.numel():
        return _multiply_in_blocks(left, right, out, add)
    if out.dtype == left.dtype:
        return torch.addmm(out, left, right, out=out) if add else torch.mm(left, right, out=out)
    if add:
        return torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    return torch.mm(left, right, out_dtype=out.dtype, out=out)


def _has_onednn(tensor: Tensor) -> bool:
    enabled = bool(torch.backends.mkldnn.enabled) and torch.backends.mkldnn.is_available()
    return enabled and tensor.device.type == "cpu" and tensor.dtype == torch.float32


def _multiply_in_blocks(left: Tensor, right: Tensor, out: Tensor, add: bool) -> Tensor:
    """By columns of the result, or by rows where it has more of those: oneDNN gives memory of its own."""
    size = max(_BLOCK_ELEMENTS // min(out.shape), 64)
    if len(out) > out.size(1):
        blocks = [(some, right, place) for some, place in zip(left.split(size), out.split(size), strict=True)]
    else:
        blocks = [(left, some, place) for some, place in zip(right.split(size, 1), out.split(size, 1), strict=True)]
    for one, other, place in blocks:
        product = torch.ops.mkldnn._linear_pointwise(one, other.t(), None, "none", [], "")
        place.add_(product) if add else place.copy_(product)
    return out
