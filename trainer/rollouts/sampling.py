"""Sample completions with transformers' `generate`, every draw keyed by run seed, step, problem and sample.

A keyed draw depends neither on the rest of the batch nor on earlier draws: a run repeats exactly from its seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

_NAMES_SHOWN = 8


class FiniteScores(LogitsProcessor):
    """Notes at each position which rows the model gave scores that are numbers, and passes scores on as they are.

    Sampling and the choice of the best token go on over a nan in silence: each picks some token or other.
    """

    def __init__(self) -> None:
        self.finite: list[Tensor] = []  # (B,) bool per position

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) in and out. -inf is a token that cannot come; a largest score of nan or +-inf is an error."""
        self.finite.append(scores.amax(-1).isfinite())
        return scores


@dataclass(frozen=True)
class Rollouts:
    """A batch of B completions laid out as TRL does: prompts left-padded, completions right-padded.

    Attributes:
        prompt_ids, prompt_mask: (B, P) int64.
        completion_ids, completion_mask: (B, T) int64; the end-of-text token is the last one the mask counts.
        truncated: (B,) bool, completions that were cut off at the length limit.
        texts: B decoded completions without special tokens.
        logprobs: (B, T) fp32, nats: what the sampler gave each token (before nucleus truncation); None if greedy.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    truncated: Tensor
    texts: list[str]
    logprobs: Tensor | None

    def ids(self) -> list[list[int]]:
        """B unpadded completions."""
        lengths = self.completion_mask.sum(1).tolist()
        return [row[:length] for row, length in zip(self.completion_ids.tolist(), lengths, strict=True)]


class KeyedSampler(LogitsProcessor):
    """Turns each row of scores into the one token that its own uniform draw picks, by inverse CDF.

    With this as the last logits processor, greedy decoding samples. `uniforms` is (B, T) float64 in [0, 1).
    """

    def __init__(self, uniforms: Tensor, temperature: float, top_p: float) -> None:
        self.logprobs: list[Tensor] = []
        self._uniforms = uniforms
        self._temperature = TemperatureLogitsWarper(temperature)
        self._top_p = TopPLogitsWarper(top_p) if top_p < 1 else None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) in; 0 at the drawn token and -inf elsewhere out."""
        position = len(self.logprobs)
        scores = self._temperature(input_ids, scores.float())
        full = torch.log_softmax(scores, -1)
        kept = self._top_p(input_ids, scores) if self._top_p else scores
        cumulative = torch.softmax(kept.double(), -1).cumsum(-1)  # (B, V)
        threshold = self._uniforms[:, position : position + 1] * cumulative[:, -1:]
        # The first token whose cumulative probability passes the draw: never one of probability 0.
        token = torch.searchsorted(cumulative, threshold, right=True).clamp(max=scores.shape[1] - 1)  # (B, 1)
        self.logprobs.append(full.gather(1, token).squeeze(1))
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)


def keyed_uniforms(keys: Sequence[Sequence[int]], length: int) -> Tensor:
    """Draw (B, length) float64 in [0, 1): row b holds the draws of `keys[b]`, whatever the other rows are."""
    return torch.from_numpy(np.stack([np.random.default_rng(list(key)).random(length) for key in keys]))


@torch.no_grad()
def generate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_completion_length: int,
    keys: Sequence[Sequence[int]] | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    names: Sequence[str] | None = None,
) -> Rollouts:
    """Complete B prompts: by sampling with one key of integers per prompt, or greedily without keys.

    Log-probs that the sampler records are at `temperature`. Leaves the model in the mode it was in. `names` is what
    an error calls the prompts, by default "sample 0", "sample 1", ...

    Raises:
        FloatingPointError: the model gave a prompt logits that are not finite before its completion ended; the
            message names prompts and the first such token.
    """
    device = next(model.parameters()).device
    batch = tokenizer.pad({"input_ids": [list(prompt) for prompt in prompts]}, return_tensors="pt", padding_side="left")
    prompt_ids, prompt_mask = batch["input_ids"].to(device), batch["attention_mask"].to(device)
    scores, sampler = FiniteScores(), None
    if keys is not None:
        sampler = KeyedSampler(keyed_uniforms(keys, max_completion_length).to(device), temperature, top_p)
    training = model.training
    model.eval()
    try:
        sequences = model.generate(  # type: ignore[operator]
            input_ids=prompt_ids,
            attention_mask=prompt_mask,
            max_new_tokens=max_completion_length,
            logits_processor=LogitsProcessorList([scores, sampler] if sampler else [scores]),
            do_sample=False,
            eos_token_id=_end_ids(model, tokenizer),
            pad_token_id=tokenizer.pad_token_id,
        )
    finally:
        model.train(training)
    completion_ids = sequences[:, prompt_ids.shape[1] :]
    completion_mask, truncated = mask_after_end(completion_ids, _end_ids(model, tokenizer))
    _require_finite(torch.stack(scores.finite, 1), completion_mask, names)
    completion_ids = torch.where(completion_mask.bool(), completion_ids, tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    logprobs = torch.stack(sampler.logprobs, 1) * completion_mask if sampler else None
    return Rollouts(prompt_ids, prompt_mask, completion_ids, completion_mask, truncated, texts, logprobs)


def _require_finite(finite: Tensor, mask: Tensor, names: Sequence[str] | None) -> None:
    """Raise `FloatingPointError` naming the rows of `finite` (B, T) with a False that `mask` counts."""
    broken = ~finite & mask.bool()
    if broken.any():
        rows = broken.any(1).nonzero().flatten().tolist()
        called = [names[b] if names else f"sample {b}" for b in rows]
        raise FloatingPointError(
            f"{', '.join(called[:_NAMES_SHOWN])} ({len(rows)} of {len(mask)}): the model's logits are not finite "
            f"(in {called[0]} from token {int(broken[rows[0]].int().argmax())} on)"
        )


def _end_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a completion: the model may know several, the tokenizer names one."""
    ends = model.generation_config.eos_token_id  # type: ignore[union-attr]
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    return sorted({*ends, tokenizer.eos_token_id} - {None})


def mask_after_end(completion_ids: Tensor, ends: list[int]) -> tuple[Tensor, Tensor]:
    """Count each row up to its first end token, by position: pad may be the same id as end.

    Returns the (B, T) int64 mask and (B,) bool: no end token was sampled.
    """
    is_end = torch.isin(completion_ids, torch.tensor(ends, device=completion_ids.device))
    ended_before = is_end.cumsum(1) - is_end.long()
    return (ended_before == 0).long(), ~is_end.any(1)
