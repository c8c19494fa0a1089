"""The one place that knows transformers models: tree attention inside them, and the head beside them.

Whether a model computes the same this way as by itself is shown once, by `proof.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from .ops.linear_logprob import linear_logprob
from .ops.tree_attention import SegmentTable, tree_attention
from .recurrent import tree_states
from .tree import Pack, Query

ATTENTION = "cfa_tree"

# Arguments some models hand to their attention that change its result and that tree attention does not implement.
_UNSUPPORTED_ARGUMENTS = ("position_bias", "cache_position_bias", "head_mask", "block_mask", "score_mod", "indices")


@dataclass(frozen=True)
class Visibility:
    """What a row may look back at: everything, a window of so many positions, or its own chunk of positions."""

    sliding_window: int | None = None
    chunk_size: int | None = None


class TreeMask:
    """Stands where a layer expects its attention mask: the pack's segments and what that layer may look back at.

    No dataclass: wrappers that cast what a module is given rebuild those, and would upload the table in every layer.
    """

    def __init__(self, table: SegmentTable, visibility: Visibility) -> None:
        self.table = table
        self.visibility = visibility


@dataclass
class _PackedForward:
    """The packed forward under way."""

    table: SegmentTable
    attended: list[str] | None  # names of the attention layers that ran, if anyone counts


_FORWARD: ContextVar[_PackedForward | None] = ContextVar("cfa_packed_forward", default=None)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: TreeMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention in transformers' calling convention: q (1, H, N, D), k, v (1, Hkv, N, D or Dv) -> (1, N, H, Dv)."""
    name = type(module).__name__
    if query.shape[0] != 1:
        raise NotImplementedError(f"{name} runs on a batch of {query.shape[0]}; a packed tree is one sequence")
    if not isinstance(attention_mask, TreeMask):
        if attention_mask is not None:
            raise NotImplementedError(f"{name} is given an attention mask that transformers' mask builder did not make")
        if sliding_window is not None:
            raise NotImplementedError(f"{name} has a sliding window and no attention mask that says which")
        forward = _FORWARD.get()
        if forward is None:
            raise RuntimeError(f"{name} runs tree attention outside a packed forward")
        attention_mask = TreeMask(forward.table, Visibility())
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise NotImplementedError(f"{name} attends in both directions; a causal model is needed")
    if dropout:
        raise NotImplementedError(f"{name} asks for attention dropout {dropout}, which tree attention does not have")
    for argument in _UNSUPPORTED_ARGUMENTS:
        if kwargs.get(argument) is not None:
            raise NotImplementedError(f"{name} uses {argument}, which tree attention does not have")
    if (running := _FORWARD.get()) is not None and running.attended is not None:
        running.attended.append(name)
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # as PyTorch's own attention: norms and rotary embeddings left float32
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    out = tree_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        attention_mask.table,
        scale=scaling,
        sliding_window=attention_mask.visibility.sliding_window,
        attention_chunk_size=attention_mask.visibility.chunk_size,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


def _build_mask(
    *,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    device: torch.device | None = None,
    **_: object,
) -> TreeMask:
    """What transformers' mask builder calls for a layer's mask; it says by `mask_function` who sees whom."""
    forward = _FORWARD.get()
    if forward is None:
        raise RuntimeError(f"attn_implementation={ATTENTION!r} runs inside a packed forward alone")
    return TreeMask(forward.table, read_visibility(mask_function, local_size, device))


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _build_mask)

_VISIBILITY: dict[tuple, Visibility] = {}


def read_visibility(
    mask_function: Callable[..., Any], local_size: int | None, device: torch.device | None = None
) -> Visibility:
    """The rule that `mask_function(batch, head, query position, key position)` follows, found by asking it.

    Read from the function itself, so that a window which lives in the mask alone is seen. Raises
    `NotImplementedError` for a rule that is not causal, a causal window or a causal chunk.
    """
    key = (local_size, _shape(mask_function))
    if key not in _VISIBILITY:
        _VISIBILITY[key] = _ask(mask_function, local_size, device)
    return _VISIBILITY[key]


def _ask(mask_function: Callable[..., Any], local_size: int | None, device: torch.device | None) -> Visibility:
    size = local_size or 8
    near = [edge * size + step for edge in range(4) for step in range(-3, 4)]
    positions = torch.tensor(sorted({p for p in [*near, *range(8)] if p >= 0}))
    query, key = positions[:, None], positions[None, :]
    try:
        seen = mask_function(0, 0, query.to(device), key.to(device))
    except Exception as error:  # a rule that looks at tokens, or at a table of this very batch
        raise NotImplementedError(
            f"its attention mask is no rule of positions ({type(error).__name__}: {error})"
        ) from error
    seen = torch.as_tensor(seen).cpu().expand(len(positions), len(positions))
    causal = key <= query
    if torch.equal(seen, causal):
        return Visibility()
    if local_size is not None and torch.equal(seen, causal & (query - key < local_size)):
        return Visibility(sliding_window=local_size)
    if local_size is not None and torch.equal(seen, causal & (query // local_size == key // local_size)):
        return Visibility(chunk_size=local_size)
    raise NotImplementedError("its attention mask is neither causal nor a causal window or chunk")


def _shape(function: Any) -> object:
    """A key by which two mask functions that the same code built from the same numbers are equal."""
    if not callable(function):
        return function if isinstance(function, (int, float, str, type(None))) else type(function)
    if not hasattr(function, "__code__"):
        return object()  # nothing to know it by: equal to no other
    inside = [cell.cell_contents for cell in function.__closure__ or ()]
    parts = [part for item in inside for part in (item if isinstance(item, (tuple, list)) else [item])]
    return (function.__code__, *map(_shape, parts))


@dataclass(frozen=True)
class Head:
    """The output layer: `logits = softcap(logit_scale * (hidden @ weight.T + bias))`."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    softcap: float | None = None
    logit_scale: float = 1.0

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
        """Log-probs of `targets` (R,) given `hidden` (R, H), fp32, in nats."""
        return linear_logprob(
            hidden, self.weight, targets, bias=self.bias, temperature=temperature, softcap=self.softcap,
            logit_scale=self.logit_scale,
        )  # fmt: skip


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside DDP, torch.compile and PEFT wrappers, adapter layers still in place.

    Raises `NotImplementedError` for PEFT methods that do not act on each token by itself, `TypeError` for anything
    that is not a transformers causal model, both naming the class.
    """
    inner: Any = model
    while True:
        _refuse_adapters(inner)
        if isinstance(inner, PreTrainedModel):
            break
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif isinstance(getattr(inner, "module", None), nn.Module):
            inner = inner.module
        else:
            raise TypeError(f"model must be a transformers causal language model, got {type(model).__name__}")
    if inner.get_output_embeddings() is None or backbone(inner) is inner:
        raise NotImplementedError(f"model: {type(inner).__name__} has no language-model head on a body of its own")
    return inner


def _refuse_adapters(model: nn.Module) -> None:
    """Adapters whose layers need more than their own input: extra tokens, or a look at the whole prompt."""
    configs = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        method = str(getattr(config.peft_type, "value", config.peft_type))
        reason = None
        if getattr(config, "is_prompt_learning", False):
            reason = f"{method} adds virtual prompt tokens"
        elif getattr(config, "is_adaption_prompt", False):
            reason = f"{method} adds virtual tokens to the attention"
        elif getattr(config, "alora_invocation_tokens", None):
            reason = "activated LoRA (alora_invocation_tokens) switches on at a place in each prompt"
        elif method in ("XLORA", "POLY"):
            reason = f"{method} mixes adapters by the whole input"
        if reason:
            raise NotImplementedError(f"model: {type(model).__name__}: {reason}; use plain LoRA instead")


def backbone(model: PreTrainedModel) -> nn.Module:
    """The part of a causal model below its head, which maps ids to hidden states; the model itself if it has none."""
    body = model.base_model
    return body if body is not model else getattr(model, "model", model)


def read_head(model: PreTrainedModel) -> Head:
    """The head's weight and bias. What the model does to its logits besides is `proof.prove_head`'s to find out.

    Raises `NotImplementedError` unless the layer is a plain linear one: an adapter on it may be the identity today
    and drift in training.
    """
    layer: Any = model.get_output_embeddings()
    if hasattr(layer, "modules_to_save"):
        layer = layer.original_module if layer.disable_adapters else layer.modules_to_save[layer.active_adapter]
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        raise NotImplementedError(
            f"model: the output layer of {type(model).__name__} is {type(layer).__module__}.{type(layer).__name__}, "
            "not a plain linear layer; leave lm_head out of target_modules, or name it in modules_to_save"
        )
    return Head(layer.weight, layer.bias)


def embedding(model: PreTrainedModel) -> Tensor:
    """(V, H) weight of the input embedding: its device is where ids go in."""
    return cast(Tensor, model.get_input_embeddings().weight)


def vocab_size(model: PreTrainedModel) -> int:
    """Rows of the input embedding: ids from 0 up to this can be fed."""
    return len(embedding(model))


def context_length(model: PreTrainedModel) -> int | None:
    """Longest sequence the model was made for, if its configuration says."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def rope_lengths(model: PreTrainedModel) -> tuple[list[int], int | None]:
    """Where the model's rotary frequencies follow the longest sequence of a forward.

    Returns the lengths beyond which longrope takes its other set of frequencies, ascending, and the length beyond
    which dynamic scaling recomputes them for each length (None without it).
    """
    switches, dynamic = set(), []
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind == "longrope":
                parameters = module.config.rope_parameters
                parameters = parameters if layer_type is None else parameters[layer_type]
                switches.add(int(parameters["original_max_position_embeddings"]))
            elif isinstance(kind, str) and "dynamic" in kind:
                dynamic.append(int(module.original_max_seq_len))
    return sorted(switches), min(dynamic, default=None)


def refuse_length_dependent_rope(model: PreTrainedModel, longest: int) -> None:
    """Raise `NotImplementedError` if rows of up to `longest` tokens, in one batch, change each other's positions.

    For padded batches, whose rotary frequencies follow their longest row; packed scoring keeps such rows apart.
    """
    switches, dynamic = rope_lengths(model)
    for length in [*switches, *([] if dynamic is None else [dynamic])]:
        if longest > length:
            raise NotImplementedError(
                f"model: the rotary frequencies of {type(model).__name__} change for a whole batch once a row is "
                f"longer than {length} tokens, and rows may reach {longest}: then a row's log-probs would depend on "
                f"its neighbours; keep prompt and completion within {length} tokens"
            )


def apart_by_length(model: PreTrainedModel, units: list[list[Query]], order: list[int]) -> list[list[list[Query]]]:
    """The units cut into parts that must not share a forward, each with every row.

    Rotary frequencies of some models change for a whole forward when its longest sequence passes a length; what is
    shorter and what is longer is then fed apart, as if each sequence were fed alone.
    """
    switches, dynamic = rope_lengths(model)
    if dynamic is not None:
        for unit, b in zip(units, order, strict=True):
            if longest := max((len(query.tokens) for query in unit if len(query.tokens) > dynamic), default=0):
                raise NotImplementedError(
                    f"completions row {b}: feeds {longest} tokens, but beyond {dynamic} the dynamic rotary frequencies "
                    f"of {type(model).__name__} are another set for every length, so rows cannot share a forward"
                )
    if not switches:
        return [units]
    side = {id(query): sum(len(query.tokens) > s for s in switches) for unit in units for query in unit}
    return [
        [[query for query in unit if side[id(query)] == part] for unit in units] for part in sorted(set(side.values()))
    ]


# Beyond this a forward gains nothing from more rows: matrix products are full, and a CPU's caches overflow.
_LARGEST_BUDGET = {"cpu": 2048, "cuda": 65536}


def default_token_budget(model: PreTrainedModel) -> int:
    """Tokens per packed forward: on a GPU what half of the free memory holds, at least 1,024.

    The estimate counts a layer's widest moment: the MLP's or attention's intermediate results and the residual.
    """
    device = embedding(model).device
    if device.type != "cuda":
        return _LARGEST_BUDGET["cpu"]
    config = model.config.get_text_config()
    width = config.hidden_size
    heads = config.num_attention_heads * (getattr(config, "head_dim", None) or width // config.num_attention_heads)
    widest = max(4 * (getattr(config, "intermediate_size", None) or 4 * width), 8 * heads)
    bytes_per_token = model.dtype.itemsize * (widest + 4 * width) + 12 * width
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(min(max(free // 2 // bytes_per_token, 1024), _LARGEST_BUDGET["cuda"]))


@contextmanager
def evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Every module in evaluation mode and no gradients; each module's own mode comes back, also after an error."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Attention `name` in every layer; each configuration's own comes back, also after an error.

    Raises `NotImplementedError` if the model does not go through transformers' attention interface.
    """
    if not model._can_set_attn_implementation():
        raise NotImplementedError(f"model: {type(model).__name__} does not use transformers' attention interface")
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    implementations = [(config, config._attn_implementation) for config in configs.values()]
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        for config, implementation in implementations:
            config._attn_implementation = implementation


@contextmanager
def tree_attention_mode(model: PreTrainedModel) -> Iterator[None]:
    """`evaluation_mode` with tree attention in every layer."""
    with attention_implementation(model, ATTENTION), evaluation_mode(model):
        yield


def packed_hidden(model: PreTrainedModel, pack: Pack, attended: list[str] | None = None) -> Tensor:
    """Hidden states (N, H) of a pack's rows as the head takes them, by one forward.

    Call with tree attention set. `attended` collects the name of every attention layer that ran.
    """
    device = embedding(model).device
    token = _FORWARD.set(_PackedForward(pack.table, attended))
    try:
        with tree_states(model, pack.table):
            return backbone(model)(
                input_ids=_to(pack.input_ids, device)[None],
                # A mask, so that position ids that start again are not taken for sequences laid end to end.
                attention_mask=torch.ones(1, pack.num_tokens, dtype=torch.long, device=device),
                position_ids=_to(pack.position_ids, device)[None],
                use_cache=False,
            ).last_hidden_state[0]
    finally:
        _FORWARD.reset(token)


def pack_logprobs(
    model: PreTrainedModel, head: Head, pack: Pack, temperature: float = 1.0, attended: list[str] | None = None
) -> Tensor:
    """Log-prob of every target of `pack`, (R,) fp32, by one forward; the tempered ones at `temperature`.

    Call inside `tree_attention_mode`, with the `head` that was proven.
    """
    with _last_layer_on_rows(model, np.unique(pack.rows)):
        hidden = packed_hidden(model, pack, attended)
    rows = hidden.index_select(0, _to(pack.rows, hidden.device)).to(head.weight)
    targets = _to(pack.targets, rows.device)
    plain = len(pack.rows) - pack.num_tempered
    parts = [(rows[:plain], targets[:plain], 1.0), (rows[plain:], targets[plain:], temperature)]
    return torch.cat([head.logprobs(*part) for part in parts if len(part[0])])


@contextmanager
def _last_layer_on_rows(model: PreTrainedModel, rows: np.ndarray) -> Iterator[None]:
    """Run the last layer's attention output and MLP, which nothing else reads, on `rows` alone.

    Both act on each token by itself, so they are given the rows that the head will see and their results are put
    back among zeros. Queries stay whole: the attention module norms and rotates them beside the keys, which every
    row needs. Where a model names its layers otherwise, all rows are computed, to the same result.
    """
    layers = getattr(backbone(model), "layers", None)
    last = layers[-1] if isinstance(layers, nn.ModuleList) and len(layers) else None
    modules = [getattr(last, "mlp", None), getattr(getattr(last, "self_attn", None), "o_proj", None)]
    hooks = [hook for module in modules if module is not None for hook in _hook_rows(module, rows)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _hook_rows(module: nn.Module, rows: np.ndarray) -> list[RemovableHandle]:
    """Hooks under which `module`, given (1, N, H), computes `rows` and returns zeros elsewhere."""
    seen: list[tuple[Tensor, int]] = []

    def select(_: nn.Module, args: tuple) -> tuple:
        index = _to(rows, args[0].device)
        seen.append((index, args[0].shape[1]))
        return (args[0].index_select(1, index), *args[1:])

    def spread(_: nn.Module, args: tuple, output: Tensor | tuple) -> Tensor | tuple:
        index, length = seen.pop()
        some = output[0] if isinstance(output, tuple) else output
        full = some.new_zeros(1, length, some.shape[-1]).index_copy_(1, index, some)
        return (full, *output[1:]) if isinstance(output, tuple) else full

    return [module.register_forward_pre_hook(select), module.register_forward_hook(spread)]


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
