"""Run a packed tree through a transformers model: one forward over the tree's rows.

`verify.py` checks once per model that this gives the model's own results.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..ops.upload import upload
from ..tree.prefix_tree import Pack
from .attention import ATTENTION, RUNNING, KeyValueStore, Running
from .compiled import compiled_layers, to_compile
from .decode_attention import cache_argument
from .head import Head
from .limits import require_few
from .lora import one_pass_adapters
from .modes import attention_implementation, attention_of, checkpointed_modules, evaluation_mode, exchanged, value_of
from .parts import backbone, input_device
from .sharded.ranks import inside
from .stateful_layers import tree_states
from .walk import ModelWalk


@contextmanager
def tree_attention_mode(walk: ModelWalk) -> Iterator[None]:
    """Set `evaluation_mode` with tree attention in every layer."""
    with tree_training_mode(walk), evaluation_mode(walk):
        yield


def tree_training_mode(walk: ModelWalk) -> AbstractContextManager[None]:
    """Set tree attention as `tree_attention_mode` does, with modes and gradients as they are."""
    return attention_implementation(walk, ATTENTION)


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
    is_read = np.zeros(pack.num_tokens, bool)
    is_read[own] = True
    arrays = [pack.input_ids, pack.position_ids, one, own, before, order, np.flatnonzero(is_read), pack.targets]
    ids, positions, ones, *rest = upload(arrays, input_device(model))
    # Positions by themselves: graphs of compiled layers depend on where in its storage a tensor begins.
    return _Staged(ids[None], positions.clone()[None], ones.expand(1, pack.num_tokens), *rest)


def packed_hidden(
    walk: ModelWalk, pack: Pack, *, staged: _Staged | None = None, store: KeyValueStore | None = None,
    routers: list[tuple[Tensor, ...]] | None = None, cache: Any = None,
) -> Tensor:  # fmt: skip
    """Compute the hidden states (N, H) of the rows that a pack feeds, as the head takes them, by one forward.

    Call with tree attention set; checkpointed layers restore it in a backward. `store` takes the keys and values of a
    pack's rows, or provides those before its first row. `routers` is appended the logits (N, experts) of each router.
    `cache`, an empty one of transformers, takes what layers keep of each row.
    """
    model = walk.model
    staged = staged or _stage(model, pack)
    if (ranks := inside(model)) is not None:
        ranks.before_forward()
    require_few(walk, pack.table.num_rows, f"model: a group of {pack.table.num_rows} rows")
    if store is not None:
        store.rewind()
    running = Running(pack.table, store, pack.first_row)
    states, again = tree_states(walk, pack.table), _recomputed_on_trees(walk, running)
    layers = to_compile(getattr(backbone(model), "layers", ()))
    adapters = one_pass_adapters(walk, compiled=bool(layers))
    with value_of(RUNNING, running), states, again, adapters, compiled_layers(layers):
        output = backbone(model)(
            input_ids=staged.input_ids,
            # An all-ones mask stops transformers from inferring packed sequences from restarting position ids.
            attention_mask=staged.everywhere,
            position_ids=staged.position_ids,
            use_cache=cache is not None,
            **({} if cache is None else {cache_argument(model): cache}),
            **({} if routers is None else {"output_router_logits": True}),
        )
    if routers is not None:
        routers.append(output.router_logits)
    return output.last_hidden_state[0]  # type: ignore[no-any-return]


def _recomputed_on_trees(walk: ModelWalk, running: Running) -> AbstractContextManager[None]:
    """Make checkpointed modules run again, in a backward, as inside: it may rerun layers of other forwards, too."""
    configs = [config for config in walk.configs if config._attn_implementation == ATTENTION]
    again = replace(running, store=None)

    def checkpointing(module: nn.Module, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def on_trees(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def run(*inputs: Any, **named: Any) -> Any:
                if RUNNING.get() is running:
                    return function(*inputs, **named)
                layers = to_compile([module])
                adapters = one_pass_adapters(walk, compiled=bool(layers), inside=module)
                states = tree_states(walk, running.table, inside=module)
                attention = attention_of(configs, ATTENTION)
                with value_of(RUNNING, again), attention, states, adapters, compiled_layers(layers):
                    return function(*inputs, **named)

            return checkpoint(run, *args, **kwargs)

        return on_trees

    return exchanged(
        (module, {name: checkpointing(module, module.__dict__[name])})
        for module in checkpointed_modules(walk)
        for name in ("_gradient_checkpointing_func", "checkpoint_fn")  # of transformers, of FSDP's wrapper
        if module.__dict__.get(name) is not None
    )


def pack_states(
    walk: ModelWalk, head: Head, pack: Pack, *, store: KeyValueStore | None = None, earlier: Tensor | None = None
) -> HeadRows:
    """Compute the rows of `pack` that have a target, by one forward inside `tree_attention_mode`.

    `head` is the one that was checked. A pack that continues another takes the other's `store` and hidden states
    (N, H), `earlier`.
    """
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
        for module in modules:
            if module is not None:
                _hook_rows(module, rows, stack)
        yield


def _hook_rows(module: nn.Module, rows: Tensor, undo: ExitStack) -> None:
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

    undo.enter_context(module.register_forward_pre_hook(select))
    undo.enter_context(module.register_forward_hook(spread))
