"""Multiply hidden rows and the language-model head, one strip of logits at a time.

A strip is the logits of some rows. Half-precision operands, float32 sums: logits may stay in float32, and the
head's gradient is summed over strips in float32.
"""

import torch
from torch import Tensor

from .matmul import multiply

_HALVES = (torch.bfloat16, torch.float16)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that products of `dtype` are summed in: float32 for the half precisions, else `dtype` itself."""
    return torch.float32 if dtype in _HALVES else dtype


def autocast_operands(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Cast both as `torch.nn.functional.linear` would: to the dtype of autocast where that is on, float64 never."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device):
        return hidden, head
    dtype = torch.get_autocast_dtype(device)
    hidden, head = (tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in (hidden, head))
    return hidden, head


def empty_strip(
    rows: int, vocabulary: int, dtype: torch.dtype, gradient_dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Allocate memory for logits and for their gradient, which shares theirs if the device allows.

    Rows start at multiples of 64 elements, for GEMMs of any vocabulary size. A narrower gradient over the logits
    needs its loads before its stores, an order that a barrier on HIP does not give.

    Args:
        rows, vocabulary: shape of the strip.
        dtype, gradient_dtype: of logits and gradient, the latter not wider.
        device: device of the memory.

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
    """Compute `out = hidden @ head.T`: (n, H), (V, H) -> (n, V), rounded to the dtype of `out` only."""
    multiply(hidden, head.t(), out)


def hidden_gradient(by_logits: Tensor, head: Tensor, out: Tensor | None = None) -> Tensor:
    """Return `by_logits @ head`: (n, V), (V, H) -> (n, H)."""
    if by_logits.dtype == torch.bfloat16 and by_logits.device.type == "cpu" and by_logits.size(1) % 2:
        by_logits = by_logits.contiguous()  # oneDNN on AMX also multiplies what follows rows of odd length: maybe nan
    return multiply(by_logits, head, by_logits.new_empty(len(by_logits), head.size(1)) if out is None else out)


def add_head_gradient(total: Tensor, by_logits: Tensor, hidden: Tensor, *, first: bool) -> None:
    """Compute `total += by_logits.T @ hidden`: (n, V), (n, H) -> (V, H) in `sum_dtype`; `first` overwrites instead."""
    multiply(by_logits.t(), hidden, total, add=not first)
