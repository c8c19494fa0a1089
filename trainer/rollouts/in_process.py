"""Complete prompts with transformers' `generate`, in the process that trains and from its weights."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase, StaticCache
from transformers.cache_utils import DynamicCache

from cfa_kernels.hf.head import decoding_head
from cfa_kernels.hf.model import causal_lm

from ..precision import frozen_copy
from .engine import Rollouts, end_ids, require_finite_logits
from .merged import CannotMerge, merged_adapters
from .sampling import KeyedSampler, keyed_uniforms

_FEWEST_ROWS = 8  # of a static cache; others are powers of two
_LENGTHS = 64  # tokens that a static cache holds are a multiple of it, so that shapes repeat


class TransformersEngine:
    """The policy itself as an engine: adapters merged while it samples, a static cache where there are CUDA graphs."""

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype | None = None, *,
        static: bool | None = None,
    ) -> None:  # fmt: skip
        """Find out what `model`, the policy, can do.

        With `dtype` a copy of it in that type samples, rounded anew from its weights at every call. With `static`, by
        default on a GPU, keys and values have a cache of fixed size, and a decoding step is one CUDA graph.
        """
        self._policy, self._tokenizer = model, tokenizer
        self._model = model = model if dtype is None else frozen_copy(model, dtype)
        self.notes: list[str] = []
        try:
            with merged_adapters(model) as layers:
                self._merges = layers > 0
        except CannotMerge as problem:
            self._merges = False
            self.notes.append(f"sampling with the adapters beside the weights, for {problem}")
        self._cache: StaticCache | None = None  # stays: a CUDA graph reads and writes where it was recorded
        self._shape = 0, 0  # its rows and tokens
        self._static = next(model.parameters()).device.type == "cuda" if static is None else static
        if self._static and (obstacle := static_cache_obstacle(causal_lm(model))):
            self._static = False
            self.notes.append(f"sampling with a cache that grows, for {obstacle}; every layer of a step is launched")

    def __call__(self, prompts: Sequence[Sequence[int]], **options: Any) -> Rollouts:
        """Complete prompts as `Engine` says."""
        if self._model is not self._policy:  # in the memory that a CUDA graph reads weights from
            with torch.no_grad():
                for rounded, weight in zip(self._model.parameters(), self._policy.parameters(), strict=True):
                    rounded.copy_(weight)
        with merged_adapters(self._model) if self._merges else contextlib.nullcontext():
            if not self._static:
                return generate(self._model, self._tokenizer, prompts, **options)
            cache = self._cache_for(len(prompts), max(map(len, prompts)) + options["max_completion_length"])
            return generate(self._model, self._tokenizer, prompts, **options, cache=cache, rows=self._shape[0])

    def weights_changed(self) -> None:
        """Do nothing: the policy's own weights sample."""

    def _cache_for(self, rows: int, longest: int) -> StaticCache:
        capacity = max(_FEWEST_ROWS, 1 << (rows - 1).bit_length())
        length = max(-(-longest // _LENGTHS) * _LENGTHS, self._shape[1])
        if self._cache is None or self._shape != (capacity, length):
            config = causal_lm(self._model).config.get_text_config(decoder=True)
            self._cache, self._shape = None, (capacity, length)  # one is freed before the next is made
            self._cache = StaticCache(config=config, max_cache_len=length)
        elif self._cache.is_initialized:
            self._cache.reset()
        return self._cache


def static_cache_obstacle(model: PreTrainedModel) -> str | None:
    """Say why `model` cannot decode with a cache of fixed size; None where it can."""
    name = type(model).__name__
    if not getattr(model, "_can_compile_fullgraph", False):
        return f"transformers cannot compile a decoding step of {name}"
    kinds = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ["full_attention"])
    if others := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"layers of {name} keep other states than keys and values ({', '.join(others)})"
    return None


@torch.no_grad()
def generate(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]], *,
    max_completion_length: int, keys: Sequence[Sequence[int]] | None = None, temperature: float = 1.0,
    top_p: float = 1.0, names: Sequence[str] | None = None, cache: StaticCache | None = None, rows: int = 0,
) -> Rollouts:  # fmt: skip
    """Complete B prompts with `model` as it is, as `Engine` says. Leaves the model in the mode it was in.

    Args:
        cache: an empty one of fixed size, for `rows` rows.
        rows: decoded together, at least B: the last prompt again and again, left out of the result.
    """
    device, count = next(model.parameters()).device, len(prompts)
    inputs = [list(prompt) for prompt in [*prompts, *[prompts[-1]] * (rows - count)]]
    batch = tokenizer.pad({"input_ids": inputs}, return_tensors="pt", padding_side="left").to(device)
    prompt_ids, prompt_mask, uniforms = batch["input_ids"], batch["attention_mask"], None
    if keys is not None:
        keys = [*keys, *[keys[-1]] * (len(inputs) - count)]
        uniforms = keyed_uniforms(keys, max_completion_length).to(device)
    sampler, ends = KeyedSampler(uniforms, temperature, top_p), end_ids(model, tokenizer)
    causal, training = causal_lm(model), model.training
    model.eval()
    try:
        filled: Any = cache
        if cache is None and not static_cache_obstacle(causal):  # layers keep keys and values only
            filled = _prompt_cache(causal, prompt_ids, prompt_mask)
        with decoding_head(causal) if cache is None else contextlib.nullcontext():  # or compiled
            sequences = model.generate(  # type: ignore[operator]
                input_ids=prompt_ids,
                attention_mask=prompt_mask,
                max_new_tokens=max_completion_length,
                logits_processor=LogitsProcessorList([sampler]),
                do_sample=False,
                eos_token_id=ends,
                pad_token_id=tokenizer.pad_token_id,
                past_key_values=filled,
            )
    finally:
        model.train(training)
    completions = sequences[:count, prompt_ids.shape[1] :].tolist()
    rollouts = Rollouts.padded(prompts, completions, ends, tokenizer, device)
    require_finite_logits(torch.stack(sampler.finite, 1)[:count], rollouts.completion_mask, names)
    if keys is None:
        return rollouts
    return dataclasses.replace(rollouts, logprobs=torch.stack(sampler.logprobs, 1)[:count] * rollouts.completion_mask)


def _prompt_cache(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> DynamicCache | None:
    """Feed prompts (B, P) but for their last token, equal ones once; None where no two are equal."""
    rows, places = torch.cat([ids, mask], 1).unique(dim=0, return_inverse=True)
    if len(rows) == len(ids) or ids.shape[1] == 1:
        return None
    cache, (ids, mask) = DynamicCache(config=model.config), (part[:, :-1] for part in rows.chunk(2, 1))
    at = (mask.cumsum(1) - 1).clamp(min=0)
    model.get_decoder()(input_ids=ids, attention_mask=mask, position_ids=at, past_key_values=cache, use_cache=True)
    cache.batch_select_indices(places)
    return cache
