"""The one place that knows transformers models as such: what lies in their wrappers, their head, their limits."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from .ops.linear_logprob import linear_logprob
from .tree import Query

_Result = TypeVar("_Result")


def run_inside(model: nn.Module, causal: PreTrainedModel, body: Callable[[], _Result]) -> _Result:
    """`body()`, run as the forward of whatever wraps `causal` for distributed training, so that it sees it."""
    wrapper = next((w for w in _wrappers(model) if isinstance(w, DistributedDataParallel)), None)
    if wrapper is None:
        return body()
    own = causal.__dict__.get("forward")

    def redirected(*_: object, **__: object) -> _Result:
        restore()
        return body()

    def restore() -> None:
        if own is None:
            causal.__dict__.pop("forward", None)
        else:
            causal.forward = own

    causal.forward = redirected  # type: ignore[method-assign]
    try:
        return wrapper(input_ids=None)
    finally:
        restore()


def _wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """`model` and what it wraps, down to the transformers model."""
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        yield inner
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif isinstance(getattr(inner, "module", None), nn.Module):
            inner = inner.module
        else:
            raise TypeError(f"model must be a transformers causal language model, got {type(model).__name__}")
    yield inner


@dataclass(frozen=True)
class Head:
    """The output layer: `logits = softcap(logit_scale * (hidden @ weight.T + bias))`."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    softcap: float | None = None
    logit_scale: float = 1.0

    @property
    def options(self) -> dict[str, Any]:
        """What `linear_logprob` and `linear_policy_loss` must know beside the weight."""
        return {"bias": self.bias, "softcap": self.softcap, "logit_scale": self.logit_scale}

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, V) logits of `hidden` (R, H), differentiable."""
        return self.transformed(nn.functional.linear(hidden, self.weight, self.bias))

    def transformed(self, linear: Tensor) -> Tensor:
        """Logits, a tensor of its own, from what the linear layer gives: scaled, then capped; differentiable."""
        logits = self.logit_scale * linear
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
        """Log-probs of `targets` (R,) given `hidden` (R, H), fp32, in nats."""
        return linear_logprob(hidden, self.weight, targets, temperature=temperature, **self.options)


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside DDP, torch.compile and PEFT wrappers, adapter layers still in place.

    Raises `NotImplementedError` for PEFT methods that do not act on each token by itself, `TypeError` for anything
    that is not a transformers causal model, both naming the class.
    """
    for inner in _wrappers(model):
        _refuse_adapters(inner)
    assert isinstance(inner, PreTrainedModel)
    embedded = getattr(_input_embeddings(inner), "weight", None)
    if not isinstance(embedded, Tensor) or embedded.ndim != 2:
        raise NotImplementedError(f"model: {type(inner).__name__} has no one table of token embeddings")
    if inner.get_output_embeddings() is None or backbone(inner) is inner:
        raise NotImplementedError(f"model: {type(inner).__name__} has no language-model head on a body of its own")
    return inner


def _input_embeddings(model: PreTrainedModel) -> nn.Module | None:
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


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


def apart_by_length(
    model: PreTrainedModel, units: Sequence[list[Query]], lengths: Sequence[int], order: Sequence[int]
) -> list[list[list[Query]]]:
    """The units cut into parts that must not share a forward, each with every row.

    Rotary frequencies of some models change for a whole forward when its longest sequence passes a length. Each row,
    of `lengths` tokens in all, then keeps the frequencies that it has when fed alone and whole: rows on both sides
    are fed apart, and a longer row is fed far enough for its side. `order` holds the caller's number of each row.
    """
    switches, dynamic = rope_lengths(model)
    if dynamic is not None:
        for unit, length, b in zip(units, lengths, order, strict=True):
            if unit and length > dynamic:
                raise NotImplementedError(
                    f"completions row {b}: has {length} tokens with its prompt, but beyond {dynamic} the dynamic "
                    f"rotary frequencies of {type(model).__name__} are another set for every length, so rows cannot "
                    "share a forward"
                )
    if not switches:
        return [list(units)]
    sides = [sum(length > switch for switch in switches) for length in lengths]
    parts = []
    for side in sorted(set(sides)):
        least = switches[side - 1] + 1 if side else 0
        parts.append(
            [
                [query.fed_to(least) for query in unit] if of == side else []
                for unit, of in zip(units, sides, strict=True)
            ]
        )
    return parts


def largest_forward(model: PreTrainedModel) -> int | None:
    """Most rows of a forward in which a row's place does not matter; None where it never does.

    Llama 4 scales the queries of layers without rotary embeddings by a row's place, in steps of this many.
    """
    steps = [
        int(module.floor_scale) - 1  # type: ignore[arg-type]
        for module in model.modules()
        if getattr(module, "attn_temperature_tuning", False) and hasattr(module, "floor_scale")
    ]
    return min(steps, default=None)


# Beyond this a forward gains nothing from more rows: matrix products are full, and a CPU's caches overflow.
_LARGEST_BUDGET = {"cpu": 2048, "cuda": 65536}


def rows_per_forward(model: PreTrainedModel, token_budget: int | None) -> int:
    """`token_budget`, by default `default_token_budget`, within `largest_forward`."""
    if token_budget is None:
        return default_token_budget(model)
    return min(token_budget, largest_forward(model) or token_budget)


def default_token_budget(model: PreTrainedModel, *, training: bool = False) -> int:
    """Tokens per packed forward: on a GPU what half of the free memory holds, at least 1,024.

    The estimate counts a layer's widest moment, the MLP's or attention's intermediate results and the residual; for
    `training` what every layer keeps for the backward, or with checkpointing its input alone.
    """
    device = embedding(model).device
    largest = min(_LARGEST_BUDGET["cuda" if device.type == "cuda" else "cpu"], largest_forward(model) or 1 << 30)
    if device.type != "cuda":
        return largest
    config = model.config.get_text_config()
    width = config.hidden_size
    heads = config.num_attention_heads * (getattr(config, "head_dim", None) or width // config.num_attention_heads)
    widest = max(4 * (getattr(config, "intermediate_size", None) or 4 * width), 8 * heads)
    bytes_per_token = model.dtype.itemsize * (widest + 4 * width) + 12 * width
    if training and checkpoints(model):
        bytes_per_token += config.num_hidden_layers * width * model.dtype.itemsize
    elif training:
        bytes_per_token *= config.num_hidden_layers
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(min(max(free // 2 // bytes_per_token, 1024), largest))


def structure(model: nn.Module, *, forwards: bool = False) -> int:
    """Equal as long as the model has the same modules: an adapter put on, taken off or merged changes it.

    With `forwards` also as long as they run the same `forward`, of their own or of their class.
    """
    if not forwards:
        return hash(tuple((name, type(module)) for name, module in model.named_modules()))
    return hash(
        tuple(
            (name, type(module), _function(module.__dict__.get("forward", type(module).forward)))
            for name, module in model.named_modules()
        )
    )


_SHAPES_LOGITS = re.compile("cap|logit|scale|scaling|multiplier|dim_model_base")
_NOISE = re.compile("drop|jitter|noise")
_NO_NOISE = re.compile("^(classifier|summary)")  # of heads that a language model does not have


def computation(model: PreTrainedModel) -> int:
    """Equal as long as the model computes by the same code, from the same numbers beside its weights.

    What it looks at: `structure` with forwards; caps and scales of logits, of the model's own or in its configuration;
    `noise_settings`; the hooks on the model, its body, its embedding and its head. A hook or a number on another
    module, or a function of the model's file that is exchanged, does not change it.
    """
    hooked = [model, backbone(model), model.get_input_embeddings(), model.get_output_embeddings()]
    return hash(
        (
            structure(model, forwards=True),
            *(item for owner in (model, *_configs(model)) for item in _numbers(owner, _SHAPES_LOGITS)),
            *noise_settings(model),
            *(_hook(hook) for module in hooked if module is not None for hook in _hooks(module)),
        )
    )


def noise_settings(model: PreTrainedModel) -> list[tuple[str, float]]:
    """What its configuration says about noise in training mode: names and values above 0 of dropout, jitter, noise."""
    found = dict.fromkeys(item for config in _configs(model) for item in _numbers(config, _NOISE))
    return [(name, value) for name, value in found if value > 0 and not _NO_NOISE.search(name)]


def _configs(model: PreTrainedModel) -> list[Any]:
    return list({id(config): config for config in (model.config, model.config.get_text_config())}.values())


def _numbers(owner: object, names: re.Pattern) -> list[tuple[str, float]]:
    attributes = [(name, value) for name, value in vars(owner).items() if isinstance(value, (int, float))]
    return [(name, value) for name, value in attributes if not isinstance(value, bool) and names.search(name)]


def _hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def _hook(hook: Any) -> object:
    """What a hook is known by: one that the same code makes anew from the same numbers is the same."""
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    if code is None:
        return id(hook)
    inside = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    return id(code), *(value for value in inside if isinstance(value, (int, float)))


def _function(called: Any) -> int:
    """What a function is known by, bound or not."""
    return id(getattr(called, "__func__", called))


def checkpoints(model: nn.Module) -> bool:
    """Whether layers run again in the backward instead of keeping what it needs."""
    return any(getattr(module, "gradient_checkpointing", False) and module.training for module in model.modules())


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
