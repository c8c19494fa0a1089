"""Call PyTorch's own attention over ragged sequences, by the interface of the installed torch."""

import inspect
from typing import Any

from torch import Tensor

from benchmarks.harness.race import Absent


def causal_varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scale: float | None = None,
) -> Tensor:
    """Causal attention within each of S sequences laid end to end; where keys outnumber queries, to the last key.

    `varlen_attn` has `is_causal` up to torch 2.10 and `window_size` from 2.11 on, and `enable_gqa` from 2.12 on:
    before that, keys and values are repeated.

    Args:
        q: (N, H, D).
        k, v: (M, Hkv, D), Hkv dividing H.
        ends: (S + 1,) int32 each: where sequences of queries and of keys end, from 0 on.
        longest: queries and keys of the longest.
        scale: factor on `q . k`; default `D ** -0.5`.

    Returns:
        (N, H, D).

    Raises:
        Absent: on a CPU, or where this torch cannot do it.
    """
    if not q.is_cuda:
        raise Absent("PyTorch's attention over ragged sequences runs on a GPU")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise Absent(f"this torch has no attention over ragged sequences: {error}") from error
    return _call(varlen_attn, q, k, v, ends, longest, scale)


def _call(
    attend: Any, q: Tensor, k: Tensor, v: Tensor, ends: tuple[Tensor, Tensor], longest: tuple[int, int],
    scale: float | None,
) -> Tensor:  # fmt: skip
    known = inspect.signature(attend).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if scale is not None and scale != q.shape[-1] ** -0.5:
        if "scale" not in known:
            raise Absent("this torch's varlen_attn takes no scale")
        options["scale"] = scale
    if (group := q.shape[1] // k.shape[1]) > 1:
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    return attend(q, k, v, *ends, *longest, **options)
