"""Merge a model's adapters into its weights while it samples, and give back the same bits afterwards.

PEFT merges; the values before are put back where they were, because subtracting again leaves rounding behind. Storage
and version counters of weights stay as they are, so a forward before sampling can go backward after it.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_MERGEABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # the sum is not quantised


class CannotMerge(ValueError):
    """Adapters of a model cannot be merged and taken out again; the message names the module and the reason."""


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Find the layers, by name, whose adapters act and are not merged yet."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")  # not there, no such layers
    if tuners is None:
        return {}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, tuners.BaseTunerLayer) and not module.disable_adapters and not module.merged
    }


@contextlib.contextmanager
def merged_adapters(model: nn.Module) -> Iterator[int]:
    """Merge the active adapters of `model` while the context lasts; gives the number of layers.

    A backward must wait until the context has ended. Raises `CannotMerge`, and nothing has changed then.
    """
    layers = adapted_layers(model)
    owners = Counter(_place(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    originals: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # with its storage and the values in it
    try:
        for name, layer in layers.items():
            for key, weight in layer.get_base_layer().named_parameters(recurse=False):
                if type(weight.data) is not Tensor or weight.dtype not in _MERGEABLE:
                    kind = f"{type(weight.data).__name__} of {str(weight.dtype).removeprefix('torch.')}"
                    raise CannotMerge(f"{name}: its {key} is a {kind}; merged into it, an adapter would be quantised")
                if owners[_place(weight)] > 1:
                    raise CannotMerge(f"{name}: its {key} is tied to another module's, which would be adapted as well")
                originals.append((weight, weight.data, weight.data.clone()))
            try:
                layer.merge()
            except Exception as problem:  # each kind of adapter has its own reasons
                raise CannotMerge(f"{name}: PEFT does not merge its adapter ({problem!r})") from problem
        for parameter, storage, _ in originals:  # a CUDA graph reads the weights where they were; DoRA makes new ones
            if parameter.data_ptr() != storage.data_ptr():
                parameter.data = storage.copy_(parameter.data)
        yield len(layers)
    finally:
        for parameter, storage, values in reversed(originals):  # several layers may adapt one module's parameters
            storage.copy_(values)
            parameter.data = storage
        for layer in layers.values():
            layer.merged_adapters.clear()


def _place(weight: Tensor) -> int:
    return weight.untyped_storage().data_ptr() if type(weight.data) is Tensor and not weight.is_meta else id(weight)
