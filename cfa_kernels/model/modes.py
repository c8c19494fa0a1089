"""Set the mode, attention, autocast and attributes that a model runs with, within a `with` block."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from itertools import compress, repeat
from operator import itemgetter, ne
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from .walk import Model, ModelWalk

_Value = TypeVar("_Value")


@contextmanager
def exchanged(attributes: Iterable[tuple[object, Mapping[str, Any]]]) -> Iterator[None]:
    """Set attributes of objects inside; the former, or the class's, are restored, also after an error."""
    before = list[tuple[dict[str, Any], str, Any]]()
    try:
        for owner, new in attributes:
            own = owner.__dict__
            before += [(own, name, own.get(name, before)) for name in new]  # itself for none
            own |= new
        yield
    finally:
        for own, name, value in reversed(before):
            if value is before:
                own.pop(name, None)
            else:
                own[name] = value


@contextmanager
def attributes_set(values: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes, (owner, name, value), inside; their former values are restored, also after an error."""
    with ExitStack() as undo:
        for owner, name, value in values:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


@contextmanager
def value_of(variable: ContextVar[_Value], value: _Value) -> Iterator[None]:
    """Set a context variable inside; its value is restored, also after an error."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def checkpointed_modules(walk: ModelWalk) -> list[nn.Module]:
    """List the modules that checkpoint their layers in the modes that they are in now."""
    flagged = [module for module in walk.having("gradient_checkpointing") if module.gradient_checkpointing]
    return [module for module in [*flagged, *walk.having("checkpoint_fn")] if module.training]


@contextmanager
def evaluation_mode(model: Model) -> Iterator[None]:
    """Set every module to evaluation mode, without gradients; each mode is restored, also after an error."""
    with torch.no_grad(), one_mode(model, training=False):
        yield


@contextmanager
def one_mode(model: Model, *, training: bool) -> Iterator[None]:
    """Set every module to training mode, or to evaluation mode; each mode is restored, also after an error."""
    # Past `nn.Module.__setattr__`, which takes several times as long, for each of thousands of modules.
    modules = ModelWalk.of(model).owned
    others = [*compress(modules, map(ne, map(itemgetter("training"), modules), repeat(training)))]
    try:
        for own in others:
            own["training"] = training
        yield
    finally:
        for own in others:
            own["training"] = not training


def attention_implementation(walk: ModelWalk, name: str) -> AbstractContextManager[None]:
    """Set attention `name` in every layer; raise `NotImplementedError` if the model has no interface for it."""
    if not walk.model._can_set_attn_implementation():
        kind = type(walk.model).__name__
        raise NotImplementedError(f"model: {kind} does not use transformers' attention interface")
    return attention_of(walk.configs, name)


def attention_of(configs: Iterable[Any], name: str) -> AbstractContextManager[None]:
    """Set attention `name` in configurations; each one's own is restored, also after an error."""
    return attributes_set((config, "_attn_implementation", name) for config in configs)


def without_accelerates_autocast(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Run the model's own forward inside, not the one that accelerate has wrapped in autocast."""
    wrapped = {"forward", "_original_forward"} <= vars(model).keys()
    return exchanged([(model, {"forward": vars(model)["_original_forward"]})] if wrapped else [])
