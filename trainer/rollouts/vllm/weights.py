"""Name a policy's weights as a server of the plain model does, and change one of them for a test."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from cfa_kernels.hf.model import causal_lm
from trainer.rollouts.merged import adapted_layers

_SAVED = "modules_to_save.default."  # PEFT's copy of a module that trains as a whole, beside its `original_module`


def served_weights(model: nn.Module) -> dict[str, Tensor]:
    """Collect the weights of `model` by the names of the model without adapters, tied ones once.

    Args:
        model: a policy whose adapters, if it has any, are merged into its weights (`merged_adapters`).

    Raises:
        ValueError: adapters act beside the weights.
    """
    if beside := adapted_layers(model):
        raise ValueError(f"model: the adapter of {next(iter(beside))} must be merged before its weights are sent")
    prefix = getattr(model, "prefix", None)  # of PEFT's own parameters
    return {
        name.replace(".base_layer.", ".").replace(_SAVED, ""): parameter.data
        for name, parameter in causal_lm(model).named_parameters()
        if "original_module." not in name and (prefix is None or prefix not in name)
    }


@contextlib.contextmanager
def halved_head(model: nn.Module) -> Iterator[None]:
    """Within it the output layer of `model` has half its weights, which no token's log-prob leaves as it was."""
    weight = causal_lm(model).get_output_embeddings().weight.data
    kept = weight.clone()
    try:
        weight.mul_(torch.tensor(0.5, dtype=weight.dtype))
        yield
    finally:
        weight.copy_(kept)
