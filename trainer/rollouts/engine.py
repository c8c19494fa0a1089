"""Inputs and results of every engine: prompts with their keys, and `Rollouts`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from cfa_kernels import AnswerRules, KeptTokens
from cfa_kernels.rows import Rows
from cfa_kernels.text.find import content_text
from cfa_kernels.text.offsets import decoded, token_offsets


@dataclass(frozen=True)
class Rollouts:
    """A batch of B completions, without padding and on the host."""

    rows: Rows  # prompts and completions; an end-of-text token is the last one of a completion
    truncated: Tensor  # (B,) bool, completions that were cut off at the length limit
    texts: list[str]  # B decoded completions without special tokens
    logprobs: list[Tensor]  # B tensors (T_b,) fp32, nats: what the sampler gave each token; of no use if greedy
    most_kept: int | None = None  # ids to which the engine cuts a nucleus; None if it does not
    contents: Sequence[str] = ()  # B texts with line breaks in place of thoughts, also those that prompts open
    kept_tokens: Sequence[KeptTokens] | None = None  # ids that each token was drawn from; None for the whole vocabulary
    mask: Sequence[Tensor] | None = None  # B tensors (T_b,), 0 on tokens of an environment; None for 1 everywhere

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], logprobs: Sequence[Tensor],
        ends: Sequence[int], tokenizer: PreTrainedTokenizerBase, most_kept: int | None = None, thought_tags: str = "",
        kept_tokens: Sequence[KeptTokens] | None = None, mask: Sequence[Tensor] | None = None,
        stop: Sequence[str] = (), stopped: Sequence[bool] | None = None,
    ) -> "Rollouts":  # fmt: skip
        """Hold lists of token ids and their log-probs, each completion up to its first end token.

        `thought_tags` as in `AnswerRules`, `stop` as in `lengths_before`; `stopped` are those already cut there.
        """
        before = lengths_before(completions, tokenizer, stop)
        rows = [row[:length] for row, length in zip(completions, before, strict=True)]
        # By position, as pad may be the same id as end.
        lengths = [next((t + 1 for t, token in enumerate(row) if token in ends), len(row)) for row in rows]
        ids = [list(row[:length]) for row, length in zip(rows, lengths, strict=True)]
        stopped = stopped or [length is not None for length in before]
        truncated = [row[-1] not in ends and not own for row, own in zip(ids, stopped, strict=True)]
        rules, triples = AnswerRules(thought_tags=thought_tags), zip(prompts, ids, truncated, strict=True)
        return cls(
            Rows([torch.tensor(row) for row in prompts], [torch.tensor(row) for row in ids]), torch.tensor(truncated),
            [decoded(row, tokenizer, skip_special_tokens=True) for row in ids],
            [row[:length] for row, length in zip(logprobs, lengths, strict=True)], most_kept,
            [content_text(row, tokenizer, rules, prompt=prompt, truncated=cut) for prompt, row, cut in triples],
            kept_tokens and [row.take(slice(0, length)) for row, length in zip(kept_tokens, lengths, strict=True)],
            mask and [row[:length] for row, length in zip(mask, lengths, strict=True)],
        )  # fmt: skip

    def ids(self) -> list[list[int]]:
        """B completions as lists."""
        return [row.tolist() for row in self.rows.completions]

    def tokens(self) -> int:
        """Count the tokens of all prompts and completions."""
        return sum(map(len, [*self.rows.prompts, *self.rows.completions]))


class Engine(Protocol):
    """A way to complete prompts with the policy as it is now."""

    notes: list[str]  # ways of sampling that this model does not allow, and why, for the run's log

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, max_completion_length: int,
        keys: Sequence[Sequence[int]] | None = None, temperature: float = 1.0, top_p: float = 1.0,
        names: Sequence[str] | None = None,
    ) -> Rollouts:  # fmt: skip
        """Complete B prompts by at most so many tokens: by sampling with a key of integers each, or greedily.

        Equal keys draw equal numbers, whatever else is in the batch. Log-probs are at the temperature; `top_p` is the
        nucleus, in (0, 1]; `names` are the prompts' in errors. Raises `FloatingPointError` that names prompts and token
        if logits are not finite before the end of a completion.
        """
        ...

    def weights_changed(self) -> None:
        """Learn that the policy has changed since the last call; PyTorch does not count what fused optimizers write."""
        return


def require_finite_logits(logprobs: Sequence[Tensor], names: Sequence[str] | None) -> None:
    """Raise `FloatingPointError` naming the first completion with a log-prob that is not finite, and their number."""
    if rows := [b for b, row in enumerate(logprobs) if not row.isfinite().all()]:
        first = names[rows[0]] if names else f"sample {rows[0]}"
        token = int((~logprobs[rows[0]].isfinite()).int().argmax())
        raise FloatingPointError(
            f"{first}: the model's logits are not finite from token {token} on ({len(rows)} of {len(logprobs)} samples)"
        )


def lengths_before(
    rows: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]
) -> list[int | None]:
    """Count the tokens of each completion before the first stop string in its text, at least one; None without it.

    A token whose text begins before the stop string stays, although the string may begin in it.
    """
    places: list[int | None] = [None] * len(rows)
    for b, row in enumerate(rows if stop else ()):
        offsets = token_offsets(row, tokenizer, frozenset(stop))
        if found := [at for one in stop if (at := offsets.text.find(one)) >= 0]:
            places[b] = max(1, int(offsets.starts.searchsorted(min(found))))
    return places


def end_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """List tokens that end a completion: those that model and tokenizer name, and what closes the template's turns."""
    return sorted(_named_ends(model, tokenizer) | _turn_ends(tokenizer))


def notes_on_ends(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Say which token ends completions only because the chat template closes turns by it."""
    only = _turn_ends(tokenizer) - _named_ends(model, tokenizer)
    return [f"{tokenizer.decode([end])!r} ends completions, as it closes the chat template's turns" for end in only]


def _named_ends(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    ends = model.generation_config.eos_token_id  # type: ignore[union-attr]
    return {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}


def _turn_ends(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    turns = [{"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "content": "Seven"}]
    try:
        closing = str(tokenizer.apply_chat_template(turns, tokenize=False)).rpartition("Seven")[2]
        first = tokenizer(closing.lstrip(), add_special_tokens=False)["input_ids"][:1]
        return {*first} & {*tokenizer.added_tokens_decoder}
    except Exception:  # it has no template, or one that raises what it likes
        return set()
