"""Call PyTorch's own attention over ragged sequences, by the interface of the installed torch."""

import inspect
from typing import Any

from torch import Tensor

from benchmarks.harness.race import Absent


def causal_varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, ends: tuple[Tensor, Tensor], longest: tuple[int, int], *, scale: float
) -> Tensor:
    """Causal attention within each of S sequences laid end to end; where keys outnumber queries, to the last key.

    Args:
        q: (N, H, D).
        k, v: (M, Hkv, D), Hkv dividing H.
        ends: (S + 1,) int32 each: where sequences of queries and of keys end, from 0 on.
        longest: queries and keys of the longest.
        scale: factor on `q . k`.

    Returns:
        (N, H, D).

    Raises:
        Absent: on a CPU.
    """
    if not q.is_cuda:
        raise Absent("PyTorch's attention over ragged sequences runs on a GPU")
    from torch.nn.attention.varlen import varlen_attn

    return _call(varlen_attn, q, k, v, ends, longest, scale)


def _call(
    attend: Any, q: Tensor, k: Tensor, v: Tensor, ends: tuple[Tensor, Tensor], longest: tuple[int, int], scale: float
) -> Tensor:
    options: dict[str, Any] = {"window_size": (-1, 0), "scale": scale}
    if "enable_gqa" in inspect.signature(attend).parameters:  # from torch 2.12 on
        options["enable_gqa"] = True
    else:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return attend(q, k, v, *ends, *longest, **options)
