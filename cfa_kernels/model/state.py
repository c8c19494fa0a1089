"""Record a model's weights and adapters at a forward, so that code which continues that forward detects a change."""

from collections.abc import Collection, Mapping
from copy import copy
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .walk import Model, ModelWalk


def _count_fused_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Count the writes of a fused optimizer step, which PyTorch's fused kernels leave out (seen in 2.13)."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            if parameter.grad is not None and not parameter.is_inference():
                torch.autograd.graph.increment_version(parameter)


register_optimizer_step_post_hook(_count_fused_step)

_VERSION = attrgetter("_version")


class TensorMarks:
    """Record of tensors by name: how often each had been written to, and its memory. Their values are not read.

    PyTorch counts in-place writes, and the hook above those of a fused optimizer; neither counts writes by `.data`.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self._marks = tensors, marks(tensors.values())

    def change(self, now: Mapping[str, Tensor]) -> str | None:
        """Describe the first difference between the tensors `now` and then; None for none."""
        same = [*now] == [*self.tensors] and all(map(is_, now.values(), self.tensors.values()))
        if same and marks(now.values()) == self._marks:
            return None
        for (name, before), (version, address) in zip(self.tensors.items(), self._marks, strict=True):
            if name not in now:
                return f"{name} has been taken out"
            if now[name] is not before:
                return f"{name} has been exchanged"
            new_version, new_address = mark(before)
            if new_version != version:
                return f"{name} has been written to"
            if new_address != address:
                return f"{name} has been moved"
        added = now.keys() - self.tensors.keys()
        return f"{min(added)} has been added" if added else None


def marks(tensors: Collection[Tensor]) -> list[tuple[int | None, int | None]]:
    """Return the `mark` of each tensor."""
    try:  # in a tenth of the time that a loop takes
        return [*zip(map(_VERSION, tensors), map(Tensor.data_ptr, tensors), strict=True)]
    except RuntimeError:  # one has no storage or no version
        return [*map(mark, tensors)]


def mark(tensor: Tensor) -> tuple[int | None, int | None]:
    """Return how often a tensor has been written to, and its memory."""
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a tensor made up of others has no storage
        address = None
    return None if tensor.is_inference() else tensor._version, address


class ModelState:
    """Record of a model's parameters, the buffers of its checkpoint, and which adapters act and how strongly."""

    def __init__(self, model: Model | nn.Module) -> None:
        walk = _as_it_is(model)
        self._weights, self._adapted = TensorMarks(_weights(walk)), walk.adapted
        self._adapters = [tuple(map(copy, one)) for one in _adapters(walk)]

    def change(self, model: Model | nn.Module) -> str | None:
        """Describe the first difference between `model` as it is now and as it was; None for none.

        A walk stands for its model, however that has changed since.
        """
        walk = _as_it_is(model)
        if (adapters := _adapters(walk)) != self._adapters:
            now = {name: one for (name, _), one in zip(walk.adapted, adapters, strict=True)}
            for (name, _), then in zip(self._adapted, self._adapters, strict=True):
                pairs = zip(_described(then), _described(now.get(name, then)), strict=True)
                for key, (before, value) in zip(_DESCRIPTION, pairs, strict=True):
                    if value != before:
                        return f"the adapters of {name} have changed ({key}: {before} then, {value} now)"
        return self._weights.change(_weights(walk))


def _as_it_is(model: Model | nn.Module) -> ModelWalk:
    """Return the walk over a model as it is now, also where a walk was taken before FSDP gathered weights."""
    walk = ModelWalk.of(model)
    return walk if walk.holds() else ModelWalk(walk.model)


def _weights(walk: ModelWalk) -> dict[str, Tensor]:
    """Name the parameters of a model, and the buffers of its checkpoint."""
    if "weights" not in walk.kept:
        walk.kept["weights"] = [
            (f"{prefix}{'.' if prefix else ''}{name}", store, name)
            for prefix, module in walk.modules.items()
            for store in (module._parameters, module._buffers)
            for name, tensor in store.items()
            if tensor is not None and name not in module._non_persistent_buffers_set
        ]
    return {full: store[name] for full, store, name in walk.kept["weights"]}


_READ = "_active_adapter", "_disable_adapters", "merged_adapters", "scaling"
_DESCRIPTION = "active", "disabled", "merged", "scaling"


def _adapters(walk: ModelWalk) -> list[tuple[Any, ...]]:
    """List what decides which adapters act, of each module that has some, as it is."""
    return [tuple(map(vars(module).get, _READ)) for _, module in walk.adapted]


def _described(adapters: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return values that are equal where the same adapters act equally strongly."""
    active, disabled, merged, scaling = adapters
    names = [active] if isinstance(active, str) else [*(active or ())]
    return names, disabled, [*(merged or ())], {**scaling} if isinstance(scaling, dict) else {}
