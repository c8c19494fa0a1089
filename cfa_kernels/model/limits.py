"""Limits of the rows that may share a forward: positions, rotary frequencies, memory."""

import numbers
from collections.abc import Sequence

from transformers import PreTrainedModel

from ..tree.prefix_tree import Query
from .compiled import any_liger, to_compile
from .memory import free_memory
from .modes import checkpointed_modules
from .parts import backbone, input_device
from .walk import Model, ModelWalk


def rope_lengths(model: Model) -> tuple[list[int], int | None]:
    """Find lengths beyond which rotary frequencies follow the longest sequence: of longrope, of dynamic ones."""
    switches, dynamic = set(), []
    for module in ModelWalk.of(model).having("rope_type"):
        kinds = module.rope_type
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind == "longrope":
                parameters = module.config.rope_parameters
                parameters = parameters if layer_type is None else parameters[layer_type]
                switches.add(int(parameters["original_max_position_embeddings"]))
            elif isinstance(kind, str) and "dynamic" in kind:
                dynamic.append(int(module.original_max_seq_len))
    return sorted(switches), min(dynamic, default=None)


def refuse_length_dependent_rope(model: Model, longest: int) -> None:
    """Raise `NotImplementedError` if rows of up to `longest` tokens change each other's positions in a batch."""
    walk = ModelWalk.of(model)
    switches, dynamic = rope_lengths(walk)
    for length in [*switches, dynamic]:
        if length is not None and longest > length:
            raise NotImplementedError(
                f"model: the rotary frequencies of {type(walk.model).__name__} change for a whole batch once a row is "
                f"longer than {length} tokens, and rows may reach {longest}: then a row's log-probs would depend on "
                f"its neighbours; keep prompt and completion within {length} tokens"
            )


def apart_by_length(
    walk: ModelWalk, bundles: Sequence[list[Query]], order: Sequence[int]
) -> tuple[Sequence[list[Query]], list[list[int]]]:
    """Split bundles, none of them empty, into parts that must not share a forward; return bundles as fed, and parts.

    Each row keeps the rotary frequencies of its longest query; `order` holds the caller's number of each.
    """
    switches, dynamic = rope_lengths(walk)
    if not switches and dynamic is None and largest_forward(walk) is None:
        return bundles, [[*range(len(bundles))]]
    lengths = [max(query.length for query in bundle) for bundle in bundles]
    for bundle, length, b in zip(bundles, lengths, order, strict=True):
        if dynamic is not None and length > dynamic:
            raise NotImplementedError(
                f"completions row {b}: has {length} tokens with its prompt, but beyond {dynamic} the dynamic rotary "
                f"frequencies of {type(walk.model).__name__} are other ones for every length, so rows cannot share a "
                "forward"
            )
        longest = max(len(query.tokens) for query in bundle)
        require_few(walk, longest, f"completions row {b}: a sequence of {longest} tokens")
    sides = [sum(length > switch for switch in switches) for length in lengths]
    least = [0, *(switch + 1 for switch in switches)]
    if switches:
        bundles = [[q.fed_to(least[side]) for q in bundle] for bundle, side in zip(bundles, sides, strict=True)]
    parts = [[i for i, own in enumerate(sides) if own == side] for side in sorted(set(sides))]
    return bundles, parts


def require_few(walk: ModelWalk, rows: int, what: str) -> None:
    """Raise `NotImplementedError` for `what` if the model scales queries by their place among so many `rows`."""
    if (most := largest_forward(walk)) is not None and rows > most:
        raise NotImplementedError(
            f"{what} must share one forward, but {type(walk.model).__name__} scales queries by their place in a "
            f"forward of more than {most} rows; take shorter completions or masks"
        )


def largest_forward(walk: ModelWalk) -> int | None:
    """Find the most rows of a forward in which a row's place does not matter; None if it never matters."""
    # Llama 4 scales the queries of layers without rotary embeddings by a row's place, in steps of this many.
    steps = [
        int(module.floor_scale) - 1
        for module in walk.having("attn_temperature_tuning")
        if module.attn_temperature_tuning and hasattr(module, "floor_scale")
    ]
    return min(steps, default=None)


# More rows than these make a forward no faster: matrix products are saturated, and a CPU's caches overflow.
_ON_CPU, _ON_GPU = 2048, 65536


def smallest_budget(*token_budgets: int | None) -> int | None:
    """Return the smallest of several `token_budget`, None if each is; raise `ValueError` for one that is no number."""
    given = [budget for budget in token_budgets if budget is not None]
    for budget in given:
        if isinstance(budget, bool) or not isinstance(budget, numbers.Integral):
            raise ValueError(f"token_budget must be a whole number of tokens, got {budget!r}")
        if budget < 1:
            raise ValueError(f"token_budget must be at least 1, got {budget}")
    return min(given, default=None)


def rows_per_forward(walk: ModelWalk, token_budget: int | None) -> int:
    """Return `token_budget`, by default `default_token_budget`, capped by `largest_forward`."""
    if (budget := smallest_budget(token_budget)) is None:
        return default_token_budget(walk)
    return min(budget, largest_forward(walk) or budget)


def default_token_budget(model: Model, *, training: bool = False) -> int:
    """Estimate tokens per packed forward: on a GPU what half of the free memory holds, at least 1,024.

    For `training` it holds what layers keep for the backward.
    """
    walk = ModelWalk.of(model)
    model, device = walk.model, input_device(walk.model)
    largest = min(_ON_GPU if device.type == "cuda" else _ON_CPU, largest_forward(walk) or _ON_GPU)
    if device.type != "cuda":
        return largest
    bytes_per_token = kept_per_row(walk) if training else _layer_per_row(model, whole=False)
    return int(min(max(free_memory(device) // 2 // bytes_per_token, 1024), largest))


def kept_per_row(walk: ModelWalk) -> int:
    """Estimate the bytes that all layers keep of a row for a backward; adapters are in the margin.

    With checkpointing the layers keep their inputs, and one of them the rest.
    """
    # A model's own norms and gates keep float32 copies and every intermediate result; Liger's and compiled ones do not.
    model, config = walk.model, walk.model.config.get_text_config()
    lean = any_liger(walk) or to_compile(getattr(backbone(model), "layers", ()))
    layers, of_a_layer = int(config.num_hidden_layers), _layer_per_row(model, whole=not lean)
    if checkpointed_modules(walk):
        return of_a_layer + layers * int(config.hidden_size) * model.dtype.itemsize
    return layers * of_a_layer


def _layer_per_row(model: PreTrainedModel, *, whole: bool) -> int:
    """Bytes of a row in a layer: MLP plus attention if `whole`, else the wider of both; and the residual."""
    config = model.config.get_text_config()
    width = config.hidden_size
    heads = config.num_attention_heads * (getattr(config, "head_dim", None) or width // config.num_attention_heads)
    parts = 4 * (getattr(config, "intermediate_size", None) or 4 * width), 8 * heads
    return model.dtype.itemsize * ((sum(parts) if whole else max(parts)) + 4 * width) + 12 * width
