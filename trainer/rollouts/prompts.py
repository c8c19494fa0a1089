"""Feed prompts to a model for their keys and values: what all of them begin with once, where it is long."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from cfa_kernels.model.attention import KeyValueStore
from cfa_kernels.model.compiled import EAGER
from cfa_kernels.model.decode_attention import cache_argument
from cfa_kernels.model.modes import value_of
from cfa_kernels.model.tree_forward import packed_hidden, tree_attention_mode
from cfa_kernels.model.walk import ModelWalk
from cfa_kernels.ops.upload import upload
from cfa_kernels.tree.packs import pack_of
from cfa_kernels.tree.prefix_tree import PrefixTree

SHARED_FROM = 256  # tokens; a shorter beginning costs about as much apart as it does once
KeysValues = tuple[Tensor, Tensor]  # (B, Hkv, W, D), (B, Hkv, W, Dv)


def common_beginning(ids: Tensor, mask: Tensor) -> int:
    """Count the tokens that all prompts (B, W), padded on the left, begin with."""
    shortest, start = int(mask.sum(1).min()), mask.shape[1] - mask.sum(1, keepdim=True)
    first = ids.gather(1, start + torch.arange(shortest))
    return int((first == first[:1]).all(0).cumprod(0).sum())


def feed(model: PreTrainedModel, ids: Tensor, mask: Tensor, *, as_tree: bool) -> list[KeysValues]:
    """Compute each layer's keys and values of prompts (B, W) on the host, padded on the left: whole, or a window's end.

    The forward is one over their prefix tree, or over the padded batch.
    """
    device = next(model.parameters()).device
    if as_tree:
        tree, store = PrefixTree(), KeyValueStore()
        paths = [tree.insert(row[own]) for row, own in zip(ids.numpy(), mask.numpy().astype(bool), strict=True)]
        index = np.stack([np.pad(path, (ids.shape[1] - len(path), 0)) for path in paths])
        walk = ModelWalk.of(model)
        with value_of(EAGER, True), tree_attention_mode(walk):
            packed_hidden(walk, pack_of(tree), store=store)
        (rows,) = upload([index.astype(np.int64)], device)
        return [(keys[0][:, rows].transpose(0, 1), values[0][:, rows].transpose(0, 1)) for keys, values in store.pairs()]
    cache: Any = DynamicCache(config=model.config)
    ids, mask = upload([ids, mask], device)
    options = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0), cache_argument(model): cache}
    model.get_decoder()(input_ids=ids, use_cache=True, **options)
    return [(layer.keys, layer.values) for layer in cache.layers]
