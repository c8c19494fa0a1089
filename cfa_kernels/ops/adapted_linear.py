"""Apply linear layers with low-rank adapters to rows that they share, both products summed into one result each.

Scaling and adding an adapter's product in further passes takes longer than the product itself. Layers that read the
same rows read them once for all their adapters. Adapters wider than the rows (float32 next to bfloat16, as PEFT keeps
them) act on rows with 16 of their bits: what is lost when a factor is rounded is a factor of its own, next to it in one
product on tensor cores. Between the factors, and in gradients, values are rounded to the dtype of the rows, as under
autocast. Gradients of adapters are summed in their own dtype.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional

from .matmul import add_product, multiply, product, sum_of, wide_product


class AdaptedLayer(NamedTuple):
    """Weights of a linear layer and of its adapter."""

    weight: Tensor  # (M, K), of the rows' dtype
    bias: Tensor | None  # (M,), of the rows' dtype
    down: Tensor  # (R, K), of the rows' dtype or wider, as its gradient is
    up: Tensor  # (M, R), of the dtype of `down`


class AdapterParts(NamedTuple):
    """Adapters of G layers in the dtype of the rows: forward each factor in parts, backward rounded."""

    down: Tensor  # (3 G R, K), for each layer (high, low, high), times the scale of the adapters
    up: tuple[Tensor, ...]  # G times (M, 3 R): (high, high, low), so that only low by low is left out
    rounded_down: Tensor  # (G R, K)
    rounded_up: tuple[Tensor, ...]  # G times (M, R), times the scale


@torch.no_grad()
def split_adapters(groups: Sequence[tuple[Sequence[AdaptedLayer], float]], dtype: torch.dtype) -> list[AdapterParts]:
    """Split the adapters of groups of layers, each with its scale, into parts of `dtype`: all of one shape at once."""
    downs, ups = defaultdict(list), defaultdict(list)  # places in the result, by what can be stacked
    for i, (layers, scale) in enumerate(groups):
        downs[len(layers), layers[0].down.shape, layers[0].down.device, scale].append(i)
        for j, layer in enumerate(layers):
            ups[layer.up.shape, layer.up.device, scale].append((i, j))
    down, up = dict[int, tuple[Tensor, ...]](), dict[tuple[int, int], tuple[Tensor, ...]]()
    for (count, shape, _, scale), places in downs.items():
        stacked = torch.stack([layer.down for i in places for layer in groups[i][0]]).view(-1, count, *shape)
        rounded = stacked.to(dtype)
        parts = _split(stacked * scale, dtype, along=2, low=1)
        down.update(zip(places, zip(parts.flatten(1, 3), rounded.flatten(1, 2), strict=True), strict=True))
    for (_, _, scale), pairs in ups.items():
        stacked = torch.stack([groups[i][0][j].up for i, j in pairs])
        parts = _split(stacked, dtype, along=2, low=2)
        up.update(zip(pairs, zip(parts.flatten(2, 3), (stacked * scale).to(dtype), strict=True), strict=True))
    result = []
    for i, (layers, _) in enumerate(groups):
        some, rounded_ups = zip(*(up[i, j] for j in range(len(layers))), strict=True)
        result.append(AdapterParts(down[i][0], some, down[i][1], rounded_ups))
    return result


def adapted_linear(
    x: Tensor, layers: Sequence[AdaptedLayer], scale: float, parts: AdapterParts | None = None
) -> tuple[Tensor, ...]:
    """Return `x @ weight.T + bias + scale * (x @ down.T) @ up.T` (LoRA, arXiv:2106.09685) of layers.

    Differentiable once.

    Args:
        x: (N, K).
        layers: G layers, whose adapters have one rank and one dtype.
        scale: factor of the adapters.
        parts: those of `layers` and `scale` as they are now, if a caller keeps them from one call to the next. Only
            adapters wider than x have any.

    Returns:
        G times (N, M), of x's dtype.
    """
    if parts is None and layers[0].down.dtype != x.dtype:
        (parts,) = split_adapters([(layers, scale)], x.dtype)
    tensors = [tensor for layer in layers for tensor in layer]
    if not torch.is_grad_enabled():
        return _results(x, scale, parts, *tensors)[0]
    return _AdaptedLinear.apply(x, scale, parts, *tensors)  # type: ignore[no-any-return]


# Few rows take as long as the host needs to launch their products: the views of them are made by few calls.
def _results(x: Tensor, scale: float, parts: AdapterParts | None, *tensors: Any) -> tuple[tuple[Tensor, ...], ...]:
    """Return the results, and what the backward reads: rows, and adapters as `AdapterParts` has them for it."""
    weights, biases, downs, ups = (tensors[i::4] for i in range(4))
    if parts is None:
        rounded, up = torch.cat(downs), ups
        low, read = x @ (rounded * scale).t(), (rounded, *ups)
        outs = [product(x, weight.t()) for weight in weights]
        outs = [out if bias is None else out.add_(bias) for out, bias in zip(outs, biases, strict=True)]
    else:
        low, up = x @ parts.down.t(), parts.up  # (N, 3 G R)
        read = (parts.rounded_down, *parts.rounded_up)
        outs = [functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    parts_of = zip(outs, low.chunk(len(downs), 1), up, strict=True)
    outs = [add_product(out, own, one.t()) for out, own, one in parts_of]
    return tuple(outs), (x, low, *read, *weights)


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, parts: AdapterParts | None, *tensors: Any) -> tuple[Tensor, ...]:
        outs, read = _results(x, scale, parts, *tensors)
        down = tensors[2]
        ctx.scale, ctx.rank, ctx.dtype = None if parts else scale, len(down), down.dtype
        ctx.save_for_backward(*read)
        return outs

    @staticmethod
    def backward(ctx: Any, *by_outs: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not is_compiling():
            raise RuntimeError("adapted_linear has first derivatives only: run its backward without create_graph=True")
        x, low, down, *others = ctx.saved_tensors
        count = len(by_outs)
        up, weights = others[:count], others[count:]
        needs_x, _, _, *needs = ctx.needs_input_grad
        needs_down, needs_up = any(needs[2::4]), any(needs[3::4])
        by_x: Tensor | None = None
        by_downs: Sequence[Tensor | None] = [None] * count
        by_ups: Sequence[Tensor | None] = [None] * count
        if needs_x or needs_down:
            by_lows = [by @ one for by, one in zip(by_outs, up, strict=True)]
            by_low = torch.cat(by_lows, 1) if count > 1 else by_lows[0]  # (N, G R)
            if ctx.scale is not None:
                by_low = by_low * ctx.scale
        if needs_x:
            by_x = product(by_outs[0], weights[0])
            for by, weight in zip(by_outs[1:], weights[1:], strict=True):
                by_x = _added(by_x, by, weight)
            by_x = add_product(by_x, by_low, down)
        if needs_down:
            by_downs = wide_product(by_low.t(), x, ctx.dtype).chunk(count)
        if needs_up:
            owns = (own.narrow(1, 0, ctx.rank) for own in low.chunk(count, 1))
            by_ups = [wide_product(by.t(), own, ctx.dtype) for by, own in zip(by_outs, owns, strict=True)]
        by_layers: list[Tensor | None] = []
        for i, by in enumerate(by_outs):
            by_layers += [by.t() @ x if needs[4 * i] else None, by.sum(0) if needs[4 * i + 1] else None]
            by_layers += [by_downs[i], by_ups[i]]
        return by_x, None, None, *by_layers


def _added(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return sum_of(out, left @ right) if is_compiling() else multiply(left, right, out, add=True)


def _split(matrix: Tensor, dtype: torch.dtype, *, along: int, low: int) -> Tensor:
    """Lay high, low and high part of a matrix side by side `along` a new dimension, the low one at place `low`."""
    parts = matrix.new_empty([*matrix.shape[:along], 3, *matrix.shape[along:]], dtype=dtype)
    parts.copy_(matrix.unsqueeze(along))
    places = parts.unbind(along)
    places[low].copy_(matrix - places[0])
    return parts
