"""Run each LoRA layer of a model on a CPU as one op, which saves the passes that scale and add an adapter's product.

A module keeps its weights and hooks; only its `forward` is replaced, as in `liger.py`. Layers that are not plain LoRA,
as PEFT itself defines it, run PEFT's own code.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.adapted_linear import adapted_linear


class _Layer(NamedTuple):
    """Parts of a LoRA layer, as `adapted_linear` takes them."""

    base: nn.Linear
    down: nn.Linear
    up: nn.Linear
    scale: float


@contextmanager
def one_pass_adapters(model: nn.Module) -> Iterator[None]:
    """Run each LoRA layer of `model` on a CPU as one op inside; their own come back, also after an error.

    Modules whose `forward` other code has replaced stay as they are.
    """
    layers = _lora_layers(model)
    try:
        for layer in layers:
            layer.__dict__["forward"] = MethodType(_forward, layer)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _lora_layers(model: nn.Module) -> list[nn.Module]:
    peft = sys.modules.get("peft.tuners.lora.layer")  # not imported: the model has no such layers
    if peft is None:
        return []
    return [
        module
        for module in model.modules()
        if type(module) is peft.Linear
        and "forward" not in module.__dict__
        and type(module.base_layer) is nn.Linear
        and module.base_layer.weight.device.type == "cpu"
    ]


def _forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    layer = None if args or kwargs else _plain(self, x)
    if layer is None:
        return type(self).forward(self, x, *args, **kwargs)
    rows = x.reshape(-1, x.shape[-1])
    base = layer.base
    out = adapted_linear(rows, base.weight, base.bias, layer.down.weight, layer.up.weight, layer.scale)
    return out.view(*x.shape[:-1], -1)


def _plain(layer: Any, x: Tensor) -> _Layer | None:
    """Return a layer's parts if it is one adapter on a linear layer, all in one full precision, on a CPU."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1 or layer.disable_adapters or layer.merged or names[0] in layer.lora_variant:
        return None
    (name,) = names
    dropout = layer.lora_dropout[name]
    parts = [layer.base_layer, layer.lora_A[name], layer.lora_B[name]]
    if any(type(part) is not nn.Linear for part in parts) or any(_is_watched(part) for part in (*parts, dropout)):
        return None
    if not isinstance(dropout, nn.Identity) and dropout.training and dropout.p:
        return None
    base, down, up = parts
    if down.bias is not None or up.bias is not None or torch.is_autocast_enabled(x.device.type):
        return None
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return None  # halves would round once where PEFT's own way rounds three times
    if any(weight.dtype != x.dtype for weight in (base.weight, down.weight, up.weight)):
        return None
    return _Layer(base, down, up, layer.scaling[name])


def _is_watched(module: nn.Module) -> bool:
    """Whether a module has hooks or a replaced `forward`, which need the module itself to be called."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in module.__dict__
