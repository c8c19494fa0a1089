"""Build every causal model type of transformers small enough for a CPU, with everything that its default has.

`table.py` scores these models. A small model keeps a whole period of the default's layer pattern, so that a
hybrid holds its linear attention and a sliding layer really slides: sequences are longer than `WINDOW`.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

WIDTH, HEADS, HEAD_DIM, LAYERS, WINDOW, CONTEXT = 64, 4, 16, 3, 24, 512
VOCABULARY = 256
TEXT_MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT_IDS = range(8, 200)  # what sequences are made of; ids above are left to images, sounds and the like

# What a field of that name becomes, in the configuration itself and in every configuration inside it.
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "embedding_size", "embedding_dim", "emb_dim", "input_embedding_size",
         "output_embedding_size", "word_embed_proj_dim", "attention_hidden_size", "lru_width", "hidden_size_global",
         "embed_dim", "adapter_in_dim", "adapter_out_dim", "adapter_input_size", "backbone_hidden_size",
         "projector_output_dim", "out_hidden_size", "router_hidden_size"),
        WIDTH,
    ),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "dim_ff",
         "dff", "d_ff", "d_inner", "feed_forward_size", "intermediate_size_mlp", "dense_intermediate_size"),
        96,
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_experts_intermediate_size",
         "shared_intermediate_size", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
        32,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
         "num_decoder_attention_heads", "num_encoder_attention_heads", "attention_heads", "index_n_heads",
         "swa_num_attention_heads", "linear_num_heads", "linear_num_value_heads"),
        HEADS,
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "num_query_groups", "swa_num_key_value_heads", "linear_num_key_heads"),
        HEADS // 2,
    ),
    **dict.fromkeys(
        ("head_dim", "kv_channels", "d_kv", "dim_head", "d_head", "attention_head_size", "swa_head_dim", "v_head_dim",
         "qk_nope_head_dim", "linear_head_dim", "linear_key_head_dim", "linear_value_head_dim", "index_head_dim",
         "kv_lora_rank", "laurel_rank", "d_rel", "ssm_state_size", "state_size", "mamba_d_state"),
        HEAD_DIM,
    ),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), HEAD_DIM // 2),
    **dict.fromkeys(("q_lora_rank", "o_lora_rank", "qk_head_dim"), HEAD_DIM * 3 // 2),
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "attention_window_size", "local_attention", "attention_chunk_size",
         "window_size", "local_attention_window_len", "rel_extent", "keep_window_size"),
        WINDOW,
    ),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "context_length",
         "max_target_positions", "n_ctx"),
        CONTEXT,
    ),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num"), 4
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "n_group",
         "num_expert_group"),
        2,
    ),
    **dict.fromkeys(("topk_group", "n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "depth", "num_blocks"), 1),
    **dict.fromkeys(
        ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "num_centroids", "audio_vocab_size"),
        VOCABULARY,
    ),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "block_size"), HEAD_DIM),  # of linear attention, at a time
    # Scales that change with the position, the first of them, as with real sizes, beyond every sequence of the table
    # and within a pack of several; and how many keys an indexer picks.
    "floor_scale": WINDOW * 16,
    "log_scaling_n_floor": HEAD_DIM,
    "index_topk": WINDOW,
}  # fmt: skip
# Factors whose default changes nothing, and a value that does.
NEUTRAL: dict[str, tuple[Any, Any]] = {
    "attention_in_multiplier": (1.0, 0.8),
    "attention_multiplier": (1.0, 0.3),
    "attention_out_multiplier": (1.0, 0.8),
    "attn_logit_softcapping": (None, 30.0),
    "clip_qkv": (None, 4.0),
    "embedding_multiplier": (1.0, 1.3),
    "final_logit_softcapping": (None, 20.0),
    "key_multiplier": (1.0, 0.8),
    "lm_head_bias": (False, True),
    "lm_head_multiplier": (1.0, 0.6),
    "logit_scale": (None, 0.4),
    "logits_scaling": (1.0, 1.7),
    "residual_multiplier": (1.0, 0.7),
    "ssm_in_multiplier": (1.0, 0.8),
    "ssm_out_multiplier": (1.0, 1.2),
}
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")


def _mixed(*kinds: str) -> dict[str, Any]:
    return {"layer_types": list(kinds), "num_hidden_layers": len(kinds)}


SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
_INDEXER = {
    "indexer_n_heads": HEADS, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM, "indexer_budget": WINDOW,
    "indexer_compress_ratio": 4, "hc_lowrank": 16, "output_gate_type": "sigmoid",
}  # fmt: skip
_DOTS3 = {
    "num_key_value_heads": HEADS,
    "head_dim": 32,
    "per_layer_config": {
        2: {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 32, "qk_nope_head_dim": 24}
    },
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# What a type needs beyond small sizes: values that it does not build without, a mixture of layers where its default
# names one kind only, sizes that depend on each other.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 128, "encoder_hash_byte_group_size": [3, 4]},
    "cohere_compass_text": {**_mixed(SLIDING, FULL, SLIDING), "rope_parameters": {SLIDING: _ROPE, FULL: _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 4.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "dots1": {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    },
    "dots3_note": {"text_config": _DOTS3},
    "dots3_note_text": _DOTS3,
    "gemma3": {"text_config": {"final_logit_softcapping": None}},  # this class does not read it
    "gemma3n_text": {
        **_mixed(SLIDING, FULL, SLIDING, FULL, SLIDING, FULL), "num_kv_shared_layers": 2,
        "intermediate_size": [96] * 6, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
    },
    "granitemoehybrid": {**_mixed(LINEAR, FULL, LINEAR), "num_local_experts": 4},
    "granitemoeshared": {"shared_intermediate_size": 32},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM},
    "lfm2": _mixed("conv", FULL, "conv"),
    "lfm2_moe": {**_mixed("conv", FULL, "conv"), "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {
        **_mixed(FULL, "minimax_m3_sparse", FULL), "index_block_size": 8, "index_topk_blocks": 2,
    },
    "ministral": {"head_dim": HEAD_DIM},
    "mpt": {"logit_scale": None},  # this class does not read it
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {
        "is_decoder": True, "axial_pos_shape": [16, 32], "axial_pos_embds_dim": [32, 32], "num_buckets": 4,
        "local_attn_chunk_length": 16, "lsh_attn_chunk_length": 16, "hash_seed": 0,
    },
    "roc_bert": {"pronunciation_vocab_size": 32, "shape_vocab_size": 32},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD_DIM, "num_hidden_layers": 5,
        "layers_block_type": [LINEAR, LINEAR, "hybrid", LINEAR, "hybrid"],
    },
    "zamba2": {
        "attention_hidden_size": 2 * WIDTH, "num_hidden_layers": 4,
        "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"], "hybrid_layer_ids": [1, 3],
    },
}  # fmt: skip
# What the class needs before it can be asked for its defaults.
NEEDED_BY_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
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


# Rows beside the default's. Positions beyond the length that a model was made for change its frequencies, in some by
# the longest sequence of a call, or its scales; a budget of keys that only long sequences exceed; layers that read the
# keys and values of an earlier layer.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic RoPE": ("llama", {"rope_parameters": {**_ROPE, "rope_type": "dynamic", "factor": 4.0}}),
    "yarn RoPE": ("llama", {"rope_parameters": {**_ROPE, "rope_type": "yarn", "factor": 8.0,
                                           "original_max_position_embeddings": 64}}),
    "longrope": ("phi3", {"rope_parameters": {**_ROPE, "rope_type": "longrope", "short_factor": [1.0] * 8,
                                              "long_factor": [1.5 + i for i in range(8)],
                                              "original_max_position_embeddings": 48},
                          "original_max_position_embeddings": 48}),
    "scales within a sequence": ("llama4_text", {"floor_scale": HEAD_DIM}),
    "a budget of 64 keys": ("minimax_m3_vl_text", {"index_topk_blocks": 8}),
    "shared keys and values": ("gemma4_text", {**_mixed(*[SLIDING, SLIDING, FULL] * 2), "num_kv_shared_layers": 3,
                                               "per_layer_config": {i: {"head_dim": 2 * HEAD_DIM} for i in (2, 5)}}),
    "mixture of experts": ("gemma4_text", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
                                           "moe_intermediate_size": 32}),
}  # fmt: skip


def model_types() -> list[str]:
    """Every type that `AutoModelForCausalLM` knows, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def cases(model_type: str) -> list[Case]:
    """The type as it is by default, then what its configuration can switch on: sliding windows, longer contexts."""
    found = [Case(model_type)]
    try:
        text = _text(default_config(model_type))
    except Exception:
        return found  # the default's own row will say why
    if hasattr(text, "sliding_window") and not _windows(text) and model_type not in ALREADY_SLIDING:
        changes = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}
        changes = {name: value for name, value in changes.items() if hasattr(text, name)}
        if "layer_types" in text.to_dict() and set(layer_kinds(text)) <= {FULL, "hybrid"}:
            (kind,) = layer_kinds(text)
            changes |= _mixed(SLIDING if kind == FULL else "hybrid_sliding", kind, kind)
        found.append(Case(model_type, "sliding windows", _in_text(default_config(model_type), changes)))
    found += [Case(model_type, label, changes) for label, (of, changes) in VARIANTS.items() if of == model_type]
    return found


def case(name: str) -> Case:
    """The case of that `Case.name`."""
    return next(found for found in cases(name.split(", ")[0]) if found.name == name)


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


def shrunken(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of `config` that change when it is made small, also those of the configurations inside it."""
    written = config.to_dict()
    per_layer, indices, layers = _per_layer(written), _indices(written), period(config)
    special = iter(range(TEXT_IDS.stop, VOCABULARY))
    fields: dict[str, Any] = {}
    for name, value in written.items():
        if name in config.sub_configs:
            inside = getattr(config, name)
            if inside is not None:
                fields[name] = shrunken(inside) | {"model_type": inside.model_type}
        elif name in LAYER_COUNTS and isinstance(value, int):
            fields[name] = layers
        elif name in indices:
            fields[name] = [index for index in value if index < layers]
        elif name in per_layer:
            fields[name] = [SIZES.get(name, each) if _is_size(each) else each for each in value[:layers]]
        elif name == "head_dim" and value == written.get("qk_rope_head_dim"):
            fields[name] = SIZES["qk_rope_head_dim"]
        elif name == "num_key_value_heads" and "kv_lora_rank" in written:
            fields[name] = HEADS  # latent attention has keys for every head
        elif name in NEUTRAL and value == NEUTRAL[name][0]:
            fields[name] = NEUTRAL[name][1]
        elif name in SIZES and _is_size(value):
            fields[name] = SIZES[name]
        elif name == "per_layer_config" and value:
            fields[name] = {
                layer: {of: SIZES[of] * size // written[of] if of in SIZES else size for of, size in sizes.items()}
                for layer, sizes in value.items()
                if int(layer) < layers
            }
        elif name == "is_decoder":
            fields[name] = True
        elif name == "rope_parameters" and value:
            fields[name] = _short_rope(value)
        elif re.search("_token_(id|index)$", name) and type(value) in (int, list):
            fields[name] = TEXT_MARKS[name] if name in TEXT_MARKS else next(special)
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
