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
from trainer.precision import frozen_copy
from trainer.rollouts.engine import Rollouts, end_ids, keyed_uniforms, require_finite
from trainer.rollouts.merged import CannotMerge, merged_adapters
from trainer.rollouts.sampling import FiniteScores, KeyedSampler
from trainer.rollouts.settings import RolloutSettings

_FEWEST_ROWS = 8  # of a static cache, doubled until the batch fits
_LENGTHS = 64  # tokens that a static cache holds are a multiple of it, so that shapes repeat


class TransformersEngine:
    """The policy itself as an engine: adapters merged while it samples, a static cache where there are CUDA graphs.

    With a `dtype` it is a copy of the policy in that type, rounded anew from its weights at every call.
    """

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, settings: RolloutSettings,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Find out what `model` can do; raises `ValueError` for a setting that it cannot follow, with the reason."""
        self._policy, self._tokenizer = model, tokenizer
        self._model = model = model if dtype is None else frozen_copy(model, dtype)
        self.notes: list[str] = []
        self._merges = settings.merge_adapters != "never" and self._can_merge(settings)
        self._cache: StaticCache | None = None  # kept: a CUDA graph reads and writes where it was recorded
        self._shape = 0, 0  # its rows and tokens
        on_gpu = next(model.parameters()).device.type == "cuda"
        wanted = settings.rollout_cache == "static" or (settings.rollout_cache == "auto" and on_gpu)
        obstacle = static_cache_obstacle(causal_lm(model)) if wanted else None
        if obstacle and settings.rollout_cache == "static":
            raise ValueError(f"rollout_cache: static was asked for, and {obstacle}; auto takes what the model can")
        if obstacle:
            self.notes.append(f"rollout_cache: dynamic, for {obstacle}; every layer of a decoding step is launched")
        self._static = wanted and not obstacle

    def __call__(self, prompts: Sequence[Sequence[int]], **options: Any) -> Rollouts:
        """Complete prompts as `Engine` says."""
        causal = causal_lm(self._model)
        self._round()
        with contextlib.ExitStack() as stack:
            if self._merges:
                stack.enter_context(merged_adapters(self._model))
            if not self._static:
                return generate(self._model, self._tokenizer, prompts, **options)
            longest = max(map(len, prompts)) + options["max_completion_length"]
            cache = self._cache_for(causal, len(prompts), longest)
            return generate(self._model, self._tokenizer, prompts, **options, cache=cache, rows=self._shape[0])

    @torch.no_grad()
    def _round(self) -> None:
        # A copy of the policy gets the weights of now in the memory that a CUDA graph reads them from.
        if self._model is not self._policy:
            for rounded, weight in zip(self._model.parameters(), self._policy.parameters(), strict=True):
                rounded.copy_(weight)

    def weights_changed(self) -> None:
        """Do nothing: the policy's own weights sample."""

    def _can_merge(self, settings: RolloutSettings) -> bool:
        try:
            with merged_adapters(self._model) as layers:
                return layers > 0
        except CannotMerge as problem:
            if settings.merge_adapters == "always":
                raise ValueError(f"merge_adapters: {problem}; auto samples with the adapters beside") from problem
            self.notes.append(f"merge_adapters: sampling with the adapters beside the weights, for {problem}")
            return False

    def _cache_for(self, causal: PreTrainedModel, rows: int, longest: int) -> StaticCache:
        held_rows = _FEWEST_ROWS
        while held_rows < rows:
            held_rows *= 2
        held = max(-(-longest // _LENGTHS) * _LENGTHS, self._shape[1])
        if self._cache is None or self._shape != (held_rows, held):
            self._cache, self._shape = None, (held_rows, held)  # one is freed before the next is made
            self._cache = StaticCache(config=causal.config.get_text_config(decoder=True), max_cache_len=held)
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
    device = next(model.parameters()).device
    count, inputs = len(prompts), [list(prompt) for prompt in prompts]
    inputs += inputs[-1:] * (rows - count)
    batch = tokenizer.pad({"input_ids": inputs}, return_tensors="pt", padding_side="left")
    prompt_ids, prompt_mask = batch["input_ids"].to(device), batch["attention_mask"].to(device)
    scores, sampler = FiniteScores(), None
    if keys is not None:
        keys = [*keys, *[keys[-1]] * (len(inputs) - count)]
        sampler = KeyedSampler(keyed_uniforms(keys, max_completion_length).to(device), temperature, top_p)
    special: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
    causal, training = causal_lm(model), model.training
    model.eval()
    try:
        if cache is None and not static_cache_obstacle(causal):  # layers keep keys and values only
            special["past_key_values"] = _prompt_cache(causal, prompt_ids, prompt_mask)
        with decoding_head(causal) if cache is None else contextlib.nullcontext():  # or compiled
            sequences = model.generate(  # type: ignore[operator]
                input_ids=prompt_ids,
                attention_mask=prompt_mask,
                max_new_tokens=max_completion_length,
                logits_processor=LogitsProcessorList([scores, sampler] if sampler else [scores]),
                do_sample=False,
                eos_token_id=end_ids(model, tokenizer),
                pad_token_id=tokenizer.pad_token_id,
                **special,
            )
    finally:
        model.train(training)
    completion_ids = sequences[:count, prompt_ids.shape[1] :]
    rollouts = Rollouts.of(
        prompt_ids[:count], prompt_mask[:count], completion_ids, end_ids(model, tokenizer), tokenizer
    )
    require_finite(torch.stack(scores.finite, 1)[:count], rollouts, names)
    if sampler is None:
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
