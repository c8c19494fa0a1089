"""Run LoRA layers as one op, those that read one input together, which saves passes over rows and launches.

Layers that are not plain LoRA, as PEFT itself defines it, run PEFT's own code.
"""

import logging
import sys
from contextlib import AbstractContextManager
from copy import copy
from operator import attrgetter, itemgetter
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.adapted_linear import AdaptedLayer, AdapterParts, adapted_linear, split_adapters
from ..ops.matmul import multiplies_halves
from .memory import free_memory
from .modes import exchanged
from .sharded.fsdp import is_piece
from .state import TensorMarks, adapters, steps_taken
from .walk import ModelWalk

_LOG = logging.getLogger(__name__)
_FULL = (torch.float32, torch.float64)
ONE_INPUT = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
"""Names of layers of one parent that are called with one and the same tensor, and a name for them together."""
_COPIED = 8  # of the free memory a part that copies of weights may take
_HOOKS = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FORM, _WEIGHT = attrgetter("dtype", "device"), itemgetter("weight")


class _Layer(NamedTuple):
    base: nn.Linear
    down: nn.Linear
    up: nn.Linear
    dropout: Any
    scale: float

    def weights(self) -> AdaptedLayer:
        return AdaptedLayer(self.base.weight, self.base.bias, self.down.weight, self.up.weight)


def one_pass_adapters(
    walk: ModelWalk, *, compiled: bool = False, inside: nn.Module | None = None
) -> AbstractContextManager[None]:
    """Run the LoRA layers of a model, or of a module `inside` it, as ops; their own `forward` comes back afterwards.

    Where bfloat16 is multiplied, bfloat16 rows meet float32 adapters in bfloat16 parts, 8 bytes a weight. Where layers
    are `compiled` on a GPU, parts are further columns of copies of the layers' frozen weights, if an eighth of the free
    memory holds these. Weights must not change inside.
    """
    layers = _lora_layers(walk)
    if not layers:  # groups of another forward stay
        return exchanged(())
    groups: _Groups | None = walk.kept.get("groups")
    if groups is None or not groups.hold(walk):
        groups = walk.kept["groups"] = _Groups(walk, layers)
    part = None if inside is None else {*inside.modules()}
    own = [group for group in groups.all if part is None or group.layers[0] in part]
    for group in own:
        group._ahead = [None] * len(group.members)
    groups.give_parts(walk, compiled, again=inside is not None)
    return exchanged(attribute for group in own for attribute in group.attributes)


def _lora_layers(walk: ModelWalk) -> list[Any]:
    peft = sys.modules.get("peft.tuners.lora.layer")  # not imported: the model has no such layers
    layers = [] if peft is None else walk.by_class.get(peft.Linear, [])
    plain = (one for one in layers if "forward" not in vars(one) and not one.merged_adapters)
    return [one for one in plain if type(one._modules["base_layer"]) is nn.Linear]


class _Groups:
    """LoRA layers of a model by what they read, as long as the same adapters act, in the same dtypes."""

    def __init__(self, walk: ModelWalk, layers: list[Any]) -> None:
        plain = {layer: modules for layer in layers if (modules := _plain(layer))}
        groups = dict[Any, _Group]()
        for name, layer in walk.modules.items() if plain else ():
            if layer in plain:
                (parent, _, own), modules = name.rpartition("."), plain[layer]
                kind = (
                    parent, ONE_INPUT.get(own, own), modules.scale, modules.down.weight.shape,
                    modules.down.weight.dtype, modules.base.weight.dtype,
                )  # fmt: skip
                groups.setdefault(kind, _Group(own, modules.scale)).add(layer, modules)
        self.all = [*groups.values()]
        self._adapters = [*map(copy, adapters(walk))]
        members = [m for layer in layers for m in (layer.base_layer, *layer.lora_A.values(), *layer.lora_B.values())]
        self._weights = [store for module in members if "weight" in (store := module._parameters)]  # FSDP1 has none
        self._forms = self._forms_now()
        self._hooks = [store for modules in plain.values() for m in modules[:4] for store in _HOOKS(vars(m))]
        firsts = [(group, group.members[0].weights()) for group in self.all]
        wide = torch.float32, torch.bfloat16
        self._wide = [g for g, one in firsts if (one.down.dtype, one.weight.dtype) == wide and _halves_fit(one.weight)]
        self._others = {*self.all}.difference(self._wide)  # make their parts, if any, while they run
        self._copied = [g for g in self._wide if _has_columns(g)]  # compiled, if there is memory
        self._copies = dict[Any, Tensor]()
        self._split: tuple[Any, TensorMarks] | None = None  # after so many steps, of which tensors

    def hold(self, walk: ModelWalk) -> bool:
        """Whether they are those of today."""
        return adapters(walk) == self._adapters and self._forms_now() == self._forms and not any(self._hooks)

    def give_parts(self, walk: ModelWalk, compiled: bool, *, again: bool) -> None:
        """Give groups of float32 adapters on halves their parts, split anew where a weight has changed."""
        for group in self._others:
            group.parts = None
        if not self._wide or (self._split is not None and again):  # in a backward none has
            return
        each, now = [*map(_WEIGHT, self._weights)], (steps_taken(), compiled)
        if self._split is not None and self._split[0] == now and self._split[1].hold(each):
            return
        self._split = None
        for group in self._wide:
            group.parts = None  # frees the parts of before
        if any(is_piece(one) or one.dim() != 2 for one in each):
            return
        copied = self._copied if compiled and _fit(walk, self._copied) else []
        # Weights are copied again, too, which takes little of a step: PEFT merges adapters, and takes them out up to
        # rounding, by writes to `.data`, which leave no mark.
        self._copies = self._copies if copied else {}
        for groups, copies in ((copied, self._copies), ({*self._wide}.difference(copied), None)):
            scaled = [([modules.weights() for modules in group.members], group.scale) for group in groups]
            for group, parts in zip(groups, split_adapters(scaled, torch.bfloat16, copies), strict=True):
                group.parts = parts
        self._split = now, TensorMarks(each)

    def _forms_now(self) -> list[Any]:
        return [*map(_FORM, map(_WEIGHT, self._weights))]


def run_member(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run a layer as a member of its group, in place of its `forward`."""
    group, place = layer.cfa_member
    return group.run(layer, place, x, *args, **kwargs)  # type: ignore[no-any-return]


class _Group:
    """LoRA layers of one op: the first that is called runs all, whose results await the other calls."""

    def __init__(self, name: str, scale: float) -> None:
        self.name, self.scale = name, scale
        self.layers: list[nn.Module] = []
        self.members: list[_Layer] = []
        self.attributes: list[tuple[nn.Module, dict[str, Any]]] = []  # with which the layers run so
        self.parts: AdapterParts | None = None
        self._ahead: list[tuple[Tensor, Tensor] | None] = []  # rows and result of members that have run

    def add(self, layer: nn.Module, modules: _Layer) -> None:
        # One function for all, and numbers instead of modules: so a graph of one decoder layer fits the next.
        member = {"forward": MethodType(run_member, layer), "cfa_member": (self, len(self.layers))}
        self.attributes.append((layer, member))
        self.layers.append(layer)
        self.members.append(modules)
        self._ahead.append(None)

    def run(self, layer: Any, place: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
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
            outs = adapted_linear(x.reshape(-1, x.shape[-1]), weights, self.scale, self.parts if wider else None)
        finally:
            if casts:
                torch.set_autocast_enabled(x.device.type, True)
        for i, out in zip(places, outs, strict=True):
            self._ahead[i] = x, out.view(*x.shape[:-1], out.shape[-1])  # also of no rows
        own, self._ahead[place] = self._ahead[place], None
        return own[1]  # type: ignore[index]


def _plain(layer: Any) -> _Layer | None:
    """Return a layer's modules if it runs as one op."""
    base, names = layer.base_layer, [name for name in layer.active_adapters if name in layer.lora_A._modules]
    if layer.disable_adapters or layer.merged or len(names) != 1 or names[0] in layer.lora_variant:
        return None
    down, up, dropout = (each._modules[names[0]] for each in (layer.lora_A, layer.lora_B, layer.lora_dropout))
    if not type(base) is type(down) is type(up) is nn.Linear or any(map(is_watched, (base, down, up, dropout))):
        return None
    if down.bias is not None or up.bias is not None or down.weight.dtype != up.weight.dtype:
        return None
    return _Layer(base, down, up, dropout, layer.scaling[names[0]])


def _dtypes_fit(x: Tensor, weights: AdaptedLayer, casts: bool) -> bool:
    dtype, adapter, on_gpu = x.dtype, weights.down.dtype, is_on_gpu(x)
    if weights.weight.dtype != dtype or (casts and not (on_gpu and dtype == torch.get_autocast_dtype(x.device.type))):
        return False
    if dtype == torch.bfloat16 and adapter == torch.float32:
        return _halves_fit(x)
    # Adapters of halves on a CPU would round once, by PEFT three times.
    return adapter == dtype and (on_gpu or (x.device.type == "cpu" and dtype in _FULL))


def _halves_fit(tensor: Tensor) -> bool:
    return is_on_gpu(tensor) or multiplies_halves(tensor)


def _has_columns(group: _Group) -> bool:
    """Whether weights on a GPU could have their adapters' parts as further columns, and a copy for that."""
    # Attention's operator writes what `o_proj` reads: to copy that next to columns takes as long as to add a product.
    weights = [modules.weights() for modules in group.members]
    frozen = is_on_gpu(weights[0].weight) and not any(one.weight.requires_grad for one in weights)
    rank, width = weights[0].down.shape  # kernels want rows to begin at 16 bytes
    return frozen and group.name != "o_proj" and rank % 8 == width % 8 == 0


def _fit(walk: ModelWalk, groups: list[_Group]) -> bool:
    """Whether there is memory for copies of the weights of groups; found and said once for as many bytes."""
    weights = [modules.base.weight for group in groups for modules in group.members]
    needed = sum(weight.nbytes for weight in weights)
    fit: dict[int, bool] = walk.kept.setdefault("copies", {0: False})
    if needed not in fit:
        free = sum(map(free_memory, {weight.device for weight in weights}))
        fit[needed] = _COPIED * needed <= free
        if not fit[needed]:
            _LOG.warning(
                "adapters of %s are multiplied one by one: copies of its weights with adapters as further columns take "
                "%.1f GB, more than an eighth of %.1f GB that are free",
                type(walk.model).__name__, needed / 1e9, free / 1e9,
            )  # fmt: skip
    return fit[needed]


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is on a GPU."""
    return tensor.device.type == "cuda"


def is_watched(module: nn.Module) -> bool:
    """Whether a module has hooks, or a `forward` of its own."""
    return any(_HOOKS(vars(module))) or "forward" in vars(module)
