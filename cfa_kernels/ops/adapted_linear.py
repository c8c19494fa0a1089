"""Apply linear layers with low-rank adapters to rows that they share, both products summed into one result each.

Scaling and adding an adapter's product in further passes takes longer than the product itself. Layers that read the
same rows read them once for all their adapters. Adapters wider than the rows (float32 next to bfloat16, as PEFT keeps
them) are split into two parts of the rows' dtype, 16 bits of bfloat16 together, side by side in one product on tensor
cores.
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
    """Adapters of G layers in the dtype of the rows: as they are, or each factor in parts (high, low, high)."""

    down: Tensor  # (G R, K), or (3 G R, K), times the scale of the adapters
    up: tuple[Tensor, ...]  # G times (M, R), or (M, 3 R)


@torch.no_grad()
def split_adapters(groups: Sequence[tuple[Sequence[AdaptedLayer], float]], dtype: torch.dtype) -> list[AdapterParts]:
    """Split the adapters of groups of layers, each with its scale, into parts of `dtype`: all of one shape at once."""
    downs, ups = defaultdict(list), defaultdict(list)  # places in the result, by what can be stacked
    for i, (layers, scale) in enumerate(groups):
        downs[len(layers), layers[0].down.shape, layers[0].down.device, scale].append(i)
        for j, layer in enumerate(layers):
            ups[layer.up.shape, layer.up.device].append((i, j))
    down, up = dict[int, Tensor](), dict[tuple[int, int], Tensor]()
    for (count, shape, _, scale), places in downs.items():
        stacked = torch.stack([layer.down for i in places for layer in groups[i][0]]).mul_(scale)
        parts = _split(stacked.view(-1, count, *shape), dtype, along=1, low=1)
        down.update(zip(places, parts.flatten(1, 3).unbind(), strict=True))
    for pairs in ups.values():
        parts = _split(torch.stack([groups[i][0][j].up for i, j in pairs]), dtype, along=2, low=1)
        up.update(zip(pairs, parts.flatten(2, 3).unbind(), strict=True))
    return [AdapterParts(down[i], tuple(up[i, j] for j in range(len(layers)))) for i, (layers, _) in enumerate(groups)]


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
    """Return the results, and what the backward reads: rows and adapters in the form of `AdapterParts`."""
    weights, biases, downs, ups = (tensors[i::4] for i in range(4))
    count, rank = len(downs), len(downs[0])
    if parts is None:
        down, up = torch.cat(downs) * scale, ups
        low = x @ down.t()  # (N, G R)
        outs = [product(x, weight.t()) for weight in weights]
        outs = [out if bias is None else out.add_(bias) for out, bias in zip(outs, biases, strict=True)]
    else:
        down, up = parts
        # A row's parts (high, high, low) times the adapter's (high, low, high): all products but low by low.
        columns = 2 * count * rank
        sums = _sum(_products([(x, down.narrow(0, 0, columns).t())], downs[0].dtype, along=1))
        low = _split(sums.view(-1, count, rank), x.dtype, along=2, low=2).view(-1, 3 * count * rank)
        outs = [functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    parts_of = zip(outs, low.chunk(count, 1), up, strict=True)
    outs = [add_product(out, own, one.t()) for out, own, one in parts_of]
    return tuple(outs), (x, low, down, *up, *weights)


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, parts: AdapterParts | None, *tensors: Any) -> tuple[Tensor, ...]:
        outs, read = _results(x, scale, parts, *tensors)
        down = tensors[2]
        ctx.scale, ctx.rank, ctx.wide = scale, len(down), None if parts is None else down.dtype
        ctx.save_for_backward(*read)
        return outs

    @staticmethod
    def backward(ctx: Any, *by_outs: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not is_compiling():
            raise RuntimeError("adapted_linear has first derivatives only: run its backward without create_graph=True")
        x, low, down, *others = ctx.saved_tensors
        count, rank, wide = len(by_outs), ctx.rank, ctx.wide
        up, weights = others[:count], others[count:]
        needs_x, _, _, *needs = ctx.needs_input_grad
        needs_down, needs_up = any(needs[2::4]), any(needs[3::4])
        by_x: Tensor | None = None
        by_downs: Sequence[Tensor | None] = [None] * count
        by_ups: Sequence[Tensor | None] = [None] * count
        if needs_x or needs_down:
            if wide is None:
                by_low = torch.cat([by @ one for by, one in zip(by_outs, up, strict=True)], 1)  # (N, G R)
            else:
                pairs = [(by, one.narrow(1, 0, 2 * rank)) for by, one in zip(by_outs, up, strict=True)]
                by_low = _split(_summed(pairs, wide, along=1), x.dtype, along=1, low=2).view(-1, 3 * count * rank)
        if needs_x:
            by_x = product(by_outs[0], weights[0])
            for by, weight in zip(by_outs[1:], weights[1:], strict=True):
                by_x = _added(by_x, by, weight)
            by_x = add_product(by_x, by_low, down)
        if needs_down:
            if wide is None:
                by_down = by_low.t() @ x
            else:
                halves = by_low.narrow(1, count * rank, 2 * count * rank)
                by_down = _sum(_products([(halves.t(), x)], wide, along=0), 0)
            by_downs = by_down.mul_(ctx.scale).chunk(count)
        if needs_up and wide is None:
            by_ups = [by.t() @ own for by, own in zip(by_outs, low.chunk(count, 1), strict=True)]
        elif needs_up:
            owns = (own.narrow(1, rank, 2 * rank) for own in low.chunk(count, 1))
            pairs = [(by.t(), own) for by, own in zip(by_outs, owns, strict=True)]
            by_ups = _summed(pairs, wide, along=0).split_with_sizes([len(one) for one in up])
        by_layers: list[Tensor | None] = []
        for i, by in enumerate(by_outs):
            by_layers += [by.t() @ x if needs[4 * i] else None, by.sum(0) if needs[4 * i + 1] else None]
            by_layers += [by_downs[i], by_ups[i]]
        return by_x, None, None, *by_layers


def _products(pairs: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype, *, along: int) -> Tensor:
    """Put products of pairs of matrices side by side, summed and rounded in `dtype` only."""
    if is_compiling() and len(pairs) == 1:
        return wide_product(*pairs[0], dtype)
    shapes = [(len(left), right.size(1)) for left, right in pairs]
    sizes = [shape[along] for shape in shapes]
    size = (sum(sizes), shapes[0][1]) if along == 0 else (shapes[0][0], sum(sizes))
    out = pairs[0][0].new_empty(size, dtype=dtype)
    for (left, right), place in zip(pairs, out.split_with_sizes(sizes, along), strict=True):
        multiply(left, right, place)
    return out


def _summed(pairs: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype, *, along: int) -> Tensor:
    """Sum the halves of G products (n, 2 R) of pairs of matrices: one below the other, or `along` 1 as (n, G, R)."""
    if not is_compiling():
        out = _products(pairs, dtype, along=along)
        return _sum(out if along == 0 else out.view(-1, len(pairs), out.shape[1] // len(pairs)))
    # Products that are put together before they are summed would be copied, each by a separate kernel.
    first, *others = sums = [_sum(wide_product(left, right, dtype)) for left, right in pairs]
    if along == 0:
        return torch.cat(sums)
    stacked, place = first.unsqueeze(1), torch.arange(len(sums), device=first.device).unsqueeze(1)
    for i, one in enumerate(others, 1):
        stacked = torch.where(place == i, one.unsqueeze(1), stacked)
    return stacked


def _added(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return sum_of(out, left @ right) if is_compiling() else multiply(left, right, out, add=True)


def _split(matrix: Tensor, dtype: torch.dtype, *, along: int, low: int) -> Tensor:
    """Lay high, low and high part of a matrix side by side `along` a new dimension, the low one at place `low`."""
    if is_compiling():
        high = matrix.to(dtype)
        rest = (matrix - high).to(dtype)
        is_low = torch.arange(3, device=matrix.device).view(3, *[1] * (matrix.dim() - along)) == low
        return torch.where(is_low, rest.unsqueeze(along), high.unsqueeze(along))  # one kernel, where a stack may be two
    parts = matrix.new_empty([*matrix.shape[:along], 3, *matrix.shape[along:]], dtype=dtype)
    parts.copy_(matrix.unsqueeze(along))
    places = parts.unbind(along)
    torch.sub(matrix, places[0], out=places[low])
    return parts


def _sum(halves: Tensor, along: int = -1) -> Tensor:
    high, low = halves.chunk(2, along)
    return high + low
