"""Merge a model's adapters into its weights while it samples or scores, and give back the same bits afterwards.

PEFT merges; the values before are put back where they were, because subtracting again leaves rounding behind. Storage
and version counters of weights stay as they are, so a forward before sampling can go backward after it.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .parts import causal_lm, input_device
from .quantised import is_quantised
from .sharded.fsdp import is_piece
from .sharded.ranks import Ranks, inside
from .state import ModelState
from .walk import Model, ModelWalk

_MERGEABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # the sum is not quantised


class CannotMerge(ValueError):
    """Adapters of a model cannot be merged and taken out again; the message names the module and the reason."""


class _Kept(NamedTuple):
    state: ModelState  # of the model that was merged
    weights: dict[nn.Parameter, Tensor]  # merged
    layers: dict[Any, list[str]]  # with the names of their adapters


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
def merged_adapters(model: nn.Module, *, keep: bool = False) -> Iterator[int]:
    """Merge the active adapters of `model` while the context lasts; gives the number of layers merged.

    A backward must wait until the context has ended. With `keep`, copies of the merged weights stay for
    `merged_weights` until an optimizer steps. Raises `CannotMerge`, and nothing has changed then.
    """
    layers, walk = adapted_layers(model), ModelWalk.of(causal_lm(model))
    walk.of_weights.pop("merged", None)
    state = ModelState(walk) if keep else None
    copies: dict[nn.Parameter, Tensor] = {}
    owners = Counter(_place(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    originals: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # with its storage and the values in it
    adapters: list[tuple[nn.Parameter, Tensor]] = []  # likewise; PEFT 0.18 puts copies of halves on a CPU there
    try:
        for name, layer in layers.items():
            base = layer.get_base_layer()
            for key, weight in base.named_parameters(recurse=False):
                if is_piece(weight) or weight.is_meta:
                    where = "in pieces on several processes" if is_piece(weight) else "offloaded"
                    raise CannotMerge(f"{name}: its {key} is {where}")
                if type(weight.data) is not Tensor or weight.dtype not in _MERGEABLE:
                    kind = f"{type(weight.data).__name__} of {str(weight.dtype).removeprefix('torch.')}"
                    raise CannotMerge(f"{name}: its {key} is a {kind}; merged into it, an adapter would be quantised")
                if owners[_place(weight)] > 1:
                    raise CannotMerge(f"{name}: its {key} is tied to another module's, which would be adapted as well")
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
        while keep and originals:
            parameter, storage, values = originals[-1]
            copies.setdefault(parameter, storage.clone())
            storage.copy_(values)
            originals.pop()
        if state is not None:
            names = {layer: [*layer.merged_adapters] for layer in layers.values()}
            ModelWalk.of(walk.model).of_weights["merged"] = _Kept(state, copies, names)
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
    """Run a model on copies of its weights with the adapters merged in, without a write to any weight.

    The copies are those that `merged_adapters` has kept, or made now and kept if the model has changed since. Raises
    `CannotMerge`, which names the option `merge_adapters`.
    """
    walk = ModelWalk.of(model)
    kept = walk.of_weights.get("merged")
    if kept is None or not kept.state.holds(walk.model):
        kept = _merged_now(walk)
    own = [(parameter, parameter.data) for parameter in kept.weights]
    torch.clear_autocast_cache()  # of casts of trained weights, whatever is in them now
    try:
        for parameter, merged in kept.weights.items():
            parameter.data = merged
        for layer, names in kept.layers.items():
            layer.merged_adapters.extend(names)
        yield
    finally:
        for parameter, values in own:
            parameter.data = values
        for layer in kept.layers:
            layer.merged_adapters.clear()
        torch.clear_autocast_cache()


def _merged_now(walk: ModelWalk) -> _Kept:
    try:
        if isinstance(inside(walk.model), Ranks):
            raise CannotMerge(f"the weights of {type(walk.model).__name__} are in pieces on several processes")
        exact = torch.autocast(input_device(walk.model).type, enabled=False)  # products of adapters too
        with torch.no_grad(), exact, merged_adapters(walk.model, keep=True) as layers:
            if not layers:
                raise CannotMerge(f"{type(walk.model).__name__} has no active adapter of PEFT that is not merged yet")
    except CannotMerge as problem:
        raise CannotMerge(f"merge_adapters=True: {problem}; omit the option") from problem
    return ModelWalk.of(walk.model).of_weights["merged"]  # type: ignore[no-any-return]


def _place(weight: Tensor) -> int:
    return weight.untyped_storage().data_ptr() if type(weight.data) is Tensor and not weight.is_meta else id(weight)
