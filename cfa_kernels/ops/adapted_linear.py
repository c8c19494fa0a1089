"""Apply a linear layer with a low-rank adapter, both products summed into one result.

Separately, the adapter's product is as large as the layer's and is scaled and added in further passes, forwards and
backwards, which on a CPU take longer than the product itself.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .matmul import product


def adapted_linear(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return `x @ weight.T + bias + scale * (x @ down.T) @ up.T` (LoRA, arXiv:2106.09685), differentiable once.

    Args:
        x: (N, K).
        weight: (M, K), of x's dtype as all the others.
        bias: (M,) or None.
        down: (R, K).
        up: (M, R).
        scale: factor of the adapter.

    Returns:
        (N, M).
    """
    return _AdaptedLinear.apply(x, weight, bias, down, up, scale)


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        low = x @ down.t()
        ctx.save_for_backward(x, weight, down, up, low)
        ctx.scale = scale
        out = product(x, weight.t())
        if bias is not None:
            out += bias
        return out.addmm_(low, up.t(), alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, down, up, low = ctx.saved_tensors
        by_x = by_weight = by_bias = by_down = by_up = None
        by_low = (by_out @ up).mul_(ctx.scale)
        if ctx.needs_input_grad[0]:
            by_x = product(by_out, weight).addmm_(by_low, down)
        if ctx.needs_input_grad[1]:
            by_weight = by_out.t() @ x
        if ctx.needs_input_grad[2]:
            by_bias = by_out.sum(0)
        if ctx.needs_input_grad[3]:
            by_down = by_low.t() @ x
        if ctx.needs_input_grad[4]:
            by_up = (by_out.t() @ low).mul_(ctx.scale)
        return by_x, by_weight, by_bias, by_down, by_up, None
