"""Apply a linear layer with a low-rank adapter, both products summed into one result.

Scaling and adding the adapter's product in further passes takes longer than the product itself. An adapter wider than
the rows (float32 beside bfloat16, as PEFT keeps it) is split into two parts of the rows' dtype, 16 bits of bfloat16
together, side by side in one product on tensor cores.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .matmul import add_product, multiply, product


class AdapterParts(NamedTuple):
    """The factors of an adapter in the dtype of the rows, each in three parts (high, low, high)."""

    down: Tensor  # (3 R, K)
    up: Tensor  # (M, 3 R), times the scale of the adapter

    @classmethod
    def of(cls, down: Tensor, up: Tensor, scale: float, dtype: torch.dtype) -> "AdapterParts":
        """Split `down` (R, K) and `scale` times `up` (M, R)."""
        return cls(_split(down.detach(), dtype, along=0, low=1), _split(scale * up.detach(), dtype, along=1, low=1))


def adapted_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
    parts: AdapterParts | None = None,
) -> Tensor:
    """Return `x @ weight.T + bias + scale * (x @ down.T) @ up.T` (LoRA, arXiv:2106.09685), differentiable once.

    Args:
        x: (N, K).
        weight: (M, K), of x's dtype.
        bias: (M,) of x's dtype, or None.
        down: (R, K), of x's dtype or wider, as its gradient is.
        up: (M, R), of the dtype of `down`.
        scale: factor of the adapter.
        parts: those of `down`, `up` and `scale` as they are now, if a caller keeps them from one call to the next.

    Returns:
        (N, M), of x's dtype.
    """
    if down.dtype == x.dtype:
        parts = None
    elif parts is None:
        parts = AdapterParts.of(down, up, scale, x.dtype)
    return _AdaptedLinear.apply(x, weight, bias, down, up, scale, parts)


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scale: float,
        parts: AdapterParts | None,
    ) -> Tensor:
        ctx.scale, ctx.wide = scale, None if parts is None else down.dtype
        if parts is None:
            low = x @ down.t()
            ctx.save_for_backward(x, weight, low, down, up)
            out = product(x, weight.t())
            if bias is not None:
                out += bias
            return out.addmm_(low, up.t(), alpha=scale)
        # A row's parts (high, high, low) times the adapter's (high, low, high): all products but low by low.
        high_low = parts.down.narrow(0, 0, 2 * len(down)).t()
        low = _split(_both(x, high_low, down.dtype), x.dtype, along=1, low=2)  # (N, 3 R)
        ctx.save_for_backward(x, weight, low, *parts)
        return add_product(functional.linear(x, weight, bias), low, parts.up.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, low, down, up = ctx.saved_tensors
        by_x = by_weight = by_bias = by_down = by_up = None
        if ctx.needs_input_grad[1]:
            by_weight = by_out.t() @ x
        if ctx.needs_input_grad[2]:
            by_bias = by_out.sum(0)
        if ctx.wide is None:
            by_low = (by_out @ up).mul_(ctx.scale)
            if ctx.needs_input_grad[0]:
                by_x = product(by_out, weight).addmm_(by_low, down)
            if ctx.needs_input_grad[3]:
                by_down = by_low.t() @ x
            if ctx.needs_input_grad[4]:
                by_up = (by_out.t() @ low).mul_(ctx.scale)
            return by_x, by_weight, by_bias, by_down, by_up, None, None
        rank = len(down) // 3
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[3]:
            by_low = _split(_both(by_out, up.narrow(1, 0, 2 * rank), ctx.wide), x.dtype, along=1, low=2)
        if ctx.needs_input_grad[0]:
            by_x = add_product(by_out @ weight, by_low, down)
        if ctx.needs_input_grad[3]:
            halves = _multiplied(by_low.narrow(1, rank, 2 * rank).t(), x, ctx.wide)  # (2 R, K)
            by_down = halves.narrow(0, 0, rank).add_(halves.narrow(0, rank, rank))
        if ctx.needs_input_grad[4]:
            by_up = _both(by_out.t(), low.narrow(1, rank, 2 * rank), ctx.wide).mul_(ctx.scale)
        return by_x, by_weight, by_bias, by_down, by_up, None, None


def _split(matrix: Tensor, dtype: torch.dtype, *, along: int, low: int) -> Tensor:
    """Lay high, low and high part of a matrix side by side `along` a dimension, the low one at place `low`, 1 or 2."""
    shape = [*matrix.shape[:along], 3, *matrix.shape[along:]]
    parts = torch.empty(shape, dtype=dtype, device=matrix.device)
    step = 3 - low  # of the two high parts
    high = parts.as_strided(
        [*shape[:along], 2, *shape[along + 1 :]], [s * step if i == along else s for i, s in enumerate(parts.stride())]
    )
    high.copy_(matrix.unsqueeze(along))
    torch.sub(matrix, parts.select(along, 0), out=parts.select(along, low))
    return parts.flatten(along, along + 1)


def _both(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    halves = _multiplied(left, right, dtype)
    rank = right.shape[1] // 2
    return halves.narrow(1, 0, rank) + halves.narrow(1, rank, rank)


def _multiplied(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return multiply(left, right, left.new_empty((left.shape[0], right.shape[1]), dtype=dtype))
