"""Compute the load-balancing loss of a mixture of experts, in which a row that sequences share counts for each."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..ops.upload import upload
from ..tree.prefix_tree import Pack


def uses_of_rows(pack: Pack, sequences: Iterable[np.ndarray]) -> np.ndarray:
    """Count, for each row of a pack, (N,), how many of the `sequences`, all fed by it, go through it."""
    paths = [pack.tree.insert(tokens) for tokens in sequences]
    return np.bincount(np.concatenate([np.zeros(0, np.int32), *paths]), minlength=pack.num_tokens)


def packed_router_loss(model: PreTrainedModel, packs: Sequence[tuple[Sequence[Tensor], np.ndarray]]) -> Tensor:
    """Compute transformers' `load_balancing_loss_func` of the unshared sequences, (), float32.

    Each of the `packs` has the logits (N, experts) of every router, and the uses (N,) of its rows.
    """
    # Mixtral's is the function that the other mixtures copy; its mask of padding is a weight of each row.
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = model.config.get_text_config()
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    layers = tuple(torch.cat(layer) for layer in zip(*(logits for logits, _ in packs), strict=True))
    (uses,) = upload([np.concatenate([own for _, own in packs])], layers[0].device)
    loss: Any = load_balancing_loss_func
    return loss(layers, experts, config.num_experts_per_tok, uses[None])  # type: ignore[no-any-return]
