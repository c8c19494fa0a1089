"""Record a model's weights and adapters at a forward, so that code which continues that forward detects a change."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .model_walk import Model, ModelWalk


@dataclass(frozen=True, eq=False)
class Weight:
    """Record of a tensor: which one, how often it had been written to, and its memory. Its values are not read.

    PyTorch counts what is written in place, but not what is written through `.data`.
    """

    tensor: Tensor
    version: int | None
    address: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> "Weight":
        """Record `tensor` as it is now."""
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # a tensor made up of others has no storage of its own
            address = None
        return cls(tensor, None if tensor.is_inference() else tensor._version, address)

    def change(self, now: Tensor) -> str | None:
        """Describe what happened to the tensor, which is `now`; None for nothing."""
        if now is not self.tensor:
            return "has been exchanged"
        current = Weight.of(now)
        if current.version != self.version:
            return "has been written to"
        return None if current.address == self.address else "has been moved"


class ModelState:
    """Record of what decides a model's values: its weights, and which of its adapters act and how strongly.

    Weights are parameters and those buffers that a checkpoint holds. Gradients, modes and `requires_grad` are not
    included. Does not wait for a device.
    """

    def __init__(self, model: Model | nn.Module) -> None:
        tensors, self._adapters = _read(model)
        self._weights = {name: Weight.of(tensor) for name, tensor in tensors.items()}

    def change(self, model: Model | nn.Module) -> str | None:
        """Describe the first difference between `model` as it is now and as it was; None for none."""
        tensors, adapters = _read(model)
        for name, before in self._adapters.items():
            for key, value in adapters.get(name, before).items():
                if value != before[key]:
                    return f"the adapters of {name} have changed ({key}: {before[key]} then, {value} now)"
        for name, weight in self._weights.items():
            what = weight.change(tensors[name]) if name in tensors else "has been taken out"
            if what is not None:
                return f"{name} {what}"
        added = (tensors.keys() - self._weights.keys()) | (adapters.keys() - self._adapters.keys())
        return f"{min(added)} has been added" if added else None


def _read(model: Model | nn.Module) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Collect weights by name, and for each PEFT layer whether it acts, which adapters, and how strongly."""
    tensors, adapters = dict[str, Tensor](), dict[str, dict[str, Any]]()
    for prefix, module in ModelWalk.of(model).modules.items():
        own = vars(module)
        for name, tensor in own["_parameters"].items():
            if tensor is not None:
                tensors[f"{prefix}.{name}".lstrip(".")] = tensor
        for name, tensor in own["_buffers"].items():
            if tensor is not None and name not in own["_non_persistent_buffers_set"]:
                tensors[f"{prefix}.{name}".lstrip(".")] = tensor
        if "_disable_adapters" in own:
            active, scaling = own.get("_active_adapter"), own.get("scaling")
            adapters[prefix] = {
                "disabled": own["_disable_adapters"],
                "active": [active] if isinstance(active, str) else list(active or ()),
                "merged": list(own.get("merged_adapters") or ()),
                "scaling": dict(scaling) if isinstance(scaling, dict) else {},
            }
    return tensors, adapters
