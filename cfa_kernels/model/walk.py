"""Record a model's modules, for all that calls read of them, until one cheap test says that they have changed."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, compress, repeat
from operator import contains, is_, itemgetter, ne
from types import NoneType
from typing import Any, TypeAlias
from weakref import ref

from torch import nn
from transformers import PreTrainedModel

_HOOKS = itemgetter("_forward_hooks", "_forward_pre_hooks")
_OURS = __package__.partition(".")[0] + "."
_NO_CHANGE = "make_inputs_require_grad"  # transformers and PEFT add hooks of this name time and again
_WALK = "_cfa_walk"
_FORMS = 4  # of a model, whose verdicts are kept


class ModelWalk:
    """Modules of a model by name, in the order of `named_modules`, each once, and what is derived from them.

    A record stands while its model has the very modules, classes, `forward`s, hooks on forwards and tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: PreTrainedModel = model  # type: ignore[assignment]
        self.modules: dict[str, nn.Module] = {}
        self.by_class: dict[type[nn.Module], list[nn.Module]] = defaultdict(list)
        self.kept: dict[str, Any] = {}  # what callers derive from the modules
        self._having: dict[str, list[Any]] = {}
        shared, names, todo = list[tuple[str, str]](), dict[nn.Module, str](), [("", model)]
        while todo:
            name, module = todo.pop()
            if module in names:
                shared.append((name, names[module]))
                continue
            self.modules[name], names[module] = module, name
            self.by_class[type(module)].append(module)
            if children := module._modules:
                prefix = f"{name}." if name else ""
                todo += reversed([(prefix + key, child) for key, child in children.items() if child is not None])

        each = [*self.modules.values()]
        self.owned = [*map(vars, each)]  # attributes of each module
        self._classes = [*map(type, each)]
        self._parents = [m._modules for m in each if m._modules]
        self._children = [*map(dict, self._parents)]
        stores = [store for m in each for store in (m._parameters, m._buffers)]
        self._empty = [store for store in (*stores, *(m._modules for m in each)) if not store]
        self._stores: list[dict[str, Any]] = [store for store in stores if store]  # type: ignore[misc]
        self._names = [*map(tuple, self._stores)]
        # Not the tensors themselves: one that its model has given up, for a piece of it say, is freed.
        self._tensors = [ref(one) for one in self._tensors_now()]
        self._hooks: list[dict[int, Any]] = [store for own in self.owned for store in _HOOKS(own)]
        self._watched, self._forwards = self._watched_now(), self._forwards_now()
        some = [(n, m) for n, m in self.modules.items() if "forward" in vars(m) or "_original_forward" in vars(m)]
        own = [(name, forward) for name, m in some if (forward := own_forward(m)) is not None]
        self._computes = [*self.modules], shared, self._classes, self._forwards[0], own, self._watched
        self.checked: dict[Any, Any] = {}  # verdicts on the model while it computes so
        self._forms = [(self._computes, self.checked)]

    @classmethod
    def of(cls, model: "Model | nn.Module") -> "ModelWalk":
        """Return the record of `model` as it is now; a record as it is."""
        if isinstance(model, ModelWalk):
            return model
        before: ModelWalk | None = vars(model).get(_WALK)
        if before is not None and before.holds():
            return before
        walk = vars(model)[_WALK] = cls(model)
        if before is not None:  # hooks and forwards come and go, and verdicts come back with them
            walk.checked = next((known for form, known in before._forms if form == walk._computes), walk.checked)
            others = [one for one in before._forms if one[1] is not walk.checked]
            walk._forms = [(walk._computes, walk.checked), *others][:_FORMS]
        return walk

    def __reduce__(self) -> tuple[Any, ...]:
        return NoneType, ()  # a copy of a model, or one that is read from a file, walks by itself

    def holds(self) -> bool:
        """Whether the model is still as it was recorded."""  # by C code: loops take four times as long
        if any(self._empty) or [*map(type, self.modules.values())] != self._classes:
            return False
        if any(map(ne, self._parents, self._children)) or [*map(tuple, self._stores)] != self._names:
            return False
        if self._forwards_now() != self._forwards or self._watched_now() != self._watched:
            return False
        now = self._tensors_now()
        return len(now) == len(self._tensors) and all(map(is_, now, map(ref.__call__, self._tensors)))

    def _tensors_now(self) -> list[Any]:
        return [one for one in chain.from_iterable(map(dict.values, self._stores)) if one is not None]  # type: ignore[arg-type]

    def _forwards_now(self) -> tuple[list[Any], list[Any]]:
        return [kind.forward for kind in self.by_class], [*map(dict.get, self.owned, repeat("forward"))]  # type: ignore[arg-type]

    def _watched_now(self) -> list[tuple[int, Any]]:
        """List the hooks of others with their places."""
        there = compress(range(len(self._hooks)), self._hooks)
        return [(i, hook) for i in there for hook in self._hooks[i].values() if _is_foreign(hook)]

    @property
    def configs(self) -> list[Any]:
        """Configurations of the transformers models among the modules, each once."""
        all_of_them = (m.config for kind, ms in self.by_class.items() if issubclass(kind, PreTrainedModel) for m in ms)
        return list({id(config): config for config in all_of_them}.values())

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


Model: TypeAlias = PreTrainedModel | ModelWalk
"""A transformers model, whose record is looked up, or the record that a caller has looked up."""


def own_forward(module: nn.Module) -> Any:
    """Return the `forward` that a module itself was given, without accelerate's wrapper; None if it has none."""
    own = vars(module)
    forward = own.get("_original_forward", own.get("forward"))
    return None if getattr(forward, "__func__", None) is type(module).forward else forward


def is_hooked(module: nn.Module) -> bool:
    """Whether others have put a hook on a module's forward."""
    return any(map(_is_foreign, (*module._forward_pre_hooks.values(), *module._forward_hooks.values())))


def _is_foreign(hook: Any) -> bool:
    return _NO_CHANGE not in getattr(hook, "__qualname__", "") and not getattr(hook, "__module__", "").startswith(_OURS)
