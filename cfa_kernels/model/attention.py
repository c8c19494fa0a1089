"""Attend over a packed tree in transformers' layers: masks, keys and values kept, and the function that they call."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ..tree.attention import tree_attention, tree_attention_op
from ..tree.attention_options import EVERYTHING, Reach
from ..tree.segment_table import SegmentTable

ATTENTION = "cfa_tree"
# Arguments that some models pass to attention, that change its result and that tree attention does not implement.
_UNSUPPORTED_ARGUMENTS = ("position_bias", "cache_position_bias", "head_mask", "block_mask", "score_mod", "indices")


class TreeMask:
    """Stand-in for a layer's attention mask: the pack's segments and the reach of that layer's rows."""

    # Not a dataclass: wrappers that cast a module's inputs rebuild those, and would upload the table in every layer.

    def __init__(self, table: SegmentTable, reach: Reach) -> None:
        self.table, self.reach = table, reach


class TracedMask:
    """Stand-in for the attention mask of a compiled layer: all that its attention reads of the forward, by name."""

    def __init__(self, mask: TreeMask, first_row: int, before: tuple[Tensor, Tensor] | None) -> None:
        table, self.first_row, self.before = mask.table, first_row, before
        self.handle, self.segments, self.contexts = table.handle, table.segments, table.contexts
        self.window, self.chunk = mask.reach
        self.kept: tuple[Tensor, Tensor] | None = None  # takes the layer's own keys and values, which the graph returns
        for part, dim in ((self.segments, 0), (self.contexts, 0), *((part, 2) for part in before or ())):
            torch._dynamo.maybe_mark_dynamic(part, dim)


class KeyValueStore:
    """Keys and values of a packed forward, layer by layer, for branches that continue its rows later."""

    def __init__(self) -> None:
        self._calls: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
        self._num_read: dict[nn.Module, int] = {}

    def write(self, layer: nn.Module, key: Tensor, value: Tensor) -> None:
        """Keep key and value, (1, Hkv, N, D), of one call of `layer`."""
        self._calls.setdefault(layer, []).append((key.detach(), value.detach()))

    def rewind(self) -> None:
        """Read from the first call of each layer again."""
        self._num_read.clear()

    def stored(self, layer: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the stored keys and values of this call of `layer`."""
        return self._calls[layer][self._num_read.get(layer, 0)]

    def next_call(self, layer: nn.Module) -> None:
        """Continue with the next call of `layer`."""
        self._num_read[layer] = self._num_read.get(layer, 0) + 1


def _joined(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Join keys and values (1, Hkv, N, D) along rows, whose heads are side by side in memory: copied as a whole."""
    parts = zip(first, second, strict=True)
    keys, values = (torch.cat([a.transpose(1, 2), b.transpose(1, 2)], dim=1).transpose(1, 2) for a, b in parts)
    return keys, values


@dataclass
class Running:
    """Packed forward that is under way."""

    table: SegmentTable
    store: KeyValueStore | None
    first_row: int  # rows before it are in the store


RUNNING: ContextVar[Running | None] = ContextVar("cfa_packed_forward", default=None)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: TreeMask | TracedMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend, in transformers' calling convention: q (1, H, N, D), k, v (1, Hkv, N, D or Dv) -> (1, N, H, Dv)."""
    name = type(module).__name__
    if query.shape[0] != 1:
        raise NotImplementedError(f"{name} runs on a batch of {query.shape[0]}; a packed tree is one sequence")
    if attention_mask is None:
        if sliding_window is not None:
            raise NotImplementedError(f"{name} has a sliding window and no attention mask that says which")
        if (forward := RUNNING.get()) is None:
            raise RuntimeError(f"{name} runs tree attention outside a packed forward")
        attention_mask = TreeMask(forward.table, EVERYTHING)
    elif not isinstance(attention_mask, (TreeMask, TracedMask)):
        raise NotImplementedError(f"{name} is given an attention mask that transformers' mask builder did not make")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise NotImplementedError(f"{name} attends in both directions; a causal model is needed")
    unsupported = [argument for argument in _UNSUPPORTED_ARGUMENTS if kwargs.get(argument) is not None]
    unsupported += ["an indexer of its own to pick keys"] if getattr(module, "indexer", None) is not None else []
    unsupported += [f"attention dropout {dropout}"] if dropout else []
    if unsupported:
        raise NotImplementedError(f"{name} uses {unsupported[0]}, which tree attention does not have")
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # as PyTorch's own attention: norms and rotary embeddings left float32
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    if isinstance(attention_mask, TracedMask):
        return _traced_attention(query, key, value, attention_mask, scaling, softcap, s_aux), None
    first_row = 0
    if (running := RUNNING.get()) is not None:  # else the mask was passed without a packed forward
        first_row = running.first_row
        if running.store is not None and first_row:
            key, value = _joined(running.store.stored(module), (key, value))
            running.store.next_call(module)
        elif running.store is not None:
            running.store.write(module, key, value)
    reach = attention_mask.reach
    query, key, value = map(_by_rows, (query, key, value))
    out = tree_attention(
        query, key, value, attention_mask.table, scale=scaling, sliding_window=reach.window,
        attention_chunk_size=reach.chunk, softcap=softcap, sinks=s_aux, first_query_row=first_row,
    )  # fmt: skip
    return out.unsqueeze(0), None


def _by_rows(x: Tensor) -> Tensor:
    """View (1, H, N, D) as (N, H, D)."""
    return x.squeeze(0).transpose(0, 1)  # not x[0], whose gradient is a copy into zeros


def _traced_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: TracedMask, scale: float | None, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attend as one node of a compiled layer's graph."""
    if mask.before is None:
        mask.kept = key.detach(), value.detach()
    else:
        key, value = _joined(mask.before, (key, value))
    wants_gradient = torch.is_grad_enabled() and query.requires_grad
    out, _ = tree_attention_op(
        *map(_by_rows, (query, key, value)), sinks, mask.handle, mask.segments, mask.contexts,
        query.shape[-1] ** -0.5 if scale is None else scale, softcap, mask.window, mask.chunk, mask.first_row,
        wants_gradient,
    )  # fmt: skip
    return out.unsqueeze(0)


def _build_mask(
    *, mask_function: Callable[..., Any], local_size: int | None = None, device: torch.device | None = None,
    config: Any = None, **_: object,
) -> TreeMask:  # fmt: skip
    """Make a layer's mask for transformers' mask builder, whose `mask_function` says which keys a query sees."""
    forward = RUNNING.get()
    if forward is None:
        raise RuntimeError(f"attn_implementation={ATTENTION!r} runs only inside a packed forward")
    rows = forward.table.num_rows - forward.first_row
    if not forward.first_row or local_size is None or rows > local_size + 3:
        return TreeMask(forward.table, read_visibility(mask_function, local_size, device, rows))
    try:
        reach = read_visibility(mask_function, local_size, device)  # rows before it may need more than its own show
    except NotImplementedError:  # perhaps it reads a table of its own rows; they must then agree with what is declared
        sizes = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
        reach, own = Reach(window=local_size), read_visibility(mask_function, local_size, device, rows)
        if sizes[0] != local_size or sizes[1] == local_size or own != (reach if rows > local_size else EVERYTHING):
            raise
    return TreeMask(forward.table, reach)


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, _build_mask)


def read_visibility(
    mask_function: Callable[..., Any], local_size: int | None, device: torch.device | None = None,
    rows: int | None = None,
) -> Reach:  # fmt: skip
    """Find the rule that `mask_function(batch, head, query position, key position)` follows, by calling it.

    It is asked about positions of the forward's `rows` only, where they are given: it may read a table of them.

    Raises `NotImplementedError` for a rule that is not causal, a causal window or a causal chunk.
    """
    size = local_size or 8
    near = [edge * size + step for edge in range(4) for step in range(-3, 4)]
    positions = torch.tensor(sorted({p for p in [*near, *range(8)] if 0 <= p < (rows or p + 1)}))
    query, key = positions[:, None], positions[None, :]
    try:
        try:
            seen = mask_function(0, 0, query, key)
        except Exception:  # the function holds its own tensors, on the device
            seen = mask_function(0, 0, query.to(device), key.to(device))
    except Exception as error:  # a rule that looks at tokens, or at a table of this very batch
        reason = f"{type(error).__name__}: {error}"
        raise NotImplementedError(f"its attention mask does not depend on positions only ({reason})") from error
    seen, causal = torch.as_tensor(seen).cpu().expand(len(positions), len(positions)), key <= query
    if torch.equal(seen, causal):
        return EVERYTHING
    if local_size is not None and torch.equal(seen, causal & (query - key < local_size)):
        return Reach(window=local_size)
    if local_size is not None and torch.equal(seen, causal & (query // local_size == key // local_size)):
        return Reach(chunk=local_size)
    raise NotImplementedError("its attention mask is neither causal nor a causal window or chunk")
