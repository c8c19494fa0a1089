"""Run each LoRA layer of a model as one op, which saves the passes that scale and add an adapter's product.

A module keeps its weights and hooks; only its `forward` is replaced. Layers that are not plain LoRA,
as PEFT itself defines it, run PEFT's own code, and `adapters_left_to_peft` says why.
"""

import sys
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.adapted_linear import AdapterParts, adapted_linear
from .model_state import Weight
from .model_walk import Model, ModelWalk
from .modes import exchanged

_PEFT = "peft.tuners.lora.layer"
_FULL = (torch.float32, torch.float64)


class _Layer(NamedTuple):
    """Parts of a LoRA layer, as `adapted_linear` takes them."""

    base: nn.Linear
    down: nn.Linear
    up: nn.Linear
    scale: float


def one_pass_adapters(model: Model | nn.Module) -> AbstractContextManager[None]:
    """Run each LoRA layer of `model` as one op inside; their own come back, also after an error.

    On a GPU bfloat16 rows meet float32 adapters as two bfloat16 parts (16 bits), through tensor cores; the parts of
    every adapter that ran are kept until the end, 6 bytes a weight. Modules whose `forward` other code has replaced
    stay as they are.
    """
    ops = _Ops()
    return exchanged((layer, {"forward": MethodType(ops.run, layer)}) for layer in _lora_layers(ModelWalk.of(model)))


def adapters_left_to_peft(model: Model) -> dict[str, str]:
    """Name the adapted layers of `model` that run as PEFT has them within `one_pass_adapters`, each with the reason.

    As the model is now: its modes, active adapters, dtypes and device, and the caller's autocast.
    """
    walk = ModelWalk.of(model)
    layers = {name: m for name, m in walk.modules.items() if "_disable_adapters" in vars(m)}
    # A module of `modules_to_save` is a trained copy, not an adapter: it has no base layer.
    reasons = {name: _reason(layer) for name, layer in layers.items() if hasattr(layer, "get_base_layer")}
    return {name: reason for name, reason in reasons.items() if reason}


def _reason(layer: Any) -> str | None:
    """Say why an adapted layer runs as PEFT has it; None where it runs as one op."""
    if "forward" in vars(layer):
        return "it has a forward of its own"
    if not _is_linear_lora(layer):
        return f"not a LoRA adapter on nn.Linear ({type(layer.get_base_layer()).__name__})"
    read = _read(layer, layer.base_layer.weight)
    return read if isinstance(read, str) else None


def _lora_layers(walk: ModelWalk) -> list[nn.Module]:
    found = (each for kind, each in walk.by_class.items() if kind.__module__ == _PEFT)
    return [m for each in found for m in each if _is_linear_lora(m)]


def _is_linear_lora(layer: Any) -> bool:
    """Whether a layer is PEFT's LoRA on a plain linear layer, and runs PEFT's `forward`."""
    peft = sys.modules.get(_PEFT)  # not imported: the model has no such layers
    whole = peft is not None and type(layer) is peft.Linear and "forward" not in vars(layer)
    return whole and type(layer.base_layer) is nn.Linear


def kept_by_adapter(layer: Any) -> int:
    """Bytes of a row that the trained adapters of a layer keep for a backward.

    One op keeps the product of low rank, in three parts where the adapter is wider, and rows that its neighbours keep
    as well. PEFT's own layer keeps both in the adapter's dtype, a copy where that is wider than the model's.
    """
    if layer.disable_adapters:
        return 0
    downs = [down for name, down in getattr(layer, "lora_A", {}).items() if name in layer.active_adapters]
    weights = [down.weight for down in downs if isinstance(down, nn.Linear) and down.weight.requires_grad]
    if weights and _reason(layer) is None:
        (down,), size = weights, layer.base_layer.weight.dtype.itemsize
        return size * len(down) * (3 if down.dtype.itemsize > size else 1)
    return sum(sum(weight.shape) * weight.dtype.itemsize for weight in weights)


class _Ops:
    """Replacement of LoRA layers' `forward`, with the parts of adapters that were split."""

    def __init__(self) -> None:
        self._parts: dict[tuple[nn.Module, float], tuple[Weight, Weight, AdapterParts]] = {}

    def run(self, layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        read = "called with more than rows" if args or kwargs else _read(layer, x)
        if isinstance(read, str):
            return type(layer).forward(layer, x, *args, **kwargs)
        rows, (base, down, up, scale) = x.reshape(-1, x.shape[-1]), read
        parts = self._split(layer, read, x.dtype) if down.weight.dtype != x.dtype else None
        given = (rows, base.weight, base.bias, down.weight, up.weight, scale, parts)
        if torch.is_autocast_enabled(x.device.type):  # which has nothing to cast and would cast float32 sums
            with torch.autocast(x.device.type, enabled=False):
                out = adapted_linear(*given)
        else:
            out = adapted_linear(*given)
        return out.view(*x.shape[:-1], out.shape[-1])  # also of no rows

    def _split(self, layer: nn.Module, read: _Layer, dtype: torch.dtype) -> AdapterParts:
        kept, down, up = self._parts.get((layer, read.scale)), read.down.weight, read.up.weight
        if kept is None or kept[0].change(down) or kept[1].change(up):
            parts = AdapterParts.of(down, up, read.scale, dtype)
            kept = self._parts[layer, read.scale] = Weight.of(down), Weight.of(up), parts
        return kept[2]


def _read(layer: Any, x: Tensor) -> _Layer | str:
    """Return a layer's parts if it runs as one op for rows like `x`, else why not."""
    if layer.disable_adapters or layer.merged:
        return "its adapters are switched off or merged"
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1:
        return f"{len(names)} of its adapters are active"
    (name,) = names
    if name in layer.lora_variant:
        return f"its adapter is another kind of LoRA ({type(layer.lora_variant[name]).__name__})"
    dropout = layer.lora_dropout[name]
    parts = [layer.base_layer, layer.lora_A[name], layer.lora_B[name]]
    if any(type(part) is not nn.Linear for part in parts):
        return "its base layer or its adapter is no plain linear layer"
    if any(_is_watched(part) for part in (*parts, dropout)):
        return "its base layer, its adapter or its dropout has hooks or a forward of its own"
    if not isinstance(dropout, nn.Identity) and dropout.training and dropout.p:
        return f"it has dropout {dropout.p}"
    base, down, up = parts
    if down.bias is not None or up.bias is not None:
        return "its adapter has a bias"
    return _mismatch(x, base.weight, down.weight, up.weight) or _Layer(base, down, up, layer.scaling[name])


def _mismatch(x: Tensor, base: Tensor, down: Tensor, up: Tensor) -> str | None:
    """Say why rows like `x` and weights of these dtypes do not run as one op; None where they do."""
    kind, on_gpu = x.device.type, is_on_gpu(x)
    if torch.is_autocast_enabled(kind) and not (on_gpu and x.dtype == torch.get_autocast_dtype(kind)):
        return f"autocast casts rows of {x.dtype}"
    if not on_gpu and (kind != "cpu" or x.dtype not in _FULL):
        return f"rows of {x.dtype} on {kind}: halves would round once where PEFT's own way rounds three times"
    wider = torch.float32 if x.dtype == torch.bfloat16 and on_gpu else x.dtype
    if base.dtype != x.dtype or down.dtype != up.dtype or down.dtype not in (x.dtype, wider):
        return f"rows of {x.dtype} meet a base layer of {base.dtype} and an adapter of {down.dtype} and {up.dtype}"
    return None


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is on a GPU."""
    return tensor.device.type == "cuda"


def _is_watched(module: nn.Module) -> bool:
    """Whether other code expects the module itself to be called."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in module.__dict__
