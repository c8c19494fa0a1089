"""Run LoRA layers as one op, those that read one input together, which saves passes over rows and launches.

Layers that are not plain LoRA, as PEFT itself defines it, run PEFT's own code.
"""

import sys
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from copy import copy
from itertools import repeat
from operator import attrgetter, contains, is_, itemgetter
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..ops.adapted_linear import AdaptedLayer, AdapterParts, adapted_linear, split_adapters
from .modes import exchanged
from .sharded.fsdp import is_piece
from .state import mark, marks
from .walk import Model, ModelWalk

FEW_ROWS = 2048
"""Rows in halves on a GPU below which PEFT's layers run, where the host is the limit: of it they take less.

Measured on an H100, forward and backward of Qwen3-1.7B by one op and by PEFT, ms: 197 and 193 of 1,870 rows, 208 and
215 of 3,740, 253 and 392 of 7,480, 476 and 752 of 14,960.
"""
_FULL = (torch.float32, torch.float64)
_ONE_INPUT = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
"""Names of layers of one parent that are called with one and the same tensor, and a name for them together."""
_ADAPTERS = itemgetter("_active_adapter", "_disable_adapters", "merged_adapters", "lora_variant", "scaling")
_HOOKS = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Layer(NamedTuple):
    base: nn.Linear
    down: nn.Linear
    up: nn.Linear
    dropout: Any
    scale: float

    def weights(self) -> AdaptedLayer:
        return AdaptedLayer(self.base.weight, self.base.bias, self.down.weight, self.up.weight)


class _Parts(NamedTuple):
    marks: list[Any]
    weights: list[AdaptedLayer]  # so that nothing else gets an id of theirs
    parts: AdapterParts


_KEPT: WeakKeyDictionary[nn.Module, _Parts] = WeakKeyDictionary()
"""Parts of adapters, by the first layer of those that run together, as long as no weight has been written to."""

# Some optimizers write without a trace: those of wrappers that hold the weights in pieces.
register_optimizer_step_post_hook(lambda *_: _KEPT.clear())


def one_pass_adapters(model: Model | nn.Module, rows: int, *, compiled: bool = False) -> AbstractContextManager[None]:
    """Run the LoRA layers of `model` as ops inside; their own `forward` is restored, also after an error.

    Those in halves on a GPU keep it for forwards of fewer than `FEW_ROWS` rows, unless their layers are `compiled`.
    On a GPU bfloat16 rows meet float32 adapters in bfloat16 parts, 8 bytes a weight, which are kept until a weight is
    written to. Weights must not change inside.
    """
    walk = ModelWalk.of(model)
    layers = _lora_layers(walk)
    few = rows < FEW_ROWS and not compiled
    if layers and few and is_on_gpu(weight := layers[0].base_layer.weight) and weight.dtype not in _FULL:
        layers = []
    if not layers:  # groups of another forward stay
        return exchanged(())
    grouped = _grouped(walk, layers)
    for group in grouped.groups:
        group.forget()
    grouped.take_parts()
    return exchanged(grouped.attributes)


def _run_member(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    group, place = layer.cfa_member
    return group.run(layer, place, x, *args, **kwargs)  # type: ignore[no-any-return]


def _grouped(walk: ModelWalk, layers: list[Any]) -> "_Grouped":
    """Return `layers` by what they read; those of an earlier forward unless an adapter has changed since."""
    kept: _Grouped | None = walk.kept.get("groups")
    if kept is not None and kept.holds(layers):
        return kept
    plain = {layer: modules for layer in layers if (modules := _plain(layer))}
    groups = dict[Any, _Group]()
    for name, layer in walk.modules.items() if plain else ():
        if layer in plain:
            (parent, _, own), modules = name.rpartition("."), plain[layer]
            down = modules.down.weight
            kind = parent, _ONE_INPUT.get(own, own), modules.scale, down.shape, down.dtype, modules.base.weight.dtype
            groups.setdefault(kind, _Group(modules.scale)).add(layer, modules)
    result = _Grouped([*groups.values()], layers, plain.values())
    if len(plain) == len(layers):
        walk.kept["groups"] = result
    return result


class _Grouped:
    """Groups of LoRA layers, and what decides about them besides the modules: that is read by loops of C."""

    def __init__(self, groups: list["_Group"], layers: list[Any], plain: Collection[_Layer]) -> None:
        self.groups, self._layers = groups, layers
        # One function for all, and numbers instead of modules: so a graph of one decoder layer fits the next.
        self.attributes = [
            (layer, {"forward": MethodType(_run_member, layer), "cfa_member": (group, place)})
            for group in groups
            for place, layer in enumerate(group.layers)
        ]
        self._adapters = [tuple(map(copy, _ADAPTERS(vars(layer)))) for layer in layers]
        members = [vars(module) for modules in plain for module in modules[:4]]
        self._hooks = [hooks for own in members for hooks in _HOOKS(own)]
        self._members = members
        stores = [module._parameters for modules in plain for module in (modules.base, modules.down)]
        self._stores = [store for store in stores if "weight" in store]  # FSDP1's weights are no parameters
        self._forms = self._forms_now()
        stores = [module._parameters for group in groups for modules in group.members for module in modules[1:3]]
        self._adapter_stores = stores if all("weight" in store for store in stores) else []
        self._taken: tuple[list[Tensor], list[Any], list[_Parts | None]] = [], [], []  # adapters, marks, parts

    def holds(self, layers: list[Any]) -> bool:
        """Whether the same layers have the same adapters, and nobody watches a module of theirs."""
        if layers != self._layers or [*map(_ADAPTERS, map(vars, layers))] != self._adapters or any(self._hooks):
            return False
        return not any(map(contains, self._members, repeat("forward"))) and self._forms_now() == self._forms

    def take_parts(self) -> None:
        """Give groups the parts of their adapters, which are looked for one by one only if a weight has changed."""
        adapters = [*map(itemgetter("weight"), self._adapter_stores)]
        before, marked, parts = self._taken
        kept = parts and _KEPT.get(self.groups[0].layers[0]) is parts[0] and len(adapters) == len(before)
        if kept and all(map(is_, adapters, before)) and marks(adapters) == marked:
            for group, own in zip(self.groups, parts, strict=True):
                group.parts = None if own is None else own.parts
            return
        self._taken = before, marked, parts = [], [], []  # frees those of before
        _take_parts(self.groups)
        taken = [None if group.parts is None else _KEPT.get(group.layers[0]) for group in self.groups]
        self._taken = adapters, marks(adapters), taken if adapters and taken[0] is not None else []

    def _forms_now(self) -> list[Any]:
        return [*map(attrgetter("dtype", "shape"), map(itemgetter("weight"), self._stores))]


def _lora_layers(walk: ModelWalk) -> list[Any]:
    peft = sys.modules.get("peft.tuners.lora.layer")  # not imported: the model has no such layers
    layers = [] if peft is None else walk.by_class.get(peft.Linear, [])
    plain = (one for one in layers if "forward" not in vars(one) and not one.merged_adapters)
    return [one for one in plain if type(one._modules["base_layer"]) is nn.Linear]


def _take_parts(groups: Iterable["_Group"]) -> None:
    """Give groups whose weights are here the parts of their adapters, split again where a weight has changed."""
    changed = defaultdict[torch.dtype, list[tuple[_Group, list[Any], list[AdaptedLayer]]]](list)
    for group in groups:
        first = group.members[0].weights()
        if first.down.dtype == first.weight.dtype or not is_on_gpu(first.down):
            continue
        weights = [modules.weights() for modules in group.members]
        if any(is_piece(one.down) or one.down.dim() != 2 for one in weights):
            continue
        marks: list[Any] = [group.scale, first.weight.dtype]
        for one in weights:
            marks += [id(one.down), mark(one.down), id(one.up), mark(one.up)]
        kept = _KEPT.get(group.layers[0])
        if kept is not None and kept.marks == marks:
            group.parts = kept.parts
        else:
            changed[first.weight.dtype].append((group, marks, weights))
    for dtype, some in changed.items():
        parts = split_adapters([(weights, group.scale) for group, _, weights in some], dtype)
        for (group, marks, weights), group.parts in zip(some, parts, strict=True):
            _KEPT[group.layers[0]] = _Parts(marks, weights, group.parts)


class _Group:
    """LoRA layers of one op: the first that is called runs all, whose results await the other calls."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.layers: list[nn.Module] = []
        self.members: list[_Layer] = []
        self.parts: AdapterParts | None = None
        self._ahead: list[tuple[Tensor, Tensor] | None] = []  # rows and result of members that have run

    def add(self, layer: nn.Module, modules: _Layer) -> None:
        """Add a layer."""
        self.layers.append(layer)
        self.members.append(modules)
        self._ahead.append(None)

    def forget(self) -> None:
        """Drop what an earlier forward has left."""
        self._ahead, self.parts = [None] * len(self.members), None

    def run(self, layer: Any, place: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the layer at `place`, or return its result if an earlier call has run it on the same rows."""
        waiting, self._ahead[place] = self._ahead[place], None
        if waiting is not None and waiting[0] is x and not args and not kwargs:
            return waiting[1]
        places = range(len(self.members)) if waiting is None else [place]
        members = [self.members[i] for i in places]
        weights = [modules.weights() for modules in members]
        casts = torch.is_autocast_enabled(x.device.type)
        draws = any(modules.dropout.training and getattr(modules.dropout, "p", 0) for modules in members)
        if args or kwargs or draws or not _dtypes_fit(x, weights[0], casts):
            return type(layer).forward(layer, x, *args, **kwargs)
        wider = waiting is None and weights[0].down.dtype != x.dtype  # not while weights are float32 for a check
        if wider and self.parts is None:
            (self.parts,) = split_adapters([(weights, self.scale)], x.dtype)
        if casts:  # it has nothing to cast here and would cast float32 sums
            torch.set_autocast_enabled(x.device.type, False)
        try:
            flat, parts = x.reshape(-1, x.shape[-1]), self.parts if wider else None
            outs = adapted_linear(flat, weights, self.scale, parts)
        finally:
            if casts:
                torch.set_autocast_enabled(x.device.type, True)
        for i, out in zip(places, outs, strict=True):
            self._ahead[i] = x, out.view(*x.shape[:-1], out.shape[-1])  # also of no rows
        own, self._ahead[place] = self._ahead[place], None
        return own[1]  # type: ignore[index]


def _plain(layer: Any) -> _Layer | None:
    """Return a layer's modules if it runs as one op."""
    # Called for every layer of every forward: torch takes longer to find a module as an attribute.
    modules = layer._modules
    base, downs, ups, dropouts = (modules[name] for name in ("base_layer", "lora_A", "lora_B", "lora_dropout"))
    names = [name for name in layer.active_adapters if name in downs._modules]
    if layer.disable_adapters or layer.merged or len(names) != 1 or names[0] in layer.lora_variant:
        return None
    (name,) = names
    down, up, dropout = downs._modules[name], ups._modules[name], dropouts._modules[name]
    if not type(base) is type(down) is type(up) is nn.Linear or any(map(_is_watched, (base, down, up, dropout))):
        return None
    if down.bias is not None or up.bias is not None or down.weight.dtype != up.weight.dtype:
        return None
    return _Layer(base, down, up, dropout, layer.scaling[name])


def _dtypes_fit(x: Tensor, weights: AdaptedLayer, casts: bool) -> bool:
    """Whether rows like `x` and weights of these dtypes run as one op; `casts` under autocast."""
    on_gpu = is_on_gpu(x)
    if casts and not (on_gpu and x.dtype == torch.get_autocast_dtype(x.device.type)):
        return False
    if not on_gpu and (x.device.type != "cpu" or x.dtype not in _FULL):  # halves would round once, by PEFT three times
        return False
    wider = torch.float32 if x.dtype == torch.bfloat16 and on_gpu else x.dtype
    return weights.weight.dtype == x.dtype and weights.down.dtype in (x.dtype, wider)


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is on a GPU."""
    return tensor.device.type == "cuda"


def _is_watched(module: nn.Module) -> bool:
    """Whether other code expects the module itself to be called."""
    return any(_HOOKS(vars(module))) or "forward" in vars(module)
