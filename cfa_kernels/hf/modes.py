"""Set the mode, attention and autocast that a model runs in, within a `with` block."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from .model_walk import Model, ModelWalk


def checkpointed_modules(model: Model) -> list[nn.Module]:
    """List the modules whose layers run again in the backward, in the modes that they are in, instead of keeping it."""
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
        _set_mode(changed, training)
        yield
    finally:
        _set_mode(changed, not training)


def _set_mode(modules: Iterable[nn.Module], training: bool) -> None:
    """Write the flag itself: as an attribute each takes a search for parameters, buffers and modules of its name."""
    for module in modules:
        own = vars(module)
        if "training" in own:
            own["training"] = training
        else:  # a scripted module keeps it elsewhere
            module.training = training


@contextmanager
def attention_implementation(model: Model, name: str) -> Iterator[None]:
    """Set attention `name`, a registered one, in every layer; each configuration's own comes back, also after an error.

    Raises `NotImplementedError` if the model does not go through transformers' attention interface.
    """
    walk = ModelWalk.of(model)
    if not walk.model._can_set_attn_implementation():
        kind = type(walk.model).__name__
        raise NotImplementedError(f"model: {kind} does not use transformers' attention interface")
    implementations = [(config, config._attn_implementation) for config in walk.configs]
    try:
        for config, _ in implementations:
            config._attn_implementation = name
        yield
    finally:
        for config, implementation in implementations:
            config._attn_implementation = implementation


@contextmanager
def without_accelerates_autocast(model: PreTrainedModel) -> Iterator[None]:
    """Run the model's own forward inside, not the one that accelerate has wrapped in autocast."""
    wrapped = vars(model).get("forward") if "_original_forward" in vars(model) else None
    try:
        if wrapped is not None:
            model.forward = vars(model)["_original_forward"]
        yield
    finally:
        if wrapped is not None:
            model.forward = wrapped
