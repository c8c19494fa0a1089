"""Walk over the modules of a model once, for everything that a call reads of them.

A public call walks once and hands the walk down, so that the next call sees a change of the model. torch's own
`named_modules` takes several times as long.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import Any, TypeAlias

from torch import nn
from transformers import PreTrainedModel


class ModelWalk:
    """Modules of a model by name, in the order of `named_modules`, each once.

    Holds as long as no module is added, taken out or exchanged and no `forward` is overwritten.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.modules: dict[str, nn.Module] = {}
        self.by_class: dict[type[nn.Module], list[nn.Module]] = defaultdict(list)
        self._having: dict[str, list[Any]] = {}
        seen, todo = set[nn.Module](), [("", model)]
        while todo:
            name, module = todo.pop()
            if module in seen:
                continue
            seen.add(module)
            self.modules[name] = module
            self.by_class[type(module)].append(module)
            if children := module._modules:
                prefix = f"{name}." if name else ""
                todo += reversed([(prefix + key, child) for key, child in children.items() if child is not None])

    @classmethod
    def of(cls, model: "Model | nn.Module") -> "ModelWalk":
        """Walk over `model`; return a walk as it is."""
        return model if isinstance(model, ModelWalk) else cls(model)

    @property
    def model(self) -> PreTrainedModel:
        """The model itself."""
        return self._model  # type: ignore[return-value]

    @property
    def configs(self) -> list[Any]:
        """Configurations of the transformers models among the modules, each once."""
        all_of_them = (m.config for kind, ms in self.by_class.items() if issubclass(kind, PreTrainedModel) for m in ms)
        return list({id(config): config for config in all_of_them}.values())

    @cached_property
    def adapted(self) -> list[tuple[str, Any]]:
        """Modules, by name, with adapters of PEFT."""
        return [(name, module) for name, module in self.modules.items() if "_disable_adapters" in module.__dict__]

    @cached_property
    def forwards(self) -> int:
        """Equal as long as the model has the same modules, of the same classes, and runs the same `forward` in each."""
        of_class = {kind: _function(kind.forward) for kind in self.by_class}
        own = ((name, own_forward(module)) for name, module in self.modules.items())
        overwritten = ((name, _function(forward)) for name, forward in own if forward is not None)
        structure = ((name, type(module)) for name, module in self.modules.items())
        return hash((*structure, *of_class.values(), *overwritten))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter, those that modules share as often as they do."""
        return (p for module in self.modules.values() for p in module._parameters.values() if p is not None)

    def having(self, name: str) -> list[Any]:
        """Modules that had an attribute `name`, of their own or of their class, at the first request."""
        if name not in self._having:
            self._having[name] = [
                module
                for kind, each in self.by_class.items()
                for module in (each if hasattr(kind, name) else [m for m in each if name in m.__dict__])
            ]
        return self._having[name]


Model: TypeAlias = PreTrainedModel | ModelWalk
"""A transformers model, which is walked over, or the walk of a caller that has taken one."""


def own_forward(module: nn.Module) -> Any:
    """Return the `forward` that a module itself was given, without accelerate's wrapper; None if it has none."""
    own = vars(module)
    forward = own.get("_original_forward", own.get("forward"))
    return None if getattr(forward, "__func__", None) is type(module).forward else forward


def _function(called: Any) -> int:
    return id(getattr(called, "__func__", called))
