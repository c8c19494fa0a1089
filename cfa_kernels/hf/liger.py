"""Run a model with Liger's fused norms, rotary embeddings and gated MLPs in place of its own, within a `with` block.

The small kernels between a model's matrix products and its attention take half of a forward on a GPU. Liger (Hsu et
al., arXiv:2410.10989) has one kernel for each norm, rotation and gate. To find out what Liger would change in a model,
it is applied once and undone; afterwards those changes are put in and taken out on entry and exit. Weights, hooks and
adapters stay where they are: only a module's `forward` is replaced. `hf/verify.py` checks that the model computes the
same.
"""

import importlib.util
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from .model import causal_lm
from .model_walk import Model, ModelWalk
from .modes import exchanged

# Mixtures of experts are left to the model: they do not act on each token by itself.
_GATES = ("liger_kernel.transformers.swiglu", "liger_kernel.transformers.geglu")
_FILES = ("liger_kernel.transformers.rms_norm", *_GATES)
_EXPERTS = ("Expert", "MoE", "Moe", "SparseTop2")


class _Exchange(NamedTuple):
    """A replacement by Liger: of a function in a transformers file, or of attributes of a module."""

    owner: ModuleType | nn.Module
    fused: dict[str, Any]


class _Found(NamedTuple):
    structure: int  # of the model when Liger was asked
    exchanges: list[_Exchange]


_FOUND: weakref.WeakKeyDictionary[PreTrainedModel, _Found] = weakref.WeakKeyDictionary()
_IN_PLACE: weakref.WeakKeyDictionary[PreTrainedModel, list[_Exchange]] = weakref.WeakKeyDictionary()
_OWN: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


def keep_own_modules(model: nn.Module) -> None:
    """Keep a model's own modules from now on: `fused_modules` changes nothing in it."""
    _OWN.add(causal_lm(model))


def keeps_own_modules(model: PreTrainedModel) -> bool:
    """Whether `keep_own_modules` was called for it."""
    return model in _OWN


@contextmanager
def fused_modules(model: Model) -> Iterator[bool]:
    """Run `model` with Liger's norms, rotary embeddings and gated MLPs inside; its own come back, also after an error.

    Applies to models that Liger knows and that are wholly on a GPU, where Liger is installed; all other models stay
    as they are, and so does every module whose `forward` other code has replaced. Rotary embeddings are a function of
    the model's file, so other models of its kind use the replacement too in the meantime. Yields whether anything is
    exchanged.
    """
    walk = ModelWalk.of(model)
    model = walk.model
    outer, exchanges = _IN_PLACE.get(model), _exchanges(walk)
    _IN_PLACE[model] = exchanges
    try:
        with put_in(exchanges):
            yield bool(exchanges)
    finally:
        if outer is None:
            del _IN_PLACE[model]
        else:
            _IN_PLACE[model] = outer


def in_place(model: PreTrainedModel) -> list[_Exchange]:
    """Return what the `fused_modules` around this call exchanges in `model`, for `put_in`."""
    return _IN_PLACE.get(model, [])


def overwrites(exchanges: list[_Exchange]) -> bool:
    """Whether any exchanged module overwrites in its backward what its forward saved, as Liger's gated MLPs do."""
    return any(_file(exchange.fused.get("forward")) in _GATES for exchange in exchanges)


def put_in(exchanges: list[_Exchange]) -> AbstractContextManager[None]:
    """Put `exchanges` in place inside; does not walk over the model, so single layers can afford it.

    A module that has a `forward` of its own keeps it: it is in place already, or other code has replaced it.
    """
    return exchanged(each for each in exchanges if "forward" not in each.fused.keys() & each.owner.__dict__.keys())


def _on_gpu(walk: ModelWalk) -> bool:
    return all(parameter.device.type == "cuda" for parameter in walk.parameters())


def runs_fused(model: Model) -> bool:
    """Whether `fused_modules` would exchange anything, given the devices that the model is on now."""
    return bool(_exchanges(ModelWalk.of(model)))


def _exchanges(walk: ModelWalk) -> list[_Exchange]:
    model = walk.model
    if model in _OWN or not _on_gpu(walk):
        return []
    found = _FOUND.get(model)
    if found is None or found.structure != walk.structure:
        found = _FOUND[model] = _Found(walk.structure, _asked(walk))
    return found.exchanges


def _asked(walk: ModelWalk) -> list[_Exchange]:
    """Find what Liger changes in a model by applying it and undoing every change."""
    if importlib.util.find_spec("liger_kernel") is None:
        return []
    files = [file for name, file in list(sys.modules.items()) if name.startswith("transformers.models.")]
    files = [file for file in files if file.__name__.rpartition(".")[2].startswith("modeling_")]
    owners: list[ModuleType | nn.Module] = [*files, *walk.modules.values()]
    before = [dict(owner.__dict__) for owner in owners]
    try:
        _apply_liger(walk.model)
        after = [dict(owner.__dict__) for owner in owners]
    except Exception as error:  # a version of transformers that this Liger does not know
        warnings.warn(f"model: {type(walk.model).__name__} runs without Liger's modules: {error}", stacklevel=2)
        return []
    finally:
        for owner, old in zip(owners, before, strict=True):
            for name in owner.__dict__.keys() - old.keys():
                del owner.__dict__[name]
            owner.__dict__.update(old)
    changes = [
        _Exchange(owner, {name: value for name, value in new.items() if name not in old or old[name] is not value})
        for owner, old, new in zip(owners, before, after, strict=True)
    ]
    return [kept for change in changes if (kept := _wanted(change))]


def _wanted(change: _Exchange) -> _Exchange | None:
    """Reduce a change to rotary embeddings, norms and gated MLPs; classes, of which later models are made, stay."""
    if isinstance(change.owner, ModuleType):
        functions = {name: value for name, value in change.fused.items() if isinstance(value, FunctionType)}
        return _Exchange(change.owner, functions) if functions else None
    forward = change.fused.get("forward")
    if _file(forward) not in _FILES:
        return None
    return None if any(name in getattr(forward, "__qualname__", "") for name in _EXPERTS) else change


def _file(forward: Any) -> str | None:
    """Return the transformers file that a module's `forward` comes from."""
    return getattr(getattr(forward, "__func__", None), "__module__", None)


def _apply_liger(model: PreTrainedModel) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # needed only on a GPU

    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
