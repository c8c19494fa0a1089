"""Merge a model's adapters into its weights while it samples or scores, and give back the same bits afterwards.

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

from .parts import input_device
from .quantised import FULL, HALVES, is_quantised
from .sharded.fsdp import is_piece
from .sharded.ranks import Ranks, inside
from .walk import Model, ModelWalk


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
    """Merge the active adapters of `model` while the context lasts; gives the number of layers merged.

    A backward must wait until the context has ended. Raises `CannotMerge`, and nothing has changed then.
    """
    layers = adapted_layers(model)
    owners = Counter(_place(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    originals: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # with its storage and the values in it
    adapters: list[tuple[nn.Parameter, Tensor]] = []  # likewise; PEFT 0.18 puts copies of halves on a CPU there
    try:
        for name, layer in layers.items():
            base = layer.get_base_layer()
            for key, weight in base.named_parameters(recurse=False):
                if obstacle := _obstacle(weight, owners):
                    raise CannotMerge(f"{name}: its {key} is {obstacle}")
                originals.append((weight, weight.data, weight.data.clone()))
            if is_quantised(base):
                raise CannotMerge(f"{name}: its base, a {type(base).__name__}, holds its weights quantised")
            adapters += [(parameter, parameter.data) for parameter in layer.parameters()]
            try:
                layer.merge()
            except Exception as problem:  # each kind of adapter has its own reasons
                raise CannotMerge(f"{name}: PEFT does not merge its adapter ({problem!r})") from problem
        for parameter, storage, _ in originals:  # a CUDA graph reads the weights where they were; DoRA makes new ones
            if parameter.data_ptr() != storage.data_ptr():
                parameter.data = storage.copy_(parameter.data)
        yield sum(bool(layer.merged_adapters) for layer in layers.values())
    finally:
        for parameter, storage, values in reversed(originals):  # several layers may adapt one module's parameters
            storage.copy_(values)
            parameter.data = storage
        for parameter, storage in reversed(adapters):
            if parameter.data_ptr() != storage.data_ptr():
                parameter.data = storage
        for layer in layers.values():
            layer.merged_adapters.clear()


@contextlib.contextmanager
def merged_weights(model: Model) -> Iterator[None]:
    """Merge the adapters of a model while it scores; raise `CannotMerge`, which names the option `merge_adapters`."""
    walk = ModelWalk.of(model)
    with contextlib.ExitStack() as stack:
        try:
            if isinstance(inside(walk.model), Ranks):
                raise CannotMerge(f"the weights of {type(walk.model).__name__} are in pieces on several processes")
            stack.callback(torch.clear_autocast_cache)  # of casts of trained weights
            exact = torch.autocast(input_device(walk.model).type, enabled=False)  # products of adapters too
            with torch.no_grad(), exact:
                layers = stack.enter_context(merged_adapters(walk.model))
            if not layers:
                raise CannotMerge(f"{type(walk.model).__name__} has no active adapter of PEFT that is not merged yet")
        except CannotMerge as problem:
            raise CannotMerge(f"merge_adapters=True: {problem}; omit the option") from problem
        torch.clear_autocast_cache()
        yield


def _obstacle(weight: Tensor, owners: Counter[int]) -> str | None:
    if is_piece(weight):
        return "in pieces on several processes"
    if weight.is_meta:
        return "offloaded"
    if type(weight.data) is not Tensor or weight.dtype not in FULL + HALVES:
        kind = f"{type(weight.data).__name__} of {str(weight.dtype).removeprefix('torch.')}"
        return f"a {kind}; merged into it, an adapter would be quantised"
    return "tied to another module's, which would be adapted as well" if owners[_place(weight)] > 1 else None


def _place(weight: Tensor) -> int:
    return weight.data_ptr() if type(weight.data) is Tensor and not weight.is_meta else id(weight)
