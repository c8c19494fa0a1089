"""What every engine takes and gives: prompts with their keys, and `Rollouts`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


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


class Engine(Protocol):
    """A way to complete prompts with the policy as it is now.

    Attributes:
        notes: what of the settings does not hold for this model, and why, for the run's log.
    """

    notes: list[str]

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_completion_length: int,
        keys: Sequence[Sequence[int]] | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        names: Sequence[str] | None = None,
    ) -> Rollouts:
        """Complete B prompts: by sampling with one key of integers per prompt, or greedily without keys.

        Args:
            prompts: B lists of token ids.
            max_completion_length: most tokens of a completion.
            keys: B keys; equal keys draw equal numbers, whatever else is in the batch.
            temperature: divides the logits; log-probs are at it.
            top_p: nucleus, in (0, 1].
            names: what an error calls the prompts, by default "sample 0", "sample 1", ...

        Raises:
            FloatingPointError: the model gave a prompt logits that are not finite before its completion ended; the
                message names prompts and the first such token.
        """
        ...


def keyed_uniforms(keys: Sequence[Sequence[int]], length: int) -> Tensor:
    """Draw (B, length) float64 in [0, 1): row b holds the draws of `keys[b]`, whatever the other rows are."""
    return torch.from_numpy(np.stack([np.random.default_rng(list(key)).random(length) for key in keys]))


def mask_after_end(completion_ids: Tensor, ends: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Count each row up to its first end token, by position: pad may be the same id as end.

    Returns the (B, T) int64 mask and (B,) bool: no end token was sampled.
    """
    is_end = torch.isin(completion_ids, torch.tensor(ends, device=completion_ids.device))
    ended_before = is_end.cumsum(1) - is_end.long()
    return (ended_before == 0).long(), ~is_end.any(1)
