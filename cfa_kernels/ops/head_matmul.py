"""Multiply hidden rows and the language-model head, one strip of logits at a time.

A strip is the logits of some rows. Half-precision operands, float32 sums: logits may stay in float32, and the
head's gradient is summed over strips in float32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .matmul import multiply
from .row_softmax import compute_dtype

Index = Tensor | slice  # some rows of flattened input


def autocast_operands(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Cast both as `torch.nn.functional.linear` does under autocast, float64 never."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device):
        return hidden, head
    dtype = torch.get_autocast_dtype(device)
    hidden, head = (tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in (hidden, head))
    return hidden, head


def empty_strip(rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate logits (rows, vocabulary) in the compute dtype and their gradient in `dtype`, if possible over them."""

    def empty(dtype: torch.dtype) -> Tensor:  # rows at multiples of 64 elements, for GEMMs of any vocabulary
        return torch.empty(rows, -(-vocabulary // 64) * 64, dtype=dtype, device=device)[:, :vocabulary]

    logits = empty(compute_dtype(dtype))
    if dtype == logits.dtype:
        return logits, logits
    # A narrower gradient over the logits needs loads before stores, an order that a barrier on HIP does not give.
    return logits, logits.view(dtype)[:, :vocabulary] if torch.version.hip is None else empty(dtype)


def write_logits(hidden: Tensor, head: Tensor, out: Tensor) -> None:
    """Compute `out = hidden @ head.T`: (n, H), (V, H) -> (n, V), rounded to the dtype of `out` only."""
    multiply(hidden, head.t(), out)


class HeadGradients:
    """Gradients by hidden, head and bias, summed strip by strip, the latter two in the compute dtype.

    Gradients that are not needed are empty.
    """

    def __init__(self, hidden: Tensor, head: Tensor, needs_gradient: Sequence[bool]) -> None:
        self.head, self.needs_gradient = head, needs_gradient
        sums = compute_dtype(head.dtype)
        self.by_hidden = hidden.new_zeros(hidden.shape if needs_gradient[0] else (0,))
        self.by_head = head.new_empty(head.shape if needs_gradient[1] else (0,), dtype=sums)
        self.by_bias = head.new_zeros(head.shape[:1] if needs_gradient[2] else (0,), dtype=sums)
        self._empty = True

    def add(self, index: Index, hidden: Tensor, by_logits: Tensor) -> None:
        """Add rows `index`, given their hidden states (n, H) and gradient by logits (n, V)."""
        if not len(hidden):
            return
        if self.needs_gradient[0]:
            if isinstance(index, slice):
                _hidden_gradient(by_logits, self.head, self.by_hidden[index])
            else:
                self.by_hidden.index_copy_(0, index, _hidden_gradient(by_logits, self.head, torch.empty_like(hidden)))
        if self.needs_gradient[1]:
            multiply(by_logits.t(), hidden, self.by_head, add=not self._empty)
        if self.needs_gradient[2]:
            self.by_bias += by_logits.sum(0, dtype=self.by_bias.dtype)
        self._empty = False

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three sums."""
        if self._empty:
            self.by_head.zero_()
        return self.by_hidden, self.by_head, self.by_bias


def _hidden_gradient(by_logits: Tensor, head: Tensor, out: Tensor) -> Tensor:
    if by_logits.dtype == torch.bfloat16 and by_logits.device.type == "cpu" and by_logits.size(1) % 32:
        by_logits = by_logits.contiguous()  # oneDNN on AMX multiplies tiles of 32, also what follows a row: maybe nan
    return multiply(by_logits, head, out)
