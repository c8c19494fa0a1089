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


def adapted_layers(model: nn.Module | ModelWalk) -> dict[str, Any]:
    """Find the layers, by name, whose adapters act and are not merged yet."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")  # not there, no such layers
    if tuners is None:
        return {}
    walk = ModelWalk.of(model)
    kinds = {kind for kind in walk.by_class if issubclass(kind, tuners.BaseTunerLayer)}
    tuned: dict[str, Any] = {name: module for name, module in walk.modules.items() if type(module) in kinds}
    return {name: layer for name, layer in tuned.items() if not layer.disable_adapters and not layer.merged}


@contextlib.contextmanager
def merged_adapters(model: nn.Module | ModelWalk) -> Iterator[int]:
    """Merge the active adapters of `model` while the context lasts; gives the number of layers merged.

    A backward must wait until the context has ended. Raises `CannotMerge`, and nothing has changed then.
    """
    walk = ModelWalk.of(model)
    layers, there = adapted_layers(walk), [(p, p.data, _place(p)) for p in walk.parameters()]
    owners, storages = Counter(place for *_, place in there), list[Tensor]()
    bases = {name: layer.get_base_layer() for name, layer in layers.items()}
    for name, base in bases.items():
        for key, weight in base._parameters.items():
            if weight is not None and (obstacle := _obstacle(weight, owners)):
                raise CannotMerge(f"{name}: its {key} is {obstacle}")
            storages += [] if weight is None else [weight.data]
        if is_quantised(base):
            raise CannotMerge(f"{name}: its base, a {type(base).__name__}, holds its weights quantised")
    if not layers:
        yield 0
        return
    values, copied = [*map(torch.empty_like, storages)], torch._foreach_copy_  # few launches for hundreds of weights
    copied(values, storages)
    try:
        for name, layer in layers.items():
            try:
                layer.merge()
            except Exception as problem:  # each kind of adapter has its own reasons
                raise CannotMerge(f"{name}: PEFT does not merge its adapter ({problem!r})") from problem
        for parameter, storage, place in there:  # a CUDA graph reads weights where they were; DoRA makes new ones
            if _place(parameter) != place:
                parameter.data = storage.copy_(parameter.data)
        yield sum(bool(layer.merged_adapters) for layer in layers.values())
    finally:
        for name, layer in layers.items():
            if layer.get_base_layer() is not bases[name]:  # LNTuning exchanges layers
                layer.unmerge()
        copied(storages, values)
        for parameter, storage, place in there:  # PEFT 0.18 puts copies of halves on a CPU into adapters
            if _place(parameter) != place:
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
                layers = stack.enter_context(merged_adapters(walk))
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
