"""Mark a model's weights and adapters at a forward, so that code which continues that forward detects a change."""

from collections.abc import Collection
from copy import copy
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .walk import Model, ModelWalk

_steps = 0


def steps_taken() -> int:
    """Count the steps of all optimizers: those of wrappers that hold the weights in pieces write without a trace."""
    return _steps


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Count a step, and the writes of a fused one, which PyTorch's fused kernels leave out."""
    global _steps
    _steps += 1
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            if parameter.grad is not None and not parameter.is_inference():
                torch.autograd.graph.increment_version(parameter)


register_optimizer_step_post_hook(_after_step)

_VERSION = attrgetter("_version")
_ADAPTERS = "_active_adapter", "_disable_adapters", "merged_adapters", "lora_variant", "scaling"


def _marks(tensors: Collection[Tensor]) -> list[tuple[int | None, int | None]]:
    try:  # in a tenth of the time that a loop takes
        return [*zip(map(_VERSION, tensors), map(Tensor.data_ptr, tensors), strict=True)]
    except RuntimeError:  # one, made up of others or in inference mode, has no storage or no version
        return [(None if tensor.is_inference() else tensor._version, None) for tensor in tensors]


class TensorMarks:
    """Record of tensors: how often each had been written to, not by `.data`, and its memory."""

    def __init__(self, tensors: Collection[Tensor]) -> None:
        self._tensors, self._marks = tensors, _marks(tensors)

    def hold(self, now: Collection[Tensor]) -> bool:
        """Whether `now` are the very same tensors, not written to and not moved."""
        same = len(now) == len(self._tensors) and all(map(is_, now, self._tensors))
        return same and _marks(now) == self._marks


class ModelState:
    """Record of a model's parameters, the buffers of its checkpoint, and which adapters act and how strongly."""

    def __init__(self, model: Model | nn.Module) -> None:
        walk = ModelWalk.of(model)
        self._weights, self._adapters = TensorMarks(_weights(walk)), [*map(copy, adapters(walk))]

    def holds(self, model: nn.Module) -> bool:
        """Whether `model` has the same weights and adapters now."""
        walk = ModelWalk.of(model)
        return adapters(walk) == self._adapters and self._weights.hold(_weights(walk))


def adapters(walk: ModelWalk) -> list[Any]:
    """List what decides which adapters act, and how strongly: of each module with adapters of PEFT, as it is."""
    if "adapters" not in walk.kept:
        owned = [vars(module) for module in walk.owning("_disable_adapters")]
        walk.kept["adapters"] = [own for own in owned for _ in _ADAPTERS], [*_ADAPTERS] * len(owned)
    return [*map(dict.get, *walk.kept["adapters"])]


def _weights(walk: ModelWalk) -> list[Tensor]:
    if "weights" not in walk.kept:
        walk.kept["weights"] = [
            (store, name)
            for module in walk.modules.values()
            for store in (module._parameters, module._buffers)
            for name, tensor in store.items()
            if tensor is not None and name not in module._non_persistent_buffers_set
        ]
    return [store[name] for store, name in walk.kept["weights"]]
