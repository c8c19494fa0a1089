"""Recognise quantised linear layers by their form, whatever library made them, and run them in float32 for a check."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .sharded.fsdp import is_dtensor, is_zero3_weight
from .walk import Model, ModelWalk

FULL = (torch.float32, torch.float64)
HALVES = (torch.bfloat16, torch.float16)
_ROWS = 1024  # of the identity that goes through a layer at a time
_ALIKE = 0.2  # largest relative error of a row by which rounding, of activations too, explains a difference


def is_quantised(module: nn.Module) -> bool:
    """Whether a linear layer keeps its matrix in another form than a floating tensor (out_features, in_features)."""
    sizes = tuple(getattr(module, name, None) for name in ("out_features", "in_features"))
    if module._modules or not all(isinstance(size, int) for size in sizes):
        return False
    weight: Any = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dtype not in FULL + HALVES:
        return True
    if is_zero3_weight(weight):
        return False
    ordinary = type(weight) in (Tensor, nn.Parameter) or is_dtensor(weight)
    # Weights that torch's first FSDP holds in pieces have one dimension.
    return not ordinary or (weight.dim() > 1 and tuple(weight.shape) != sizes)


def product_dtype(model: Model) -> torch.dtype:
    """Return the dtype of the weights or, if that is wider, the one in which quantised layers compute."""
    walk = ModelWalk.of(model)
    if (own := walk.model.dtype) in FULL:
        if "quantised" not in walk.kept:
            walk.kept["quantised"] = [*filter(is_quantised, walk.modules.values())]
        for layer in walk.kept["quantised"]:
            if (dtype := getattr(layer, "compute_dtype", None)) not in FULL:
                return dtype if dtype in HALVES else torch.bfloat16
    return own


def in_float32(layer: nn.Module) -> Callable[..., Tensor]:
    """Make a `forward` that multiplies by a quantised layer's matrix, what it makes of the identity, in float32.

    Results of the layer that differ from this product by more than rounding, as of one that mixes tokens, are kept.
    """
    own_forward, parts = layer.forward, list[Tensor]()

    def own(rows: Tensor) -> Tensor:
        try:
            return own_forward(rows)
        except (RuntimeError, TypeError, ValueError, AssertionError):  # a kernel for halves only
            dtypes = [x.dtype for x in (*layer.parameters(), *layer.buffers()) if x.dtype in HALVES]
            if rows.dtype in HALVES or not dtypes:
                raise
            return own_forward(rows.to(dtypes[0]))

    def forward(rows: Tensor) -> Tensor:
        theirs = own(rows)
        if not parts:
            width = rows.shape[-1]
            shift, strips = own(rows.new_zeros(1, width)).float(), []
            for start in range(0, width, _ROWS):
                strip = rows.new_zeros(min(_ROWS, width - start), width)
                strip.diagonal(start).fill_(1)
                strips.append(own(strip).float() - shift)
            parts.extend((shift, torch.cat(strips)))
        shift, matrix = parts
        exact = rows.float() @ matrix + shift
        error = (exact - theirs.float()).norm(dim=-1)
        is_alike = bool((error <= _ALIKE * exact.norm(dim=-1)).all())
        return (exact if is_alike else theirs).to(rows.dtype)

    return forward
