"""Set the mode, attention and autocast that a model runs in, within a `with` block."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel


def checkpoints(model: nn.Module) -> bool:
    """Whether layers are checkpointed: run again in the backward instead of keeping what it needs."""
    return any(getattr(module, "gradient_checkpointing", False) and module.training for module in model.modules())


@contextmanager
def evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Set every module to evaluation mode, without gradients; each mode comes back, also after an error."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Set attention `name` in every layer; each configuration's own comes back, also after an error.

    Raises `NotImplementedError` if the model does not go through transformers' attention interface.
    """
    if not model._can_set_attn_implementation():
        raise NotImplementedError(f"model: {type(model).__name__} does not use transformers' attention interface")
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    implementations = [(config, config._attn_implementation) for config in configs.values()]
    try:
        model.set_attn_implementation(name)
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
