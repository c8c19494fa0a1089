"""Choose the rows of a batch that get credit, find their answers and units, and append probes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch import Batch
from ..estimators.base import ANSWER
from ..estimators.probes import length_without_eos, with_probe
from ..rows import check_finite, token_ids
from ..span import Span
from ..text.find import Reasoning, find_reasoning
from .config import CounterfactualConfig
from .weights import Gather


def compared_rows(batch: Batch) -> list[int]:
    """List the rows that are compared: those with a completion, and with a reward where there are rewards."""
    has_reward = [True] * len(batch) if batch.rewards is None else (~batch.rewards.isnan()).tolist()
    return [b for b, length in enumerate(batch.rows.lengths) if length and has_reward[b]]


def credited_rows(batch: Batch, completions: str = "all") -> list[int]:
    """List the rows that get credit: counted ones with an advantage that is not 0, or "positive" in sum."""
    rows, advantages = compared_rows(batch), batch.advantages
    if batch.mask is not None:
        rows = [b for b in rows if batch.mask[b].any()]
    if advantages is None:
        return rows
    if completions == "positive":
        return [b for b in rows if advantages[b].sum() > 0]
    return [b for b in rows if (advantages[b] != 0).any()]


def check_advantages(batch: Batch, completions: str) -> None:
    """Raise `ValueError` unless advantages of compared rows are finite, and there where `completions` needs them."""
    if batch.advantages is not None:
        rows = compared_rows(batch)
        check_finite("advantages", [batch.index[b] for b in rows], [batch.advantages[b] for b in rows])
    elif completions == "positive":
        raise ValueError("advantages must be given with completions='positive', which judges by them, got None")


def written(batch: Batch, b: int) -> Tensor:
    """Return (T_b,) bool, which tokens of a row the policy wrote: by the mask, else by advantages per token."""
    if batch.mask is not None:
        return batch.mask[b]
    if isinstance(batch.advantages, list) and batch.advantages[b].any():
        return batch.advantages[b] != 0
    return torch.ones(batch.rows.lengths[b], dtype=torch.bool)


def of_all_processes(batch: Batch, gather: Gather) -> Batch:
    """Join the rows of all processes, by rank; raise `ValueError` unless each has a number of its own."""
    whole = Batch.joined(gather(batch))
    if len({*whole.index}) < len(whole):
        twice = next(number for b, number in enumerate(whole.index) if number in whole.index[:b])
        raise ValueError(
            f"rows: number {twice} is of two rows; with gather, Rows(index=...) must number those of all processes"
        )
    return whole


def find_units(config: CounterfactualConfig, tokenizer: Any, batch: Batch) -> dict[int, Reasoning]:
    """Find answers, ends of reasoning and units of credited rows, as far as control and estimator need them.

    Completions with a probe have units even without an answer.
    """
    ids = {b: batch.rows.completions[b].tolist() for b in credited_rows(batch, config.completions)}
    probed = {b for b in ids if batch.probes is not None and batch.probes[b] is not None}
    if config.control == "off":
        return {b: Reasoning(None, len(row), []) for b, row in ids.items()}
    needs_answer = ANSWER in config.estimator.needs
    tokens = config.units == "tokens"
    reasoning = find_reasoning(
        ids, tokenizer, spans=None if tokens or not config.reads_units else config.spans, answers=config.answers,
        unanswered=not needs_answer or bool(probed), prompts={b: batch.rows.prompts[b] for b in ids},
        masks={b: written(batch, b) for b in ids},
    )  # fmt: skip
    with_units = {b for b, row in reasoning.items() if row.answer or b in probed or not needs_answer}
    if not (tokens and config.reads_units):
        return {b: row if b in with_units else row._replace(spans=[]) for b, row in reasoning.items()}
    special = special_ids(tokenizer)
    counts = dict.fromkeys(reasoning, 0)  # tokens of each row
    for b in with_units:
        counts[b] = len(ids[b]) if not needs_answer else min(reasoning[b].end, length_without_eos(ids[b], special))
    places = {b: written(batch, b)[: counts[b]].nonzero().flatten().tolist() for b in reasoning}
    return {b: row._replace(spans=[Span(t, t + 1) for t in places[b]]) for b, row in reasoning.items()}


def scored_as(
    batch: Batch, b: int, row: Reasoning, eos_ids: Sequence[int], vocab: int | None
) -> tuple[Tensor, Reasoning]:
    """Append its probe to a row's completion, or replace its answer by its target; `vocab` limits their ids."""
    completion, name = batch.rows.completions[b], batch.index[b]
    probe, target = (None if column is None else column[b] for column in (batch.probes, batch.targets))
    if not row.spans or (probe is None and target is None):
        return completion, row
    if probe is not None and target is not None:
        raise ValueError(f"targets row {name}: has a probe too; give one of them")
    if probe is not None:
        longer, answer = with_probe(name, completion, row.spans, probe, eos_ids, vocab)
        return longer, row._replace(answer=answer, end=len(longer) - len(probe.tokens))
    assert target is not None
    if row.answer is None:
        raise ValueError(f"targets row {name}: the completion has no answer to replace; give a probe instead")
    token_ids(f"targets row {name}", target, vocab)
    start = row.answer.start
    other = torch.cat([completion[:start], target.cpu()])
    return other, row._replace(answer=Span(start, start + len(target)))


def special_ids(tokenizer: Any) -> tuple[int, ...]:
    """List the ids that are not content: those that end a text or pad a batch."""
    ids = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    return tuple(token for token in ids if token is not None)


def placeholder_of(config: CounterfactualConfig, tokenizer: Any, vocab: int | None) -> int:
    """Choose the id that replaces masked tokens: the estimator's own, else the pad or the end-of-text token."""
    for token in (getattr(config.estimator, "placeholder_id", None), tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token_ids("placeholder_id", torch.tensor([token]), vocab))
    raise ValueError("placeholder_id: the tokenizer has neither a pad nor an end-of-text token; name one")
