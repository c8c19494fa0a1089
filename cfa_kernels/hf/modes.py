"""Set the mode, attention, autocast and attributes that a model runs with, within a `with` block."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from .model_walk import Model, ModelWalk

_Value = TypeVar("_Value")


@contextmanager
def exchanged(attributes: Iterable[tuple[object, Mapping[str, Any]]]) -> Iterator[None]:
    """Give objects other attributes inside; each gets its own back, or that of its class, also after an error."""
    undo: list[tuple[dict[str, Any], dict[str, Any], Mapping[str, Any]]] = []
    try:
        for owner, new in attributes:
            place = owner.__dict__
            undo.append((place, {name: place[name] for name in new if name in place}, new))
            place.update(new)
        yield
    finally:
        for place, before, new in reversed(undo):
            place.update(before)
            for name in new.keys() - before.keys():
                place.pop(name, None)


@contextmanager
def value_of(variable: ContextVar[_Value], value: _Value) -> Iterator[None]:
    """Set a context variable inside; its value comes back, also after an error."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def checkpointed_modules(model: Model) -> list[nn.Module]:
    """List the modules that checkpoint their layers in the modes that they are in now."""
    walk = ModelWalk.of(model)
    flagged = [module for module in walk.having("gradient_checkpointing") if module.gradient_checkpointing]
    return [module for module in [*flagged, *walk.having("checkpoint_fn")] if module.training]


@contextmanager
def evaluation_mode(model: Model) -> Iterator[None]:
    """Set every module to evaluation mode, without gradients; each mode comes back, also after an error."""
    with torch.no_grad(), one_mode(model, training=False):
        yield


@contextmanager
def one_mode(model: Model, *, training: bool) -> Iterator[None]:
    """Set every module to training mode, or to evaluation mode; each mode comes back, also after an error."""
    changed = [module for module in ModelWalk.of(model).modules.values() if module.training != training]
    try:
        for module in changed:
            module.training = training
        yield
    finally:
        for module in changed:
            module.training = not training


def attention_implementation(model: Model, name: str) -> AbstractContextManager[None]:
    """Set attention `name`, a registered one, in every layer; each configuration's own comes back, also after an error.

    Raises `NotImplementedError` if the model does not go through transformers' attention interface.
    """
    walk = ModelWalk.of(model)
    if not walk.model._can_set_attn_implementation():
        kind = type(walk.model).__name__
        raise NotImplementedError(f"model: {kind} does not use transformers' attention interface")
    return attention_of(walk.configs, name)


@contextmanager
def attention_of(configs: Sequence[Any], name: str) -> Iterator[None]:
    """Set attention `name` in configurations; each one's own comes back, also after an error."""
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = name
        yield
    finally:
        for config, own in zip(configs, before, strict=True):
            config._attn_implementation = own


def without_accelerates_autocast(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Run the model's own forward inside, not the one that accelerate has wrapped in autocast."""
    wrapped = {"forward", "_original_forward"} <= vars(model).keys()
    return exchanged([(model, {"forward": vars(model)["_original_forward"]})] if wrapped else [])
