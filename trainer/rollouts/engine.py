"""Inputs and results of every engine: prompts with their keys, and `Rollouts`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

_NAMES_SHOWN = 8


@dataclass(frozen=True)
class Rollouts:
    """A batch of B completions laid out as TRL does: prompts left-padded, completions right-padded.

    Attributes:
        prompt_ids, prompt_mask: (B, P) int64.
        completion_ids, completion_mask: (B, T) int64; the end-of-text token is the last one the mask counts.
        truncated: (B,) bool, completions that were cut off at the length limit.
        texts: B decoded completions without special tokens.
        logprobs: (B, T) fp32, nats: what the sampler gave each token; None if greedy.
        nucleus: least probability of the tokens that `logprobs` are normalised over: 1 for the whole vocabulary.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    truncated: Tensor
    texts: list[str]
    logprobs: Tensor | None
    nucleus: float = 1.0

    @classmethod
    def padded(
        cls, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], ends: Sequence[int],
        tokenizer: PreTrainedTokenizerBase, device: torch.device,
    ) -> "Rollouts":  # fmt: skip
        """Lay lists of token ids out on `device`, without log-probs; a completion counts up to its first end token."""
        batch = tokenizer.pad({"input_ids": [list(row) for row in prompts]}, return_tensors="pt", padding_side="left")
        # By position, as pad may be the same id as end.
        lengths = [next((t + 1 for t, token in enumerate(row) if token in ends), len(row)) for row in completions]
        rows = [list(row[:length]) for row, length in zip(completions, lengths, strict=True)]
        ids = pad_sequence([torch.tensor(row) for row in rows], True, tokenizer.pad_token_id)  # type: ignore[arg-type]
        mask = pad_sequence([torch.ones(length, dtype=torch.int64) for length in lengths], True)
        truncated = torch.tensor([row[-1] not in ends for row in rows])
        texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
        parts = batch["input_ids"], batch["attention_mask"], ids, mask, truncated
        prompt_ids, prompt_mask, ids, mask, truncated = (part.to(device) for part in parts)
        return cls(prompt_ids, prompt_mask, ids, mask, truncated, texts, None)

    @classmethod
    def joined(cls, parts: Sequence["Rollouts"]) -> "Rollouts":
        """Put rollouts, sampled and on the host, together, one after the other."""

        def column(name: str, side: Literal["left", "right"]) -> Tensor:
            return pad_sequence([row for part in parts for row in getattr(part, name)], True, 0, side)

        return cls(
            column("prompt_ids", "left"), column("prompt_mask", "left"), column("completion_ids", "right"),
            column("completion_mask", "right"), torch.cat([part.truncated for part in parts]),
            [text for part in parts for text in part.texts], column("logprobs", "right"), parts[0].nucleus,
        )  # fmt: skip

    def ids(self) -> list[list[int]]:
        """B unpadded completions."""
        lengths = self.completion_mask.sum(1).tolist()
        return [row[:length] for row, length in zip(self.completion_ids.tolist(), lengths, strict=True)]


class Engine(Protocol):
    """A way to complete prompts with the policy as it is now."""

    notes: list[str]  # ways of sampling that this model does not allow, and why, for the run's log

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, max_completion_length: int,
        keys: Sequence[Sequence[int]] | None = None, temperature: float = 1.0, top_p: float = 1.0,
        names: Sequence[str] | None = None, progress: Callable[[int], None] | None = None,
    ) -> Rollouts:  # fmt: skip
        """Complete B prompts by at most so many tokens: by sampling with a key of integers each, or greedily.

        Equal keys draw equal numbers, whatever else is in the batch. Log-probs are at the temperature; `top_p` is the
        nucleus, in (0, 1]; `names` are the prompts' in errors; `progress` may be told how many tokens each completion
        has so far. Raises `FloatingPointError` that names prompts and token if logits are not finite before the end of
        a completion.
        """
        ...

    def weights_changed(self) -> None:
        """Learn that the policy has changed since the last call; PyTorch does not count what fused optimizers write."""


def require_finite_logits(finite: Tensor, mask: Tensor, names: Sequence[str] | None) -> None:
    """Raise `FloatingPointError` naming the rows of `finite` (B, T) with a False at a token that `mask` counts."""
    broken = ~finite & mask.bool()
    if broken.any():
        rows = broken.any(1).nonzero().flatten().tolist()
        shown = [names[b] if names else f"sample {b}" for b in rows[:_NAMES_SHOWN]]
        raise FloatingPointError(
            f"{', '.join(shown)} ({len(rows)} of {len(mask)}): the model's logits are not finite "
            f"(in {shown[0]} from token {int(broken[rows[0]].int().argmax())} on)"
        )


def end_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """List tokens that end a completion: the model may know several, the tokenizer names one."""
    ends = model.generation_config.eos_token_id  # type: ignore[union-attr]
    return sorted({*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None})
