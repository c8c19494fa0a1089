"""Complete prompts in the process that trains and from its weights."""

import contextlib
import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from cfa_kernels import KeptTokens
from cfa_kernels.model.compiled import compile_copies
from cfa_kernels.model.head import decoding_head
from cfa_kernels.model.merged import CannotMerge, merged_adapters
from cfa_kernels.model.modes import evaluation_mode
from cfa_kernels.model.parts import backbone, causal_lm
from cfa_kernels.model.walk import ModelWalk

from ..precision import frozen_copy
from .decoding import LOOK, Decoder, Sampling
from .engine import Engine, Rollouts, end_ids, lengths_before, notes_on_ends, require_finite_logits
from .sampling import KeptRecord, draw, keyed_uniforms

Decode = Callable[[Tensor, Tensor, Tensor, Sampling], tuple[Tensor, Tensor, list[KeptTokens] | None]]
"""From prompts, their mask and draws to tokens, log-probs and nuclei, as `Decoder` says."""


class TransformersEngine(Engine):
    """The policy itself as an engine: adapters merged while it samples, a cache that stays, CUDA graphs on a GPU."""

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype | None = None, *,
        captured: bool | None = None, longest: int = 0, thought_tags: str = "", stop: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Find out what `model`, the policy, can do.

        With `dtype` a copy of it in that type samples, rounded from its weights at every call. If `captured`, by
        default on a GPU, a decoding step is a CUDA graph. `longest` is the room of the first cache, `thought_tags` as
        in `AnswerRules`, `stop` as in `lengths_before`.
        """
        self._policy, self._tokenizer, self._thought_tags, self._stop = model, tokenizer, thought_tags, stop
        self._model = model = model if dtype is None else frozen_copy(model, dtype)
        self.notes = notes_on_ends(model, tokenizer)
        try:
            with merged_adapters(model) as layers:
                self._merges = layers > 0
        except CannotMerge as problem:
            self._merges = False
            self.notes.append(f"sampling with unmerged adapters, for {problem}")
        causal, on_gpu = causal_lm(model), next(model.parameters()).device.type == "cuda"
        captured = on_gpu if captured is None else captured
        obstacle = decoding_obstacle(causal)
        decoder = None if obstacle else Decoder(causal, captured=captured, longest=longest)
        self._decode: Decode = decoder or functools.partial(by_transformers, causal)
        self.notes += decoder.projections.notes if decoder and decoder.projections else []
        if (captured and obstacle) or (on_gpu and not captured):
            reason = obstacle or "CUDA graphs do not follow weights that move"
            self.notes.append(f"decoding is not captured, every layer of a step is launched: {reason}")

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, max_completion_length: int,
        keys: Sequence[Sequence[int]] | None = None, temperature: float = 1.0, top_p: float = 1.0,
        names: Sequence[str] | None = None,
    ) -> Rollouts:  # fmt: skip
        """Complete prompts as `Engine` says."""
        if self._model is not self._policy:  # in the memory that a CUDA graph reads weights from
            with torch.no_grad():
                for rounded, weight in zip(self._model.parameters(), self._policy.parameters(), strict=True):
                    rounded.copy_(weight)
            compile_copies(*(getattr(backbone(causal_lm(m)), "layers", ()) for m in (self._model, self._policy)))
        tokenizer, ends = self._tokenizer, end_ids(self._model, self._tokenizer)
        stopped = self._stopped if self._stop else None
        sampling = Sampling(keys is None, temperature, top_p, tuple(ends), tokenizer.pad_token_id, stopped)
        batch = tokenizer.pad({"input_ids": [list(row) for row in prompts]}, return_tensors="pt", padding_side="left")
        size = len(prompts), max_completion_length
        uniforms = torch.zeros(size, dtype=torch.float64) if keys is None else keyed_uniforms(keys, size[1])
        merging = merged_adapters(self._model) if self._merges else contextlib.nullcontext()
        with merging, evaluation_mode(ModelWalk.of(self._model)), decoding_head(causal_lm(self._model)):
            tokens, logprobs, kept = self._decode(batch["input_ids"], batch["attention_mask"], uniforms, sampling)
        rollouts = Rollouts.of(
            prompts, tokens.tolist(), [*logprobs.to("cpu", copy=True)], ends, tokenizer, kept_tokens=kept,
            thought_tags=self._thought_tags, stop=self._stop,
        )  # fmt: skip
        require_finite_logits(rollouts.logprobs, names)
        return rollouts

    def _stopped(self, tokens: Tensor) -> Tensor:
        last = tokens[:, -LOOK - max(map(len, self._stop)) :]  # a stop string has fewer tokens than characters
        found = [length is not None for length in lengths_before(last.tolist(), self._tokenizer, self._stop)]
        return torch.tensor(found, device=tokens.device)[:, None]


def decoding_obstacle(model: PreTrainedModel) -> str | None:
    """Say why `Decoder` leaves `model` to transformers' `generate`; None if it does not."""
    name = type(model).__name__
    if not getattr(model, "_can_compile_fullgraph", False):
        return f"transformers cannot compile a decoding step of {name}"
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if others := sorted(kind.__name__ for kind in kinds - {DynamicLayer, DynamicSlidingWindowLayer}):
        return f"layers of {name} keep other states than keys and values ({', '.join(others)})"
    return None


def by_transformers(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, uniforms: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor, list[KeptTokens] | None]:
    """Complete prompts as `Decoder` does, by transformers' `generate` and a cache that grows."""
    logprobs, record = list[Tensor](), KeptRecord()
    ids, mask, uniforms = (part.to(next(model.parameters()).device) for part in (ids, mask, uniforms))

    def pick(_: Tensor, scores: Tensor) -> Tensor:  # leaves one token, which greedy decoding takes
        column = None if sampling.greedy else uniforms[:, len(logprobs) : len(logprobs) + 1]
        draws = draw(scores, column, sampling.temperature, sampling.top_p)
        if draws.kept is not None:
            record.add(np.arange(len(scores)), draws.kept[:, None].cpu().numpy(), len(logprobs))
        logprobs.append(draws.logprobs)
        return torch.full_like(scores, -torch.inf).scatter_(1, draws.tokens, 0.0)

    def stops(sequences: Tensor, _: Tensor) -> Tensor:
        if len(logprobs) % LOOK or sampling.stopped is None:
            return torch.zeros(len(sequences), dtype=torch.bool, device=sequences.device)
        return sampling.stopped(sequences[:, ids.shape[1] :])[:, 0]

    sequences = model.generate(  # type: ignore[operator]
        input_ids=ids, attention_mask=mask, max_new_tokens=uniforms.shape[1], do_sample=False,
        logits_processor=LogitsProcessorList([pick]), eos_token_id=list(sampling.ends), pad_token_id=sampling.pad,
        stopping_criteria=StoppingCriteriaList([stops] if sampling.stopped else []),
    )  # fmt: skip
    return sequences[:, ids.shape[1] :], torch.cat(logprobs, 1), record.rows(len(ids), len(logprobs))
