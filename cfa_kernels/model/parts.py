"""Find the causal model inside its wrappers, its parts, and what decides how it computes."""

import re
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .walk import ModelWalk


def wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield `model` and the modules inside it, wrapper by wrapper, down to the transformers model."""
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


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """Find the transformers model inside DDP, torch.compile and PEFT wrappers, adapter layers still in place.

    Raises `NotImplementedError` for adapters that do not act on each token by itself, `TypeError` for other models.
    """
    for inner in wrappers(model):
        _refuse_adapters(inner)
    assert isinstance(inner, PreTrainedModel)
    name = type(inner).__name__
    try:
        embeddings = inner.get_input_embeddings()
    except NotImplementedError:
        embeddings = None
    # The weight of an `nn.Embedding` is not read: under ZeRO-3 that is a gathering, which all processes must join.
    if not isinstance(embeddings, nn.Embedding) and getattr(getattr(embeddings, "weight", None), "ndim", 0) != 2:
        raise NotImplementedError(f"model: {name} has no single token-embedding matrix")
    if not _has_head(inner):
        parts = [(key, part) for key, part in inner.named_children() if _has_head(part)]
        remedy = "".join(f"; pass model.{key}, a {type(part).__name__}, for text" for key, part in parts)
        raise NotImplementedError(f"model: {name} has no LM head separate from its backbone{remedy}")
    return inner


def _has_head(model: Any) -> bool:
    is_model = isinstance(model, PreTrainedModel)
    return is_model and model.get_output_embeddings() is not None and backbone(model) is not model


_REFUSED_ADAPTERS = {
    "is_prompt_learning": "adds virtual prompt tokens",
    "is_adaption_prompt": "adds virtual tokens to the attention",
    "alora_invocation_tokens": "as activated LoRA (alora_invocation_tokens) switches on at a position of each prompt",
}


def _refuse_adapters(model: nn.Module) -> None:
    adapters = getattr(model, "peft_config", None)
    for config in adapters.values() if isinstance(adapters, dict) else ():
        method = str(getattr(config.peft_type, "value", config.peft_type))
        reasons = [reason for name, reason in _REFUSED_ADAPTERS.items() if getattr(config, name, None)]
        reasons += ["mixes adapters by the whole input"] if method in ("XLORA", "POLY") else []
        if reasons:
            raise NotImplementedError(f"model: {type(model).__name__}: {method} {reasons[0]}; use plain LoRA instead")


def backbone(model: PreTrainedModel) -> nn.Module:
    """Return the part of a causal model below its head, from ids to hidden states; the model itself if it has none."""
    body = model.base_model
    return body if body is not model else getattr(model, "model", model)


def embedding(model: PreTrainedModel) -> Tensor:
    """Weight (V, H) of the input embedding."""
    return cast(Tensor, model.get_input_embeddings().weight)


def input_device(model: PreTrainedModel) -> torch.device:
    """Device that ids must be on."""
    # The first kind of FSDP keeps flat parameters, in the layers around the embedding.
    return next(chain(model.get_input_embeddings().parameters(), model.parameters())).device


def vocab_size(model: PreTrainedModel) -> int:
    """Number of rows of the input embedding: ids in [0, this) can be fed."""
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)  # right also for a weight in pieces
    return len(embedding(model)) if rows is None else int(rows)


def context_length(model: PreTrainedModel | PreTrainedConfig) -> int | None:
    """Longest sequence the model, or one of this configuration, was made for, if it says."""
    config = (model if isinstance(model, PreTrainedConfig) else model.config).get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    if not (isinstance(longest, int) and longest > 0):
        return None
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type") not in ("yarn", "linear"):
        return longest
    # Stretched from a context that the configuration may still name.
    return max(longest, int((rope.get("factor") or 1) * (rope.get("original_max_position_embeddings") or longest)))


_SHAPES_LOGITS = re.compile("cap|logit|scale|scaling|multiplier|dim_model_base")
_NOISE = re.compile("drop|jitter|noise")


def computation(walk: ModelWalk) -> tuple[Any, ...]:
    """Equal as long as a model that stays as recorded computes alike: caps and scales of logits, own attention."""
    items = [item for owner in (walk.model, *configs(walk.model)) for item in vars(owner).items()]
    return *(i for i in items if _SHAPES_LOGITS.search(i[0]) and _is_number(i[1])), *own_attention(walk).items()


def own_attention(walk: ModelWalk) -> dict[str, Any]:
    """Return the functions of attention and masks that a model is set to and that transformers does not bring."""
    names = dict.fromkeys(name for config in walk.configs if isinstance(name := config._attn_implementation, str))
    interfaces: tuple[Any, ...] = ALL_MASK_ATTENTION_FUNCTIONS, ALL_ATTENTION_FUNCTIONS
    known = [(name, each[name]) for name in names for each in interfaces if name in each]
    return {name: function for name, function in known if not _is_known(function)}


def _is_known(function: Any) -> bool:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__module__", "").startswith(("transformers.", f"{__name__.partition('.')[0]}."))


def noise_remedy(model: PreTrainedModel) -> str:
    """Say how to load the model without the noise of its configuration; empty if that has none."""
    items = [item for config in configs(model) for item in vars(config).items()]
    names = {name for name, value in items if _NOISE.search(name) and _is_number(value) and value > 0}
    return f" (from_pretrained takes {', '.join(f'{name}=0' for name in sorted(names))})" if names else ""


def active_noise(walk: ModelWalk) -> Iterator[tuple[str, str, float]]:
    """Yield dropout, jitter and other noise above 0 of modules in training mode: module's name, attribute, value."""
    noisy = {
        kind: ["p"] if issubclass(kind, nn.modules.dropout._DropoutNd) else [*filter(_NOISE.search, vars(each[0]))]
        for kind, each in walk.by_class.items()
    }
    for name, module in walk.modules.items():
        for attribute in noisy[type(module)] if module.training else ():
            value: Any = getattr(module, attribute, None)
            if _is_number(value) and value > 0:
                yield name, "dropout" if attribute == "p" else attribute, value


def configs(model: PreTrainedModel) -> list[Any]:
    """Return the configuration of a model and that of its text, once if they are one."""
    return list({id(config): config for config in (model.config, model.config.get_text_config())}.values())


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
