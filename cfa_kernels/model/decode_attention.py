"""Attention of a decoding step that reads each key and value once, in transformers' attention interface.

Rows that share a prompt attend to its keys together and to their own keys apart, and the two are merged by the sums of
their exponentials (Hydragen, arXiv 2402.05099).
"""

import inspect
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .memory import is_out_of_memory
from .modes import attention_of, attributes_set
from .walk import ModelWalk

_NAME = "cfa_decode"
_LEFT_TO_SDPA = "softcap", "s_aux", "position_bias", "cache"  # arguments


class SharedKeys(NamedTuple):
    """Keys and values of a layer that R rows share by G groups of at most M rows, before those of their own."""

    keys: Tensor  # (G, Hkv, P, D)
    values: Tensor  # (G, Hkv, P, Dv)
    bias: Tensor  # (G, 1, 1, P) summands of scores, -inf for padding
    members: Tensor  # (G, M) int64, rows of each group, any where it has fewer
    slots: Tensor  # (R,) int64, where each row is among the members


class StepLayer(StaticLayer):
    """Keys and values of a layer in steps of one token, which see their first rows and places."""

    keys: Tensor
    values: Tensor
    seen: tuple[Tensor, Tensor]  # (R, Hkv, L, D), (R, Hkv, L, Dv)
    shared: SharedKeys | None
    shared_is_read: bool

    def __init__(self, keys: Tensor, values: Tensor, place: Tensor) -> None:
        super().__init__(max_cache_len=keys.shape[2])
        self.keys, self.values, self.cumulative_length, self.is_initialized = keys, values, place, True

    def begin(self, rows: int, live: int, shared: SharedKeys | None) -> None:
        """Begin a step that sees so many rows and places, and what rows share."""
        # No views: a graph would depend on where in its storage a tensor begins.
        self.seen = self.keys[:rows, :, :live].data, self.values[:rows, :, :live].data
        self.shared, self.shared_is_read = shared, False

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write a token's keys and values; its attention comes next."""
        _STEP.layer = self
        keys, values = self.seen
        keys.index_copy_(2, self.cumulative_length, key_states)
        values.index_copy_(2, self.cumulative_length, value_states)
        return keys, values

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """Return the places that a mask is for, and the first of them."""
        return self.seen[0].shape[2], 0


class _Step:
    layer: StepLayer | None = None  # that has taken a token's keys


_STEP = _Step()  # no context variable: a compiler reads through it


def a_step() -> AbstractContextManager[None]:
    """Forget, at the end, which layer came last."""
    return attributes_set([(_STEP, "layer", None)])


class CannotShare(NotImplementedError):
    """Rows of a model cannot share keys; the message says why."""


def sharing_obstacle(model: PreTrainedModel) -> str | None:
    """Say why steps of `model` cannot attend to `SharedKeys`; None if nothing is known."""
    name, config = type(model).__name__, model.get_decoder().config
    if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=model.config).layers):
        return f"{name} has layers that attend in a window"
    if not model._can_set_attn_implementation():
        return f"{name} does not use transformers' attention interface"
    if config._attn_implementation not in ("sdpa", _NAME):
        return f"{name} attends by {config._attn_implementation}, not by sdpa"
    return None


def decoding_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Read keys and values once in steps of one token, where attention is sdpa, which repeats them for query heads.

    Any other attention, as of models with sinks or caps, stays; so do models without the interface.
    """
    configs = ModelWalk.of(model).configs if model._can_set_attn_implementation() else []
    return attention_of([config for config in configs if config._attn_implementation == "sdpa"], _NAME)


def cache_argument(model: Any) -> str:
    """Name of the argument of a causal model that takes its cache: transformers 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(model.get_decoder().forward).parameters else "past_key_values"


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend from q (B, H, 1, D) to k, v (B, Hkv, L, D or Dv) -> (B, 1, H, Dv); sdpa does what this cannot."""
    by_head = attention_mask is not None and attention_mask.shape[1] > 1
    left = [name for name in _LEFT_TO_SDPA if options.get(name) is not None] + ["a mask by head"] * by_head
    layer = _STEP.layer if query.shape[2] == 1 else None
    shared = None if layer is None else layer.shared
    if layer is not None and shared is not None:
        own = key is layer.seen[0] and value is layer.seen[1]
        left += [] if own else ["other keys or values than its cache's"]
        left += [] if _serves(query, key, value) else ["types or sizes that sdpa has no kernel for"]
        if left:
            raise CannotShare(f"{type(module).__name__} uses {left[0]}")
        layer.shared_is_read = True
    if query.shape[2] > 1 or left:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    rows = query.unflatten(1, (key.shape[1], -1)).squeeze(3)  # the query heads of one key head, side by side
    scale, dropout = options.get("scaling"), options.get("dropout", 0.0)
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        attention_mask = attention_mask.to(query.dtype)  # autocast leaves the embeddings' dtype behind
    if shared is not None:
        try:
            out = _merged(rows, (key, value), attention_mask, shared, scale)
        except RuntimeError as problem:
            if is_out_of_memory(problem):
                raise
            raise CannotShare(f"sdpa's kernel refuses {type(module).__name__}: {problem}") from problem
        return out.flatten(1, 2).unsqueeze(1), None
    out = scaled_dot_product_attention(rows, key, value, attention_mask, dropout, scale=scale)
    return out.flatten(1, 2).unsqueeze(1), None


def _merged(
    rows: Tensor, own: tuple[Tensor, Tensor], bias: Tensor | None, shared: SharedKeys, scale: float | None
) -> Tensor:
    """Attend from rows (R, Hkv, H / Hkv, D) to their own keys and to those that groups of them share."""

    def by_row(x: Tensor) -> Tensor:
        return x.unflatten(2, (shared.members.shape[1], -1)).transpose(1, 2).flatten(0, 1)[shared.slots]

    together = rows[shared.members].transpose(1, 2).flatten(2, 3)  # (G, Hkv, M * H / Hkv, D)
    there, there_sum = _with_logsumexp(together, shared.keys, shared.values, shared.bias, scale)
    apart, apart_sum = _with_logsumexp(rows, *own, bias, scale)
    share = torch.sigmoid(apart_sum - by_row(there_sum)).unsqueeze(-1)
    return by_row(there).lerp(apart, share.to(apart.dtype))


def _serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a kernel of `_with_logsumexp` takes such tensors."""
    alike = query.dtype == key.dtype == value.dtype and key.shape[3] == value.shape[3]
    return alike and (not query.is_cuda or (query.dtype.itemsize <= 4 and key.shape[3] % 8 == 0))


def _with_logsumexp(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Run sdpa's kernel for masks, which sums scores in float32, and give the logarithms of its sums (B, H, L) too."""
    if not query.is_cuda:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, key, value, attn_mask=bias, scale=scale)  # type: ignore[no-any-return]
    if bias is not None:
        bias = bias.expand(*query.shape[:3], key.shape[2])
    out, sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, scale=scale)
    return out, sums[..., : query.shape[2]]  # of a multiple of 32


def _mask(*args: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor | None:
    """Make sdpa's mask; that of one token as summands in `dtype`, which sdpa would otherwise make in every layer."""
    mask = sdpa_mask(*args, **options)
    if mask is None or mask.shape[2] > 1:
        return mask  # type: ignore[no-any-return]
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, _mask)
