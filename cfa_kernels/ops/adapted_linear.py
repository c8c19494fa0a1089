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
    """Adapters of G layers in the dtype of the rows, forward in parts, backward rounded, as `_shapes` cuts `buffer`.

    `wide` has the layers' weights with `up` behind them, as `_wide_shapes` cuts it: for compiled layers, in which one
    product takes rows and what `down` gave of them.
    """

    buffer: Tensor  # (L,)
    wide: Tensor | None = None  # (L',)


def _shapes(downs: Sequence[Tensor], ups: Sequence[Tensor]) -> list[tuple[int, int]]:
    count, (rank, width) = len(downs), downs[0].shape
    return [
        (3 * count * rank, width),  # down: for each layer (high, low, high), times the scale of the adapters
        *((len(up), 3 * rank) for up in ups),  # (high, high, low), so that only low by low is left out
        (count * rank, width),  # rounded down
        *((len(up), rank) for up in ups),  # rounded, times the scale
    ]


def _wide_shapes(downs: Sequence[Tensor], ups: Sequence[Tensor]) -> list[tuple[int, int]]:
    rank, width = downs[0].shape  # behind a weight zeros for the layers before its own, then its `up`
    return [(len(up), width + 3 * rank * (i + 1)) for i, up in enumerate(ups)]


def _buffer(like: Tensor, lines: int, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> Tensor:
    return like.new_zeros(lines, sum(rows * columns for rows, columns in shapes), dtype=dtype)


def _cut(buffer: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """View matrices of `shapes` that are one after the other in the last dimension of a buffer."""
    parts = buffer.split([rows * columns for rows, columns in shapes], -1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


@torch.no_grad()
def split_adapters(
    groups: Sequence[tuple[Sequence[AdaptedLayer], float]], dtype: torch.dtype, copies: dict[Any, Tensor] | None = None
) -> list[AdapterParts]:
    """Split the adapters of groups of layers, each with its scale, into parts of `dtype`: all of one form at once.

    `copies`, for parts with wide weights, keeps their memory: a later call for the same layers writes there.
    """
    forms: dict[Any, list[int]] = defaultdict(list)  # layers in pieces are traced with this
    result: dict[int, AdapterParts] = {}
    for i, (layers, scale) in enumerate(groups):
        forms[*(layer.up.shape for layer in layers), layers[0].down.shape, layers[0].down.device, scale].append(i)
    for (*_, scale), places in forms.items():
        members = [*zip(*(groups[i][0] for i in places), strict=True)]  # of each place in a group
        _, _, downs, ups = zip(*(member[0] for member in members), strict=True)
        count, width = len(members), downs[0].shape[1]
        buffer = _buffer(downs[0], len(places), _shapes(downs, ups), dtype)
        down, *others = _cut(buffer, _shapes(downs, ups))
        stacked = torch.stack([layer.down for i in places for layer in groups[i][0]]).view_as(others[count])
        others[count].copy_(stacked)
        stacked, parts = (x.unflatten(1, shape) for x, shape in ((stacked, (count, -1)), (down, (count, 3, -1))))
        _split(stacked * scale, parts.unbind(2), low=1)
        for member, up, rounded in zip(members, others[:count], others[count + 1 :], strict=True):
            stacked = torch.stack([layer.up for layer in member])
            _split(stacked, up.chunk(3, -1), low=2)
            rounded.copy_(stacked * scale)
        lines: Sequence[Tensor | None] = [None] * len(places)
        if copies is not None:
            shapes = _wide_shapes(downs, ups)
            if (wide := copies.get((*places,))) is None:
                wide = copies[*places,] = _buffer(downs[0], len(places), shapes, dtype)
            for member, own, up in zip(members, _cut(wide, shapes), others, strict=False):
                for layer, line in zip(member, own[..., :width], strict=True):
                    line.copy_(layer.weight)
                own[..., -up.shape[-1] :] = up
            lines = wide.unbind()
        result.update(zip(places, map(AdapterParts, buffer, lines), strict=True))
    return [result[i] for i in range(len(groups))]


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
        down, *others = _cut(parts.buffer, _shapes(downs, ups))
        low, up, read = x @ down.t(), (*others[: len(ups)],), (*others[len(ups) :],)  # low (N, 3 G R)
        if parts.wide is not None and is_compiling():
            rows, width = torch.cat([x, low], 1), x.shape[1]  # what makes x and low writes to it
            pairs = zip(_cut(parts.wide, _wide_shapes(downs, ups)), biases, strict=True)
            results = tuple(functional.linear(rows[:, : wide.shape[1]], wide, bias) for wide, bias in pairs)
            return results, (rows[:, :width], rows[:, width:], *read, *weights)
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


def _split(matrix: Tensor, parts: Sequence[Tensor], *, low: int) -> None:
    """Write a matrix to three parts: what it loses by rounding to the one at place `low`, rounded to the others."""
    for part in parts:
        part.copy_(matrix)
    parts[low].copy_(matrix - parts[0])
