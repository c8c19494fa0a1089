"""Walk over the modules of a model once, for everything that calls read of them.

A model keeps its walk, which each public call takes up again if the model still has the very modules and tensors: a
second walk takes four times as long as to see that, torch's `named_modules` longer still, and a step needs several.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from itertools import chain, compress, repeat
from operator import contains, is_, ne
from typing import Any, TypeAlias
from weakref import ref

from torch import nn
from transformers import PreTrainedModel


class ModelWalk:
    """Modules of a model by name, in the order of `named_modules`, each once.

    Attributes of modules, their `forward` among them, are read again by each public call.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.modules: dict[str, nn.Module] = {}
        self.by_class: dict[type[nn.Module], list[nn.Module]] = defaultdict(list)
        self._having: dict[str, list[Any]] = {}
        self.kept: dict[str, Any] = {}  # what callers derive from modules and tensors
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

        each = [*self.modules.values()]
        self.owned = [*map(vars, each)]  # attributes of each module
        self._classes = [*map(type, each)]
        self._structure = hash((*self.modules, *self._classes))
        self._parents = [m._modules for m in each if m._modules]
        self._children = [*map(dict, self._parents)]
        stores = [store for m in each for store in (m._parameters, m._buffers)]
        self._empty = [store for store in (*stores, *(m._modules for m in each)) if not store]
        self._stores: list[dict[str, Any]] = [store for store in stores if store]  # type: ignore[misc]
        self._names = [*map(tuple, self._stores)]
        # Not the tensors themselves: one that its model has given up, for a piece of it say, is freed.
        self._tensors = [ref(one) for one in self._tensors_now()]

    @classmethod
    def of(cls, model: "Model | nn.Module") -> "ModelWalk":
        """Return the walk over `model` as it is now; a walk as it is."""
        if isinstance(model, ModelWalk):
            return model
        walk: ModelWalk | None = vars(model).get(_WALK)
        if walk is None or not walk.holds():
            walk = vars(model)[_WALK] = cls(model)
        walk.__dict__.pop("forwards", None)
        walk._having.clear()
        return walk

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_walk, ()  # a copy of a model, or one that is read from a file, walks by itself

    def holds(self) -> bool:
        """Whether the model has the very modules, of the same classes, parameters and buffers that it had."""
        # Loops of the interpreter take four times as long.
        if any(self._empty) or [*map(type, self.modules.values())] != self._classes:
            return False
        if any(map(ne, self._parents, self._children)) or [*map(tuple, self._stores)] != self._names:
            return False
        now = self._tensors_now()
        return len(now) == len(self._tensors) and all(map(is_, now, map(ref.__call__, self._tensors)))

    def _tensors_now(self) -> list[Any]:
        return [one for one in chain.from_iterable(map(dict.values, self._stores)) if one is not None]  # type: ignore[arg-type]

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
    def forwards(self) -> tuple[Any, ...]:
        """Equal as long as the model has the same modules, of the same classes, and runs the same `forward` in each."""
        of_class = (Same(kind.forward) for kind in self.by_class)
        some = [(n, m) for n, m in self.modules.items() if "forward" in m.__dict__ or "_original_forward" in m.__dict__]
        own = ((name, own_forward(module)) for name, module in some)
        overwritten = ((name, Same(forward)) for name, forward in own if forward is not None)
        return self._structure, *of_class, *overwritten

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter, those that modules share as often as they do."""
        return (p for module in self.modules.values() for p in module._parameters.values() if p is not None)

    def having(self, name: str) -> list[Any]:
        """Modules that had an attribute `name`, of their own or of their class, at the first request."""
        if name not in self._having:
            of_class = [m for kind, each in self.by_class.items() if hasattr(kind, name) for m in each]
            self._having[name] = [*dict.fromkeys([*of_class, *self.owning(name)])]
        return self._having[name]

    def owning(self, name: str) -> list[Any]:
        """Modules that have an attribute `name` of their own now."""
        return [*compress(self.modules.values(), map(contains, self.owned, repeat(name)))]


_WALK = "_cfa_walk"


def _no_walk() -> None: ...


Model: TypeAlias = PreTrainedModel | ModelWalk
"""A transformers model, which is walked over, or the walk of a caller that has taken one."""


def own_forward(module: nn.Module) -> Any:
    """Return the `forward` that a module itself was given, without accelerate's wrapper; None if it has none."""
    own = vars(module)
    forward = own.get("_original_forward", own.get("forward"))
    return None if getattr(forward, "__func__", None) is type(module).forward else forward


class Same:
    """Equals that of the same object only, of a method's function: once it is gone, another may have its address."""

    def __init__(self, value: Any) -> None:
        value = getattr(value, "__func__", value)
        try:
            self._value: Any = ref(value)
        except TypeError:
            self._value = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and (value := self._value()) is not None and value is other._value()

    __hash__ = None  # type: ignore[assignment]
