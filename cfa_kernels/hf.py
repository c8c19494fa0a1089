"""The one place that knows transformers models: tree attention inside them, and the head beside them."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedModel

from .ops.linear_logprob import linear_logprob
from .ops.tree_attention import SegmentTable, tree_attention
from .tree import Pack, Query, pack_units

ATTENTION = "cfa_tree"

# Arguments some models hand to their attention that change its result and that tree attention does not implement.
_UNSUPPORTED_ARGUMENTS = ("s_aux", "position_bias", "cache_position_bias", "head_mask")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    segment_table: SegmentTable | None = None,
    attended: list[str] | None = None,
    is_causal: bool | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention in transformers' calling convention: q (1, H, N, D), k and v (1, Hkv, N, D) -> (1, N, H, D)."""
    name = type(module).__name__
    if segment_table is None:
        raise ValueError(f"{name} did not pass segment_table on to its attention; this model is not supported")
    if attention_mask is not None or query.shape[0] != 1:
        raise ValueError(f"{name} built an attention mask or a batch; tree attention packs one sequence without")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise NotImplementedError(f"{name} attends in both directions; counterfactual scoring needs a causal model")
    if dropout:
        raise ValueError(f"{name} asks for attention dropout {dropout}; score in evaluation mode")
    for argument in _UNSUPPORTED_ARGUMENTS:
        if kwargs.get(argument) is not None:
            raise NotImplementedError(f"{name} uses {argument}, which tree attention does not implement")
    if attended is not None:
        attended.append(name)
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # as PyTorch's own attention: norms and rotary embeddings left float32
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    out = tree_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        segment_table,
        scale=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attention)


@dataclass(frozen=True)
class Head:
    """The output layer: `logits = softcap(logit_scale * (hidden @ weight.T + bias))`."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    softcap: float | None
    logit_scale: float

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
        """Log-probs of `targets` (R,) given `hidden` (R, H), fp32, in nats."""
        return linear_logprob(
            hidden, self.weight, targets, bias=self.bias, temperature=temperature, softcap=self.softcap,
            logit_scale=self.logit_scale,
        )  # fmt: skip


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside DDP, torch.compile and PEFT wrappers, adapter layers still in place.

    Raises `NotImplementedError` for PEFT methods that work by extra prompt tokens, `TypeError` for anything
    that is not a transformers causal model, both naming the class.
    """
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        if any(getattr(config, "is_prompt_learning", False) for config in _peft_configs(inner)):
            raise NotImplementedError(f"model: {type(inner).__name__} adds virtual prompt tokens; use LoRA instead")
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif isinstance(getattr(inner, "module", None), nn.Module):
            inner = inner.module
        else:
            raise TypeError(f"model must be a transformers causal language model, got {type(model).__name__}")
    if inner.get_output_embeddings() is None or inner.base_model is inner:
        raise TypeError(f"model must have a language-model head, {type(inner).__name__} has none")
    return inner


def _peft_configs(model: nn.Module) -> list[object]:
    configs = getattr(model, "peft_config", None)
    return list(configs.values()) if isinstance(configs, dict) else []


def read_head(model: PreTrainedModel) -> Head:
    """The head's weight and what the model does to its logits. Raises `NotImplementedError` for LoRA on it."""
    layer = model.get_output_embeddings()
    if hasattr(layer, "modules_to_save"):
        layer = layer.modules_to_save[layer.active_adapter]
    if hasattr(layer, "lora_A"):
        raise NotImplementedError(
            "model: LoRA on the output layer is not supported; leave lm_head out of target_modules"
        )
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(layer.weight, getattr(layer, "bias", None), softcap, scale)


def embedding(model: PreTrainedModel) -> Tensor:
    """(V, H) weight of the input embedding: its device is where ids go in."""
    return cast(Tensor, model.get_input_embeddings().weight)


def vocab_size(model: PreTrainedModel) -> int:
    """Rows of the input embedding: ids from 0 up to this can be fed."""
    return len(embedding(model))


def context_length(model: PreTrainedModel) -> int | None:
    """Longest sequence the model was made for, if its configuration says."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


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
    heads = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    widest = max(4 * config.intermediate_size, 8 * heads)
    bytes_per_token = model.dtype.itemsize * (widest + 4 * config.hidden_size) + 12 * config.hidden_size
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
def tree_attention_mode(model: PreTrainedModel) -> Iterator[None]:
    """`evaluation_mode` with tree attention in every layer; the implementation comes back as well.

    Raises `NotImplementedError` if the model does not go through transformers' attention interface.
    """
    if not model._can_set_attn_implementation():
        raise NotImplementedError(
            f"model: {type(model).__name__} does not use transformers' attention interface, so it cannot be scored"
        )
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    implementations = [(config, config._attn_implementation) for config in configs.values()]
    try:
        model.set_attn_implementation(ATTENTION)
        with evaluation_mode(model):
            yield
    finally:
        for config, implementation in implementations:
            config._attn_implementation = implementation


def pack_logprobs(
    model: PreTrainedModel, pack: Pack, temperature: float = 1.0, attended: list[str] | None = None
) -> Tensor:
    """Log-prob of every target of `pack`, (R,) fp32, by one forward; the tempered ones at `temperature`.

    Call inside `tree_attention_mode`. `attended` collects the name of every attention layer that ran.
    """
    device = embedding(model).device
    with _last_layer_on_rows(model, np.unique(pack.rows)):
        hidden = model.base_model(
            input_ids=_to(pack.input_ids, device)[None],
            position_ids=_to(pack.position_ids, device)[None],
            use_cache=False,
            segment_table=pack.table,
            attended=attended,
        ).last_hidden_state[0]
    head = read_head(model)
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
    layers = getattr(model.base_model, "layers", None)
    last = layers[-1] if layers is not None and len(layers) else None
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


_PROVEN: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
# In nats: far above rounding, far below what a wrong mask, position or logit transform does.
_PROBE_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}


def prove_supported(model: PreTrainedModel) -> None:
    """Once per model object: score a tiny branching tree and compare with the model's own forward.

    Catches what no attribute tells: layers without attention, masks built elsewhere, logits changed after the
    head. Raises `NotImplementedError` with the layers or the difference in nats.
    """
    if model in _PROVEN:
        return
    ids = (np.arange(12, dtype=np.int64) * 7 + 1) % vocab_size(model)
    branch = ids.copy()
    branch[3:5] = ids[7]
    queries = [Query(tokens, 6, ids[7:]) for tokens in (ids[:-1], branch[:-1])]
    (pack,) = pack_units([queries], token_budget=len(ids) * 2)
    attended: list[str] = []
    with tree_attention_mode(model):
        ours = (
            pack_logprobs(model, pack, attended=attended)[torch.from_numpy(pack.query_index)].float().view(2, -1).cpu()
        )
    layers = model.config.get_text_config().num_hidden_layers
    if len(attended) != layers:
        raise NotImplementedError(
            f"model: {type(model).__name__} used tree attention in {len(attended)} of its {layers} layers; what the "
            "others do with a packed tree is unknown, so it cannot be scored"
        )
    with evaluation_mode(model):
        device = embedding(model).device
        logits = model(input_ids=torch.from_numpy(np.stack([q.tokens for q in queries])).to(device)).logits
        theirs = logits[:, 6:].float().log_softmax(-1).cpu()
        theirs = theirs.gather(-1, torch.from_numpy(ids[7:])[None, :, None].expand(2, -1, 1))[..., 0]
    gap = (ours - theirs).abs().max().item()
    kind = next(model.parameters()).device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype
    if not gap <= _PROBE_TOLERANCE.get(dtype, 0.5):
        raise NotImplementedError(
            f"model: {type(model).__name__} does not compute the same in a packed tree as with attn_implementation="
            f"{model.config._attn_implementation!r} (log-probs differ by {gap:.3g} nats), so it cannot be scored"
        )
    _PROVEN.add(model)
