"""Attention of a decoding step that reads each key and value once, in transformers' attention interface."""

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .modes import attention_of
from .walk import ModelWalk

_LEFT_TO_SDPA = "softcap", "s_aux", "position_bias", "cache"  # arguments


def decoding_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Read keys and values once in steps of one token, where attention is sdpa, which repeats them for query heads.

    Any other attention, as of models with sinks or caps, stays; so do models without the interface.
    """
    configs = ModelWalk.of(model).configs if model._can_set_attn_implementation() else []
    return attention_of([config for config in configs if config._attn_implementation == "sdpa"], "cfa_decode")


def cache_argument(model: Any) -> str:
    """Name of the argument of a causal model that takes its cache: transformers 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(model.get_decoder().forward).parameters else "past_key_values"


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend from q (B, H, 1, D) to k, v (B, Hkv, L, D or Dv) -> (B, 1, H, Dv); sdpa does what this cannot."""
    by_head = attention_mask is not None and attention_mask.shape[1] > 1
    if query.shape[2] > 1 or by_head or any(options.get(name) is not None for name in _LEFT_TO_SDPA):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    rows = query.unflatten(1, (key.shape[1], -1)).squeeze(3)  # the query heads of one key head, side by side
    scale, dropout = options.get("scaling"), options.get("dropout", 0.0)
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        attention_mask = attention_mask.to(query.dtype)  # autocast leaves the embeddings' dtype behind
    out = scaled_dot_product_attention(rows, key, value, attention_mask, dropout, scale=scale)
    return out.flatten(1, 2).unsqueeze(1), None


def _mask(*args: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor | None:
    """Make sdpa's mask; that of one token as summands in `dtype`, which sdpa would otherwise make in every layer."""
    mask = sdpa_mask(*args, **options)
    if mask is None or mask.shape[2] > 1:
        return mask  # type: ignore[no-any-return]
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


AttentionInterface.register("cfa_decode", _attention)
AttentionMaskInterface.register("cfa_decode", _mask)
