"""Run each LoRA layer of a model as one op, which saves the passes that scale and add an adapter's product.

Layers that are not plain LoRA, as PEFT itself defines it, run PEFT's own code.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.adapted_linear import AdapterParts, adapted_linear
from .model_walk import Model, ModelWalk
from .modes import exchanged

_FULL = (torch.float32, torch.float64)


class _Layer(NamedTuple):
    base: nn.Linear
    down: nn.Linear
    up: nn.Linear
    scale: float


def one_pass_adapters(model: Model | nn.Module) -> AbstractContextManager[None]:
    """Run each LoRA layer of `model` as one op inside; their own come back, also after an error.

    On a GPU bfloat16 rows meet float32 adapters as two bfloat16 parts, which are kept until the end, 6 bytes a weight:
    weights must not change inside.
    """
    ops = _Ops()
    return exchanged((layer, {"forward": MethodType(ops.run, layer)}) for layer in _lora_layers(ModelWalk.of(model)))


def _lora_layers(walk: ModelWalk) -> list[nn.Module]:
    return [layer for layer in walk.having("_disable_adapters") if _is_linear_lora(layer)]


def _is_linear_lora(layer: Any) -> bool:
    peft = sys.modules.get("peft.tuners.lora.layer")  # not imported: the model has no such layers
    whole = peft is not None and type(layer) is peft.Linear and "forward" not in vars(layer)
    return whole and type(layer.base_layer) is nn.Linear


class _Ops:
    def __init__(self) -> None:
        self._parts: dict[tuple[nn.Module, float], AdapterParts] = {}

    def run(self, layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        parts = None if args or kwargs else _plain_parts(layer, x)
        if parts is None:
            return type(layer).forward(layer, x, *args, **kwargs)
        base, down, up, scale = parts
        if (wider := down.weight.dtype != x.dtype) and (down, scale) not in self._parts:
            self._parts[down, scale] = AdapterParts.of(down.weight, up.weight, scale, x.dtype)
        # Autocast has nothing to cast here and would cast float32 sums.
        casts = torch.is_autocast_enabled(x.device.type)
        with torch.autocast(x.device.type, enabled=False) if casts else nullcontext():
            out = adapted_linear(
                x.reshape(-1, x.shape[-1]), base.weight, base.bias, down.weight, up.weight, scale,
                self._parts[down, scale] if wider else None,
            )  # fmt: skip
        return out.view(*x.shape[:-1], out.shape[-1])  # also of no rows


def _plain_parts(layer: Any, x: Tensor) -> _Layer | None:
    """Return a layer's parts if it runs as one op for rows like `x`."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or len(names) != 1 or names[0] in layer.lora_variant:
        return None
    (name,) = names
    base, down, up, dropout = layer.base_layer, layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    plain = all(type(part) is nn.Linear for part in (base, down, up)) and down.bias is None and up.bias is None
    draws = not isinstance(dropout, nn.Identity) and dropout.training and dropout.p
    if not plain or draws or any(map(_is_watched, (base, down, up, dropout))):
        return None
    fits = _dtypes_fit(x, base.weight.dtype, down.weight.dtype, up.weight.dtype)
    return _Layer(base, down, up, layer.scaling[name]) if fits else None


def _dtypes_fit(x: Tensor, base: torch.dtype, down: torch.dtype, up: torch.dtype) -> bool:
    """Whether rows like `x` and weights of these dtypes run as one op."""
    kind, on_gpu = x.device.type, is_on_gpu(x)
    if torch.is_autocast_enabled(kind) and not (on_gpu and x.dtype == torch.get_autocast_dtype(kind)):
        return False
    if not on_gpu and (kind != "cpu" or x.dtype not in _FULL):  # halves would round once, by PEFT three times
        return False
    wider = torch.float32 if x.dtype == torch.bfloat16 and on_gpu else x.dtype
    return base == x.dtype and down == up and down in (x.dtype, wider)


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is on a GPU."""
    return tensor.device.type == "cuda"


def _is_watched(module: nn.Module) -> bool:
    """Whether other code expects the module itself to be called."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in module.__dict__
