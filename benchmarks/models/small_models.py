"""Build every causal model type of transformers small enough for a CPU, with everything that its default has.

`table.py` scores these models; `small_models.yaml` says what becomes small. A small model keeps a whole period of the
default's layer pattern, so that a hybrid holds its linear attention and a sliding layer really slides: sequences are
longer than `WINDOW`.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
import yaml
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_DATA = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SIZES: dict[str, int] = {name: size for size, names in _DATA["sizes"].items() for name in names}
OVERRIDES: dict[str, dict[str, Any]] = _DATA["overrides"]
VARIANTS: dict[str, dict[str, dict[str, Any]]] = _DATA["variants"]
"""By model type and name of the row, what is changed."""

WIDTH, LAYERS, WINDOW, CONTEXT = SIZES["hidden_size"], 3, SIZES["sliding_window"], SIZES["n_positions"]
VOCABULARY = SIZES["vocab_size"]
TEXT_MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT_IDS = range(8, 200)  # what sequences are made of; ids above are left to images, sounds and the like
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
# Options that a class needs before it gives its defaults.
NEEDED_BY_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}
}
# Types whose causal model takes a part of their configuration.
PARTS = {"musicgen": "decoder", "musicgen_melody": "decoder"}
# Types that slide by default or by `OVERRIDES` though no layer type of their default says so.
ALREADY_SLIDING = ("cohere_compass_text", "deepseek_v4")
# Layers that carry a state from token to token, though the configuration does not call them so.
RECURRENT = ("rwkv", "xlstm")


@dataclass(frozen=True)
class Case:
    """One row of the table: a model type, and what is changed from its default, if anything."""

    model_type: str
    variant: str = ""
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.model_type}, {self.variant}" if self.variant else self.model_type

    @property
    def model_class(self) -> str:
        return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.model_type]


def model_types() -> list[str]:
    """Every type that `AutoModelForCausalLM` knows, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def cases(model_type: str) -> list[Case]:
    """The type as it is by default, then what its configuration can switch on: sliding windows, longer contexts."""
    result = [Case(model_type)]
    try:
        text = _text(default_config(model_type))
    except Exception:
        return result  # the default's own row will say why
    if hasattr(text, "sliding_window") and not _windows(text) and model_type not in ALREADY_SLIDING:
        changes = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}
        changes = {name: value for name, value in changes.items() if hasattr(text, name)}
        if "layer_types" in text.to_dict() and set(layer_kinds(text)) <= {FULL, "hybrid"}:
            (kind,) = layer_kinds(text)
            changes["layer_types"] = [SLIDING if kind == FULL else "hybrid_sliding", kind, kind]
            changes["num_hidden_layers"] = 3
        result.append(Case(model_type, "sliding windows", _in_text(default_config(model_type), changes)))
    return result + [Case(model_type, label, changes) for label, changes in VARIANTS.get(model_type, {}).items()]


def case(name: str) -> Case:
    """The case of that `Case.name`."""
    return next(result for result in cases(name.split(", ")[0]) if result.name == name)


def default_config(model_type: str) -> PreTrainedConfig:
    """The configuration that the type has when nothing is said."""
    return CONFIG_MAPPING[model_type](**NEEDED_BY_DEFAULTS.get(model_type, {}))


def build(of: Case, seed: int = 0) -> PreTrainedModel:
    """The small model in float32 and evaluation mode on the CPU, its weights drawn by `seed`.

    Raises whatever transformers raises where the type does not build; `what_is_missing` tells whether it is whole.
    """
    config = small_config(of)
    torch.manual_seed(seed)
    model = _construct(of.model_type, config).float().eval()
    draw_weights(model, seed)
    return model


def what_is_missing(of: Case, model: PreTrainedModel) -> list[str]:
    """Kinds of layers and classes of modules that the type's default has and `model` lacks."""
    config = default_config(of.model_type)
    missing = set(layer_kinds(config)) - set(layer_kinds(model.config))
    try:
        with torch.device("meta"):
            whole = _construct(of.model_type, config)
    except Exception:
        return sorted(missing)  # a default that does not build has no modules to compare with
    classes = {type(module).__name__ for module in whole.modules() if not isinstance(module, nn.Identity)}
    return sorted(missing | (classes - {type(module).__name__ for module in model.modules()}))


def _construct(model_type: str, config: PreTrainedConfig) -> PreTrainedModel:
    if part := PARTS.get(model_type):
        return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])(getattr(config, part))
    return AutoModelForCausalLM.from_config(config)


# Configurations


def small_config(of: Case) -> PreTrainedConfig:
    """The default configuration of the type with small sizes and a whole period of its layers."""
    default = default_config(of.model_type)
    fields = _merged(NEEDED_BY_DEFAULTS.get(of.model_type, {}), shrunken(default))
    if part := PARTS.get(of.model_type):
        fields[part] |= OVERRIDES[of.model_type]
    else:
        fields = _merged(fields, OVERRIDES.get(of.model_type, {}))
    return type(default)(**_merged(fields, of.changes))


class _Field(NamedTuple):
    """A field of a configuration that is made small."""

    name: str
    value: Any
    config: PreTrainedConfig
    written: dict[str, Any]
    layers: int
    special: Any  # ids for tokens that no text has


def _small_layers(one: _Field) -> list[Any]:
    return [SIZES.get(one.name, each) if _is_size(each) else each for each in one.value[: one.layers]]


def _small_sizes_by_layer(one: _Field) -> dict[Any, Any]:
    return {
        layer: {of: SIZES[of] * size // one.written[of] if of in SIZES else size for of, size in sizes.items()}
        for layer, sizes in one.value.items()
        if int(layer) < one.layers
    }


def _inside(one: _Field) -> dict[str, Any]:
    config = getattr(one.config, one.name)
    return shrunken(config) | {"model_type": config.model_type}


def _is_token(one: _Field) -> bool:
    return bool(re.search("_token_(id|index)$", one.name)) and type(one.value) in (int, list)


_RULES: tuple[tuple[Callable[[_Field], bool], Callable[[_Field], Any]], ...] = (
    (lambda one: one.name in one.config.sub_configs, _inside),
    (lambda one: one.name in LAYER_COUNTS and isinstance(one.value, int), lambda one: one.layers),
    (lambda one: one.name in _indices(one.written), lambda one: [i for i in one.value if i < one.layers]),
    (lambda one: one.name in _per_layer(one.written), _small_layers),
    (lambda one: one.name == "head_dim" and one.value == one.written.get("qk_rope_head_dim"),
     lambda one: SIZES["qk_rope_head_dim"]),
    # Latent attention has keys for every head.
    (lambda one: one.name == "num_key_value_heads" and "kv_lora_rank" in one.written, lambda one: SIZES["n_heads"]),
    (lambda one: one.name in _DATA["neutral"] and one.value == _DATA["neutral"][one.name][0],
     lambda one: _DATA["neutral"][one.name][1]),
    (lambda one: one.name in SIZES and _is_size(one.value), lambda one: SIZES[one.name]),
    (lambda one: one.name == "per_layer_config" and one.value, _small_sizes_by_layer),
    (lambda one: one.name == "is_decoder", lambda one: True),
    (lambda one: one.name == "rope_parameters" and one.value, lambda one: _short_rope(one.value)),
    (_is_token, lambda one: TEXT_MARKS[one.name] if one.name in TEXT_MARKS else next(one.special)),
)  # fmt: skip
"""Whether a rule is for a field, and what the field becomes; the first that is counts."""


def shrunken(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of `config` that change when it is made small, also those of the configurations inside it."""
    written, layers, special = config.to_dict(), period(config), iter(range(TEXT_IDS.stop, VOCABULARY))
    fields: dict[str, Any] = {}
    for name, value in written.items():
        if name in config.sub_configs and getattr(config, name) is None:
            continue
        one = _Field(name, value, config, written, layers, special)
        small = next((becomes for applies, becomes in _RULES if applies(one)), None)
        if small is not None:
            fields[name] = small(one)
    return fields


def _short_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """`rope` for a model that was first made for fewer positions than the sequences have, for each kind of layer."""
    inside = {name: _short_rope(value) for name, value in rope.items() if isinstance(value, dict)}
    trained = {name: WINDOW for name in rope if name == "original_max_position_embeddings"}
    return {**rope, **inside, **trained}


def period(config: PreTrainedConfig) -> int:
    """Count the first layers that include every kind of the configuration, at least `LAYERS` in a text model."""
    written = config.to_dict()
    total = _depth(written)
    least = LAYERS if _is_text(config) else 1
    if total is None:
        return least
    indices = _indices(written)
    patterns: list[Sequence[Any]] = [values for name, values in _per_layer(written).items() if name not in indices]
    if isinstance(types := getattr(config, "layer_types", None), (list, tuple)):
        patterns.append(types)
    patterns += [[layer in listed for layer in range(total)] for listed in indices.values()]
    return max([least, *(max(pattern.index(kind) for kind in pattern) + 1 for pattern in patterns)])


def layer_kinds(config: PreTrainedConfig) -> list[str]:
    """List the kinds of layers, by transformers' names for them, sorted."""
    text = _text(config)
    names = ("layer_types", "layers_block_type", "attention_layers", "attn_layers", "block_types")
    for name in names:
        if types := getattr(text, name, None):
            return sorted(set(types))
    if text.model_type in RECURRENT:
        return [LINEAR]
    return [SLIDING] if _windows(text) else [FULL]


def _windows(text: PreTrainedConfig) -> bool:
    """Whether some layer slides."""
    types = getattr(text, "layer_types", None)
    if types:
        return any("sliding" in kind for kind in types)
    return bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True)


def _text(config: PreTrainedConfig) -> PreTrainedConfig:
    part = PARTS.get(config.model_type)
    return getattr(config, part) if part else config.get_text_config(decoder=True)


def _in_text(config: PreTrainedConfig, changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` where `config` keeps its language model."""
    inside = [name for name in config.sub_configs if getattr(config, name) is _text(config)]
    return {inside[0]: changes} if inside else changes


def _is_text(config: PreTrainedConfig) -> bool:
    return "vocab_size" in config.to_dict()


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _depth(written: dict[str, Any]) -> int | None:
    """Number of layers of the decoder."""
    counts = [written.get(name) for name in reversed(LAYER_COUNTS)]
    return next((count for count in counts if isinstance(count, int)), None)


def _per_layer(written: dict[str, Any]) -> dict[str, Sequence[Any]]:
    """The fields that say something of each layer."""
    depth = _depth(written)
    return {name: value for name, value in written.items() if isinstance(value, list | tuple) and len(value) == depth}


def _indices(written: dict[str, Any]) -> dict[str, list[int]]:
    """The fields that list layers by number."""
    names = r"(_layers|_idxs|_layer_ids|_layers_indices|_attn_indexes|_layer_indices)$"
    return {
        name: value
        for name, value in written.items()
        if re.search(names, name)
        and isinstance(value, list)
        and value
        and all(type(each) is int for each in value)
        and not set(value) <= {0, 1}
    }


def _merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`fields` with `changes` put in, also inside the configurations that it holds."""
    out = dict(fields)
    for name, value in changes.items():
        both = isinstance(value, dict) and isinstance(out.get(name), dict) and name.endswith("config")
        out[name] = _merged(out[name], value) if both else value
    return out


# Weights


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int) -> None:
    """Weights as large and as uneven as trained ones, so that attention, norms and biases all move the result.

    Matrices keep the size of what they multiply, their rows spread log-normally; biases, norms, sinks and other
    vectors move away from the 0 or 1 they start at. Larger weights would be chaotic: recurrent layers would carry a
    rounding error to thousandths of a nat.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator)

    matrices = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            matrices[id(module.weight)] = 0.4
        elif isinstance(module, nn.Linear):
            matrices.setdefault(id(module.weight), 1 / math.sqrt(module.weight.shape[1]))
    for parameter in model.parameters():
        if id(parameter) in matrices or (parameter.ndim > 1 and parameter.std() < 0.1):
            std = matrices.get(id(parameter), 1 / math.sqrt(WIDTH))
            parameter.copy_(normal(parameter) * (0.3 * normal(parameter[..., :1])).exp() * std)
        elif parameter.ndim == 1:
            parameter.add_(0.2 * normal(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(0.1 * normal(buffer))
