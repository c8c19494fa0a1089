"""Run a packed tree through a transformers model: its attention, its masks, and one forward over the tree's rows.

`verify.py` checks once per model that this gives the model's own results.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..ops.attention_options import EVERYTHING, Reach
from ..ops.segment_table import SegmentTable
from ..ops.tree_attention import tree_attention, tree_attention_op
from ..ops.upload import upload
from ..packing.prefix_tree import Pack
from .head import Head
from .limits import largest_forward
from .lora import one_pass_adapters
from .model import backbone, input_device
from .model_walk import Model, ModelWalk
from .modes import attention_implementation, attention_of, checkpointed_modules, evaluation_mode, exchanged, value_of
from .ranks import inside
from .stateful_layers import tree_states

ATTENTION = "cfa_tree"
# Arguments that some models pass to attention, that change its result and that tree attention does not implement.
_UNSUPPORTED_ARGUMENTS = ("position_bias", "cache_position_bias", "head_mask", "block_mask", "score_mod", "indices")


class TreeMask:
    """Stand-in for a layer's attention mask: the pack's segments and the reach of that layer's rows."""

    # Not a dataclass: wrappers that cast a module's inputs rebuild those, and would upload the table in every layer.

    def __init__(self, table: SegmentTable, reach: Reach) -> None:
        self.table, self.reach = table, reach


class TracedMask:
    """Stand-in for the attention mask of a compiled layer: all that its attention reads of the forward, by name.

    `kept` takes the layer's own keys and values, which the graph returns.
    """

    def __init__(self, mask: TreeMask, first_row: int, before: tuple[Tensor, Tensor] | None) -> None:
        table, self.first_row, self.before = mask.table, first_row, before
        self.handle, self.segments, self.contexts = table.handle, table.segments, table.contexts
        self.window, self.chunk = mask.reach
        self.kept: tuple[Tensor, Tensor] | None = None


class KeyValueStore:
    """Keys and values of a packed forward, layer by layer, for branches that continue its rows later.

    A store that `grows` adds those of the branches.
    """

    def __init__(self, *, grows: bool = False) -> None:
        self._grows = grows
        self._calls: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
        self._num_read: dict[nn.Module, int] = {}

    def write(self, layer: nn.Module, key: Tensor, value: Tensor) -> None:
        """Keep key and value, (1, Hkv, N, D), of one call of `layer`."""
        self._calls.setdefault(layer, []).append((key.detach(), value.detach()))

    def rewind(self) -> None:
        """Read from the first call of each layer again."""
        self._num_read.clear()

    def read(self, layer: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the stored keys and values of this call of `layer`."""
        call = self._num_read.get(layer, 0)
        self._num_read[layer] = call + 1
        return self._calls[layer][call]

    def before(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stored keys and values of this call of `layer`, followed by `key` and `value`."""
        joined = _joined(self.read(layer), (key, value))
        if self._grows:
            self._calls[layer][self._num_read[layer] - 1] = joined
        return joined


def _joined(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Join keys and values (1, Hkv, N, D) along rows, whose heads are side by side in memory: copied as a whole."""
    parts = zip(first, second, strict=True)
    keys, values = (torch.cat([a.transpose(1, 2), b.transpose(1, 2)], dim=1).transpose(1, 2) for a, b in parts)
    return keys, values


@dataclass
class _PackedForward:
    table: SegmentTable
    store: KeyValueStore | None
    first_row: int  # rows before it are in the store


_FORWARD: ContextVar[_PackedForward | None] = ContextVar("cfa_packed_forward", default=None)


def _attention(
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
    if not isinstance(attention_mask, (TreeMask, TracedMask)):
        if attention_mask is not None:
            raise NotImplementedError(f"{name} is given an attention mask that transformers' mask builder did not make")
        if sliding_window is not None:
            raise NotImplementedError(f"{name} has a sliding window and no attention mask that says which")
        forward = _FORWARD.get()
        if forward is None:
            raise RuntimeError(f"{name} runs tree attention outside a packed forward")
        attention_mask = TreeMask(forward.table, EVERYTHING)
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
    if (running := _FORWARD.get()) is not None:  # else the mask was passed without a packed forward
        first_row = running.first_row
        if running.store is not None and first_row:
            key, value = running.store.before(module, key, value)
        elif running.store is not None:
            running.store.write(module, key, value)
    out = tree_attention(
        *map(_by_rows, (query, key, value)),
        attention_mask.table,
        scale=scaling,
        sliding_window=attention_mask.reach.window,
        attention_chunk_size=attention_mask.reach.chunk,
        softcap=softcap,
        sinks=s_aux,
        first_query_row=first_row,
    )
    return out.unsqueeze(0), None


def _by_rows(x: Tensor) -> Tensor:
    """View (1, H, N, D) as (N, H, D)."""
    return x.squeeze(0).transpose(0, 1)  # not x[0], whose gradient is a copy into zeros


def _traced_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: TracedMask, scale: float | None, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attend as one node of a compiled layer's graph."""
    mask.kept = key.detach(), value.detach()
    if mask.before is not None:
        key, value = _joined(mask.before, (key, value))
    wants_gradient = torch.is_grad_enabled() and query.requires_grad
    out, _ = tree_attention_op(
        *map(_by_rows, (query, key, value)), sinks, mask.handle, mask.segments, mask.contexts,
        query.shape[-1] ** -0.5 if scale is None else scale, softcap, mask.window, mask.chunk, mask.first_row,
        wants_gradient,
    )  # fmt: skip
    return out.unsqueeze(0)


def _build_mask(
    *, mask_function: Callable[..., Any], local_size: int | None = None, device: torch.device | None = None, **_: object
) -> TreeMask:
    """Make a layer's mask for transformers' mask builder, whose `mask_function` says which keys a query sees."""
    forward = _FORWARD.get()
    if forward is None:
        raise RuntimeError(f"attn_implementation={ATTENTION!r} runs only inside a packed forward")
    return TreeMask(forward.table, read_visibility(mask_function, local_size, device))


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _build_mask)


def read_visibility(
    mask_function: Callable[..., Any], local_size: int | None, device: torch.device | None = None
) -> Reach:
    """Find the rule that `mask_function(batch, head, query position, key position)` follows, by calling it.

    Raises `NotImplementedError` for a rule that is not causal, a causal window or a causal chunk.
    """
    size = local_size or 8
    near = [edge * size + step for edge in range(4) for step in range(-3, 4)]
    positions = torch.tensor(sorted({p for p in [*near, *range(8)] if p >= 0}))
    query, key = positions[:, None], positions[None, :]
    try:
        try:
            seen = mask_function(0, 0, query, key)
        except Exception:  # the function holds tensors of its own, on the device
            seen = mask_function(0, 0, query.to(device), key.to(device))
    except Exception as error:  # a rule that looks at tokens, or at a table of this very batch
        raise NotImplementedError(
            f"its attention mask does not depend on positions only ({type(error).__name__}: {error})"
        ) from error
    seen = torch.as_tensor(seen).cpu().expand(len(positions), len(positions))
    causal = key <= query
    if torch.equal(seen, causal):
        return EVERYTHING
    if local_size is not None and torch.equal(seen, causal & (query - key < local_size)):
        return Reach(window=local_size)
    if local_size is not None and torch.equal(seen, causal & (query // local_size == key // local_size)):
        return Reach(chunk=local_size)
    raise NotImplementedError("its attention mask is neither causal nor a causal window or chunk")


@contextmanager
def tree_attention_mode(model: Model) -> Iterator[None]:
    """Set `evaluation_mode` with tree attention in every layer."""
    walk = ModelWalk.of(model)
    with tree_training_mode(walk), evaluation_mode(walk):
        yield


@contextmanager
def tree_training_mode(model: Model) -> Iterator[None]:
    """Set tree attention as `tree_attention_mode` does, with modes and gradients as they are."""
    walk = ModelWalk.of(model)
    with attention_implementation(walk, ATTENTION):
        yield


class HeadRows(NamedTuple):
    """Rows that the head reads of a pack, on the head's device."""

    states: Tensor  # (R, H) hidden states, in the head's dtype
    targets: Tensor  # (R,) int64


@dataclass(frozen=True)
class _Staged:
    """Index arrays of a pack on the model's device, sent there by one copy before its forward is launched."""

    input_ids: Tensor  # (1, N)
    position_ids: Tensor  # (1, N)
    everywhere: Tensor  # (1, N) ones, expanded from a single number
    own: Tensor  # rows of this forward that the head reads
    before: Tensor  # rows of the forward that this one continues
    order: Tensor  # (R,) that puts `before` and `own` in the pack's order; empty if nothing is `before`
    last: Tensor  # the rows among `own`, once each and ascending
    targets: Tensor  # (R,)


def _stage(model: PreTrainedModel, pack: Pack) -> _Staged:
    here = pack.rows >= pack.first_row
    own, before = pack.rows[here] - pack.first_row, pack.rows[~here]
    order = np.argsort(np.argsort(here, kind="stable")) if len(before) else before
    one = np.ones(1, np.int64)
    arrays = [pack.input_ids, pack.position_ids, one, own, before, order, np.unique(own), pack.targets]
    ids, positions, ones, *rest = upload(arrays, input_device(model))
    return _Staged(ids[None], positions[None], ones.expand(1, pack.num_tokens), *rest)


def packed_hidden(
    model: Model,
    pack: Pack,
    *,
    staged: _Staged | None = None,
    store: KeyValueStore | None = None,
    routers: list[tuple[Tensor, ...]] | None = None,
) -> Tensor:
    """Compute the hidden states (N, H) of the rows that a pack feeds, as the head takes them, by one forward.

    Call with tree attention set; checkpointed layers restore it in a backward. Processes that share the model all run
    a forward. `staged` is the pack's index arrays if they are on the device already. `store` takes the keys and values
    of a pack's rows, or provides those before the pack's first row. `routers` is appended the logits (N, experts) of
    each router.
    """
    walk = ModelWalk.of(model)
    model = walk.model
    staged = staged or _stage(model, pack)
    if (ranks := inside(model)) is not None:
        ranks.before_forward()
    if (most := largest_forward(walk)) is not None and pack.table.num_rows > most:
        raise NotImplementedError(
            f"model: {type(model).__name__} scales queries by their place in a forward of more than {most} rows, and a "
            f"group of {pack.table.num_rows} rows must share one; take fewer or shorter completions"
        )
    if store is not None:
        store.rewind()
    running = _PackedForward(pack.table, store, pack.first_row)
    rows, states = pack.num_tokens, tree_states(walk, pack.table)
    again = _recomputed_on_trees(walk, running, rows)
    with value_of(_FORWARD, running), states, again, one_pass_adapters(walk, rows):
        output = backbone(model)(
            input_ids=staged.input_ids,
            # An all-ones mask stops transformers from inferring packed sequences from restarting position ids.
            attention_mask=staged.everywhere,
            position_ids=staged.position_ids,
            use_cache=False,
            **({} if routers is None else {"output_router_logits": True}),
        )
    if routers is not None:
        routers.append(output.router_logits)
    return output.last_hidden_state[0]  # type: ignore[no-any-return]


_CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Attributes that hold a module's checkpoint function: of transformers, and of torch's wrapper that FSDP uses."""


def _recomputed_on_trees(walk: ModelWalk, running: _PackedForward, rows: int) -> AbstractContextManager[None]:
    """Make checkpointed modules run again, in a backward, exactly as they run inside.

    Each checkpointed function restores attention, pack and modules of this forward by itself, because one backward may
    rerun layers of other forwards too, packed or plain.
    """
    configs = [config for config in walk.configs if config._attn_implementation == ATTENTION]
    again = replace(running, store=None)

    def checkpointing(module: nn.Module, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def on_trees(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def run(*inputs: Any, **named: Any) -> Any:
                if _FORWARD.get() is running:
                    return function(*inputs, **named)
                adapters = one_pass_adapters(module, rows)
                with value_of(_FORWARD, again), attention_of(configs, ATTENTION), adapters:
                    return function(*inputs, **named)

            return checkpoint(run, *args, **kwargs)

        return on_trees

    return exchanged(
        (module, {name: checkpointing(module, module.__dict__[name])})
        for module in checkpointed_modules(walk)
        for name in _CHECKPOINTS
        if module.__dict__.get(name) is not None
    )


def pack_states(
    model: Model,
    head: Head,
    pack: Pack,
    *,
    store: KeyValueStore | None = None,
    earlier: Tensor | None = None,
) -> HeadRows:
    """Compute the rows of `pack` that have a target, by one forward inside `tree_attention_mode`.

    `head` is the one that was checked. A pack that continues another takes the other's `store` and hidden states
    (N, H), `earlier`.
    """
    walk = ModelWalk.of(model)
    staged = _stage(walk.model, pack)
    device = head.weight.device  # differs from the embedding's where a model's layers are spread over devices
    parts = []
    if len(staged.before):
        assert earlier is not None
        parts.append(earlier.index_select(0, staged.before.to(earlier.device)).to(head.weight))
    if pack.num_tokens:
        with last_layer_on_rows(walk.model, staged.last):
            hidden = packed_hidden(walk, pack, staged=staged, store=store)
        parts.append(hidden.index_select(0, staged.own.to(hidden.device)).to(head.weight))
    if not parts:  # queries without targets, of rows that were fed before
        parts = [head.weight.new_zeros(0, head.weight.shape[1])]
    states = parts[0] if len(parts) == 1 else torch.cat(parts)
    if len(staged.before):
        states = states.index_select(0, staged.order.to(device))
    return HeadRows(states, staged.targets.to(device))


@contextmanager
def last_layer_on_rows(model: PreTrainedModel, rows: Tensor) -> Iterator[None]:
    """Run the last layer's attention output and MLP, which act on each token by itself, only on the `rows` of the head.

    A model that names its layers differently computes all rows, with the same result.
    """
    layers = getattr(backbone(model), "layers", None)
    last = layers[-1] if isinstance(layers, nn.ModuleList) and len(layers) else None
    # Queries stay whole: the attention module norms and rotates them with the keys, which every row needs.
    modules = [getattr(last, "mlp", None), getattr(getattr(last, "self_attn", None), "o_proj", None)]
    with ExitStack() as stack:
        for hook in [hook for module in modules if module is not None for hook in _hook_rows(module, rows)]:
            stack.enter_context(hook)
        yield


def _hook_rows(module: nn.Module, rows: Tensor) -> list[RemovableHandle]:
    """Hook `module` so that, given (1, N, H), it computes only `rows` and returns zeros elsewhere."""
    seen: list[tuple[Tensor, int]] = []

    def select(_: nn.Module, args: tuple) -> tuple:
        index = rows.to(args[0].device)
        seen.append((index, args[0].shape[1]))
        return (args[0].index_select(1, index), *args[1:])

    def spread(_: nn.Module, args: tuple, output: Tensor | tuple) -> Tensor | tuple:
        index, length = seen.pop()
        some = output[0] if isinstance(output, tuple) else output
        full = some.new_zeros(1, length, some.shape[-1]).index_copy_(1, index, some)
        return (full, *output[1:]) if isinstance(output, tuple) else full

    return [module.register_forward_pre_hook(select), module.register_forward_hook(spread)]
