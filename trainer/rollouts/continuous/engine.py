"""Complete prompts with transformers' continuous batching (5.23), in the process that trains and from its weights.

Every decoding step is one row of tokens of all completions under way, over a paged cache: no padding, and a completion
that ends makes way for the next. Draws are keyed by place, so they are those of `KeyedSampler`. The cache is shared:
logits that are not finite spread, and an error names every completion that was under way.
"""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase

from cfa_kernels.hf.liger import fused_modules
from cfa_kernels.hf.model import causal_lm
from trainer.rollouts.engine import Rollouts, end_ids, gap_to_policy, keyed_uniforms
from trainer.rollouts.in_process import TransformersEngine, require_finite
from trainer.rollouts.merged import merged_adapters
from trainer.rollouts.sampling import picked
from trainer.rollouts.settings import RolloutSettings

try:
    from transformers import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.cb_logits_processors import (
        ContinuousBatchingLogitsProcessor,
        ContinuousBatchingLogitsProcessorList,
    )
except ImportError as absent:
    raise ImportError(f"rollout_engine: continuous needs transformers 5.23 or later ({absent})") from absent

_FORWARD = 256  # most tokens of a forward, at least a row each; longer prompts are fed in parts
_PAGE = {True: 256, False: 32}  # tokens of a page of the cache, with flash attention and without


class ContinuousEngine(TransformersEngine):
    """The policy itself as an engine, by continuous batching; adapters are merged while it samples.

    Attributes:
        notes: what of the settings does not hold for this model, and why.
    """

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, settings: RolloutSettings, limit: float = math.inf,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """See that `model` runs over a paged cache, and that its log-probs there are its own.

        Raises:
            ValueError: it does not, or they are more than `limit` nats away.
        """
        given = RolloutSettings(merge_adapters=settings.merge_adapters, rollout_cache="dynamic")
        super().__init__(model, tokenizer, given, dtype=dtype)
        name, prompt = type(causal_lm(model)).__name__, tokenizer("What is 3 + 4? Add 3 and 4.")["input_ids"]
        try:
            shown = self([prompt, prompt[:-2]], max_completion_length=16, keys=[(0, 0), (0, 1)])
        except (ValueError, RuntimeError, AttributeError, NotImplementedError) as problem:
            raise ValueError(f"rollout_engine: continuous batching does not run {name}: {problem}") from problem
        assert shown.logprobs is not None
        sampled = [row[: len(ids)] for row, ids in zip(shown.logprobs, shown.ids(), strict=True)]
        gap = gap_to_policy(model, [prompt, prompt[:-2]], shown.ids(), sampled)
        if not gap <= limit:
            raise ValueError(
                f"rollout_engine: log-probs of {name} by continuous batching are not the policy's: {gap:.3g} nats "
                f"apart (at most {limit:.3g} by max_sampling_gap); take rollout_engine=transformers"
            )

    @torch.no_grad()
    def __call__(  # type: ignore[override]  # its base passes options on
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_completion_length: int,
        keys: Sequence[Sequence[int]] | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        names: Sequence[str] | None = None,
    ) -> Rollouts:
        """Complete prompts as `Engine` says."""
        self._round()
        causal, ends = causal_lm(self._model), end_ids(self._model, self._tokenizer)
        device = next(self._model.parameters()).device
        draws = None if keys is None else keyed_uniforms(keys, max_completion_length).to(device)
        sampler = _Picks(len(prompts), max_completion_length, draws, temperature, top_p, device)
        page = _PAGE["flash" in causal.config._attn_implementation]
        pages = -(-(max(map(len, prompts)) + max_completion_length) // page)
        config = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=pages * len(prompts),
            max_batch_tokens=max(_FORWARD, len(prompts)),
            use_cuda_graph=False,  # the sampler waits for the device where a nucleus is large
            use_async_batching=False,  # the place of a draw is known when the one before it is
            auto_switch_to_flash=False,  # the update computes with the model's own attention
        )
        training = self._model.training
        with contextlib.ExitStack() as stack:
            if self._merges:
                stack.enter_context(merged_adapters(self._model))
            stack.enter_context(fused_modules(causal))
            stack.callback(self._model.train, training)
            found = _completed(causal, config, sampler, prompts, max_completion_length, ends)
        rollouts = Rollouts.padded(prompts, found, ends, self._tokenizer, device)
        length = rollouts.completion_ids.shape[1]
        require_finite(sampler.finite[:-1, :length], rollouts, names)
        if draws is None:
            return rollouts
        return dataclasses.replace(rollouts, logprobs=sampler.logprobs[:-1, :length] * rollouts.completion_mask)


class _Picks(ContinuousBatchingLogitsProcessor):
    """Turns each row of scores into the one token that is picked, by the place of its draw: row times length and token.

    Keeps log-probs (B + 1, T) and whether scores were numbers (B + 1, T) at the same places.
    """

    supported_kwargs = {"row": int}  # noqa: RUF012 (declared so by its base)
    ignored_kwargs = ()

    def __init__(
        self, rows: int, length: int, uniforms: Tensor | None, temperature: float, top_p: float, device: torch.device
    ) -> None:
        self._length, self._uniforms, self._options = length, uniforms, (temperature, top_p)
        self._nowhere = rows * length  # the place of rows that pick nothing: prompts that are fed in parts
        self.logprobs = torch.zeros(rows + 1, length, device=device)
        self.finite = torch.ones(rows + 1, length, dtype=torch.bool, device=device)

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Give rows that pick nothing a place of their own."""
        int32_tensor.fill_(self._nowhere)

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        """Give the place of each request's next draw; one that started anew holds its tokens in its prompt."""
        places = []
        for request in requests_with_new_token:
            state = request.state
            before = state._true_initial_tokens and len(state.initial_tokens) - state._true_initial_tokens
            places.append(state.logit_processor_kwargs["row"] * self._length + before + state.generated_len())
        return torch.tensor(places, dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Scores (N, V) in; 0 at the picked token and -inf elsewhere out."""
        place = tensor_arg[: len(scores)].long()
        self.finite.view(-1)[place] = scores.amax(-1).isfinite()
        if self._uniforms is None:
            return scores
        uniforms = self._uniforms.view(-1)[place.clamp(max=self._nowhere - 1)]
        token, logprobs = picked(scores, uniforms[:, None], *self._options)
        self.logprobs.view(-1)[place] = logprobs
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)


def _completed(
    causal: Any, config: ContinuousBatchingConfig, sampler: _Picks, prompts: Sequence[Sequence[int]], length: int,
    ends: list[int],
) -> list[list[int]]:  # fmt: skip
    """Run all requests; gives the tokens of each."""
    greedy = GenerationConfig(do_sample=False, max_new_tokens=length, eos_token_id=ends)
    manager = causal.init_continuous_batching(generation_config=greedy, continuous_batching_config=config)
    manager.logit_processor = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([sampler]))
    manager.logit_processor.tensors_required = 1
    found: dict[int, list[int]] = {}
    try:
        manager.start()
        rows = {
            manager.add_request(list(prompt), max_new_tokens=length, eos_token_id=ends, row=b): b
            for b, prompt in enumerate(prompts)
        }
        while len(found) < len(prompts):
            done = manager.get_result(timeout=1)
            if done is not None and done.error is not None:
                raise RuntimeError(f"sample {rows[done.request_id]}: {done.error}")
            if done is not None and done.is_finished():
                found[rows[done.request_id]] = done.generated_tokens
            elif done is None and not manager.is_running():
                raise RuntimeError("its thread ended before all completions did")
    finally:
        manager.stop(block=True)
        manager.destroy()
    return [found[b] for b in range(len(prompts))]
