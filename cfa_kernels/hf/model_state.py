"""Record a model's weights and adapters at a forward, so that code which continues that forward detects a change."""

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .model_walk import Model, ModelWalk

Mark: TypeAlias = tuple[int | None, int | None]
"""How often a tensor had been written to, and its memory: plain numbers, which Python's collector need not follow."""


def _count_fused_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Count the writes of a fused optimizer step, which PyTorch's fused kernels leave out (seen in 2.13)."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            for parameter in group["params"]:
                if parameter.grad is not None and not parameter.is_inference():
                    torch.autograd.graph.increment_version(parameter)


register_optimizer_step_post_hook(_count_fused_step)


class Weight(NamedTuple):
    """Record of a tensor: which one, and its `Mark`. Its values are not read.

    PyTorch counts what is written in place, and we what a fused optimizer writes; neither what is written through
    `.data`.
    """

    tensor: Tensor
    mark: Mark

    @classmethod
    def of(cls, tensor: Tensor) -> "Weight":
        """Record `tensor` as it is now."""
        return cls(tensor, _mark(tensor))

    def change(self, now: Tensor) -> str | None:
        """Describe what happened to the tensor, which is `now`; None for nothing."""
        if now is not self.tensor:
            return "has been exchanged"
        version, address = _mark(now)
        if version != self.mark[0]:
            return "has been written to"
        return None if address == self.mark[1] else "has been moved"


def _mark(tensor: Tensor) -> Mark:
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a tensor made up of others has no storage of its own
        address = None
    return None if tensor.is_inference() else tensor._version, address


class ModelState:
    """Record of what decides a model's values: its weights, and which of its adapters act and how strongly.

    Weights are parameters and those buffers that a checkpoint holds. Gradients, modes and `requires_grad` are not
    included. Does not wait for a device.
    """

    def __init__(self, model: Model | nn.Module) -> None:
        self._tensors, self._adapters = _read(model)
        self._marks = [_mark(tensor) for tensor in self._tensors.values()]

    def change(self, model: Model | nn.Module) -> str | None:
        """Describe the first difference between `model` as it is now and as it was; None for none."""
        tensors, adapters = _read(model)
        for name, acted in self._adapters.items():
            for key, value in adapters.get(name, acted).items():
                if value != acted[key]:
                    return f"the adapters of {name} have changed ({key}: {acted[key]} then, {value} now)"
        for (place, before), mark in zip(self._tensors.items(), self._marks, strict=True):
            if (now := tensors.get(place)) is before and _mark(now) == mark:
                continue
            return f"{_name(*place)} {'has been taken out' if now is None else Weight(before, mark).change(now)}"
        weights = {_name(*place) for place in tensors.keys() - self._tensors.keys()}
        added = weights | (adapters.keys() - self._adapters.keys())
        return f"{min(added)} has been added" if added else None


def _name(module: str, weight: str) -> str:
    return f"{module}.{weight}".lstrip(".")


def _read(model: Model | nn.Module) -> tuple[dict[tuple[str, str], Tensor], dict[str, dict[str, Any]]]:
    """Collect weights by module and name, and for each PEFT layer whether it acts, which adapters, and how strongly."""
    tensors, adapters = dict[tuple[str, str], Tensor](), dict[str, dict[str, Any]]()
    for prefix, module in ModelWalk.of(model).modules.items():
        own = module.__dict__
        if parameters := own["_parameters"]:  # two modules in three have neither
            for name, tensor in parameters.items():
                if tensor is not None:
                    tensors[prefix, name] = tensor
        if buffers := own["_buffers"]:
            for name, tensor in buffers.items():
                if tensor is not None and name not in own["_non_persistent_buffers_set"]:
                    tensors[prefix, name] = tensor
        if "_disable_adapters" in own:
            active, scaling = own.get("_active_adapter"), own.get("scaling")
            adapters[prefix] = {
                "disabled": own["_disable_adapters"],
                "active": [active] if isinstance(active, str) else list(active or ()),
                "merged": list(own.get("merged_adapters") or ()),
                "scaling": dict(scaling) if isinstance(scaling, dict) else {},
            }
    return tensors, adapters
