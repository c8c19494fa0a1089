"""Read a padded batch: take off padding, find answers and units, and append probes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from ..estimators.base import ANSWER
from ..estimators.probes import Probe, length_without_eos, with_probe
from ..options import as_numbers
from ..scoring.batch import token_ids
from ..span import Span
from ..text.find import Reasoning, find_reasoning
from .config import CounterfactualConfig


class Known(TypedDict, total=False):
    """Further columns of a batch; an estimator declares in its `needs` which it reads."""

    groups: Tensor | None
    """(B,) int64, equal for completions that are compared with each other; by default those of equal prompts."""
    rewards: Tensor | Sequence[float] | None
    """(B,) float, or a list of B numbers, for estimators that compare the completions of a group."""
    entropies: Tensor | None
    """(B, T) of each sampled token's distribution, nats, for `entropy`."""
    external: Sequence[Tensor | Sequence[float]] | None
    """B tensors or lists with a number for each unit or each token of the completion, for `external`."""
    probes: Sequence[Probe | None] | None
    """For each completion tokens that ask it for an answer, or None: they are put behind it, their target is scored in
    place of its own answer, and nothing is trained on them. Gives units to completions without one."""
    targets: Sequence[Tensor | None] | None
    """For each completion 1-D int64 tokens that are scored in place of its own answer, or None: of a wrong completion,
    say, those of the right answer. Needs an answer to replace."""


@dataclass(frozen=True)
class PaddedBatch:
    """Batch without padding, on the host."""

    prompts: list[Tensor]
    completions: list[Tensor]
    padded: Tensor  # completion_ids (B, T), for their shape and device
    advantages: Tensor | None
    known: Known
    credited: list[int]  # rows that have an advantage and tokens

    @classmethod
    def of(
        cls,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        advantages: Tensor | None,
        known: Known,
    ) -> "PaddedBatch":
        """Check shapes and take padding off."""
        prompts = unpad("prompt", prompt_ids, prompt_mask, left=True)
        completions = unpad("completion", completion_ids, completion_mask, left=False)
        if len(completions) != len(prompts):
            raise ValueError(f"completion_ids has {len(completions)} rows, prompt_ids has {len(prompts)}")
        if unknown := set(known) - set(Known.__annotations__):
            raise TypeError(f"counterfactual_credit takes no {sorted(unknown)[0]!r}; see `Known` for what it takes")
        _check_columns(completion_ids, **known)
        if (rewards := known.get("rewards")) is not None:
            known = {**known, "rewards": as_numbers(rewards, "rewards", f"{len(prompts)} completions")}
        credited = [b for b in _rows_with_advantage(advantages, completion_ids) if len(completions[b])]
        return cls(prompts, completions, completion_ids, advantages, known, credited)

    @property
    def probed(self) -> set[int]:
        """List the credited rows with a probe."""
        probes = self.known.get("probes")
        return {b for b in self.credited if probes is not None and probes[b] is not None}


def find_units(config: CounterfactualConfig, tokenizer: Any, given: PaddedBatch) -> dict[int, Reasoning]:
    """Find answers, ends of reasoning and units of credited completions, as far as control and estimator need them.

    Completions with a probe have units even without an answer.
    """
    ids, probed = {b: given.completions[b].tolist() for b in given.credited}, given.probed
    if config.control == "off":
        return {b: Reasoning(None, len(row), []) for b, row in ids.items()}
    needs_answer = ANSWER in config.estimator.needs
    tokens = config.units == "tokens"
    found = find_reasoning(
        ids, tokenizer, spans=None if tokens or not config.reads_units else config.spans, answers=config.answers,
        unanswered=not needs_answer or bool(probed),
    )  # fmt: skip
    asks = {b for b, row in found.items() if row.answer or b in probed or not needs_answer}
    if not (tokens and config.reads_units):
        return {b: row if b in asks else row._replace(spans=[]) for b, row in found.items()}
    special = special_ids(tokenizer)
    judged = dict.fromkeys(found, 0)  # tokens of each row
    for b in asks:
        judged[b] = len(ids[b]) if not needs_answer else min(found[b].end, length_without_eos(ids[b], special))
    return {b: row._replace(spans=[Span(t, t + 1) for t in range(judged[b])]) for b, row in found.items()}


def scored_as(
    completion: Tensor, found: Reasoning, probe: Probe | None, target: Tensor | None, b: int, eos_ids: Sequence[int]
) -> tuple[Tensor, Reasoning]:
    """Append a probe to a completion, or replace its answer by another."""
    if not found.spans or (probe is None and target is None):
        return completion, found
    if probe is not None and target is not None:
        raise ValueError(f"targets row {b}: has a probe too; give one of them")
    if probe is not None:
        longer, answer = with_probe(b, completion, found.spans, probe, eos_ids)
        return longer, found._replace(answer=answer, end=len(longer) - len(probe.tokens))
    assert target is not None
    if found.answer is None:
        raise ValueError(f"targets row {b}: the completion has no answer to replace; give a probe instead")
    token_ids(f"targets row {b}", target)
    start = found.answer.start
    other = torch.cat([completion[:start], target.cpu()])
    return other, found._replace(answer=Span(start, start + len(target)))


def equal_prompts(prompts: Sequence[Tensor]) -> Tensor:
    """Number equal prompts equally, (B,) int64."""
    numbers: dict[tuple[int, ...], int] = {}
    return torch.tensor([numbers.setdefault(tuple(row.tolist()), len(numbers)) for row in prompts])


def special_ids(tokenizer: Any) -> tuple[int, ...]:
    """List the ids that are not content: those that end a text or pad a batch."""
    ids = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    return tuple(token for token in ids if token is not None)


def _check_columns(completion_ids: Tensor, **columns: Any) -> None:
    batch = len(completion_ids)
    for name, column in columns.items():
        if column is None:
            continue
        shape = (batch,) if name in ("groups", "rewards") else tuple(completion_ids.shape)
        if isinstance(column, Tensor) and name not in ("external", "probes", "targets"):
            if tuple(column.shape) != shape:
                raise ValueError(f"{name} must be {shape}, got {tuple(column.shape)}")
        elif len(column) != batch:
            raise ValueError(f"{name} has {len(column)} rows, completion_ids has {batch}")


def unpad(name: str, ids: Tensor, mask: Tensor, *, left: bool) -> list[Tensor]:
    """Take the padding off each row, as views on the host; one copy for the whole batch."""
    if ids.ndim != 2 or mask.shape != ids.shape:
        raise ValueError(
            f"{name}_ids and {name}_mask must be one (B, length) shape, got {tuple(ids.shape)} and {tuple(mask.shape)}"
        )
    ids, mask = ids.cpu(), mask.cpu().bool()
    width, lengths = ids.shape[1], mask.sum(1)
    if left and (empty := lengths == 0).any():
        raise ValueError(f"{name}_mask row {int(empty.nonzero()[0])}: is all zero, the {name} is empty")
    places = torch.arange(width)
    expected = places >= width - lengths[:, None] if left else places < lengths[:, None]
    if (gaps := (mask != expected).any(1)).any():
        side = "left" if left else "right"
        raise ValueError(f"{name}_mask row {int(gaps.nonzero()[0])}: must be padded only on the {side}, without gaps")
    return [row[width - n :] if left else row[:n] for row, n in zip(ids, lengths.tolist(), strict=True)]


def _rows_with_advantage(advantages: Tensor | None, completion_ids: Tensor) -> list[int]:
    batch = len(completion_ids)
    if advantages is None:
        return list(range(batch))
    if not isinstance(advantages, Tensor):
        raise ValueError(f"advantages must be a tensor (B,) or (B, T), got {type(advantages).__name__}")
    if advantages.shape not in ((batch,), tuple(completion_ids.shape)):
        raise ValueError(
            f"advantages must be (B,) or (B, T) of {tuple(completion_ids.shape)}, got {tuple(advantages.shape)}"
        )
    nonzero = (advantages.reshape(batch, -1) != 0).any(1)
    return nonzero.nonzero().flatten().tolist()


def placeholder_of(config: CounterfactualConfig, tokenizer: Any) -> int:
    """Choose the id that replaces masked tokens: the estimator's own, else the pad or the end-of-text token."""
    for token in (getattr(config.estimator, "placeholder_id", None), tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise ValueError("placeholder_id: the tokenizer has neither a pad nor an end-of-text token; name one")
