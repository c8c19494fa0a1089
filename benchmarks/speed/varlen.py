"""Call PyTorch's own attention over ragged sequences, by the interface of the installed torch."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface


def causal_varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, ends: tuple[Tensor, Tensor], longest: tuple[int, int], *, scale: float
) -> Tensor:
    """Causal attention within each of S sequences laid end to end; where keys outnumber queries, to the last key.

    On a GPU one call of FlashAttention's variable-length kernel; on a CPU PyTorch's own causal kernel once per
    sequence. Neither looks at a pair of tokens from two sequences.

    Args:
        q: (N, H, D).
        k, v: (M, Hkv, D), Hkv dividing H.
        ends: (S + 1,) int32 each: where sequences of queries and of keys end, from 0 on.
        longest: queries and keys of the longest.
        scale: factor on `q . k`.

    Returns:
        (N, H, D).
    """
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        return _call(varlen_attn, q, k, v, ends, longest, scale)
    columns = ((q, ends[0]), (k, ends[1]), (v, ends[1]))
    parts = (x.transpose(0, 1)[None].split(stops.diff().tolist(), dim=2) for x, stops in columns)
    result = []
    for one, keys, values in zip(*parts, strict=True):
        mask = causal_lower_right(one.shape[2], keys.shape[2])
        result.append(scaled_dot_product_attention(one, keys, values, mask, scale=scale, enable_gqa=True))
    return torch.cat(result, dim=2)[0].transpose(0, 1)


def _call(
    attend: Any, q: Tensor, k: Tensor, v: Tensor, ends: tuple[Tensor, Tensor], longest: tuple[int, int], scale: float
) -> Tensor:
    options: dict[str, Any] = {"window_size": (-1, 0), "scale": scale}
    if "enable_gqa" in inspect.signature(attend).parameters:  # from torch 2.12 on
        options["enable_gqa"] = True
    else:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return attend(q, k, v, *ends, *longest, **options)


def _of_a_model(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *,
    scaling: float, cu_seq_lens_q: Tensor, longest: int, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The same as a model's attention; (1, H, N, D) -> (1, N, H, D)."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    ends = (cu_seq_lens_q, cu_seq_lens_q)
    return causal_varlen_attention(q, k, v, ends, (longest, longest), scale=scaling)[None], None


PER_SEQUENCE = "benchmark_per_sequence"
AttentionInterface.register(PER_SEQUENCE, _of_a_model)
