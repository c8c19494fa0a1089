"""Choose the rows of a batch that get credit, find their answers and units, and append probes."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..batch import Batch
from ..estimators.base import ANSWER, SIBLINGS, TARGETS
from ..estimators.probes import Probe, length_without_eos, with_probe
from ..model.limits import smallest_budget
from ..model.parts import vocab_size
from ..rows import Rows, check_finite, equal_prompts, token_ids
from ..scoring.branches import check_ids
from ..span import Span
from ..text.find import Reasoning, find_reasoning
from ..text.turns import find_turns
from .config import CounterfactualConfig
from .weights import Gather


def compared_rows(batch: Batch) -> list[int]:
    """List the rows that are compared: those with a completion, and with a reward where there are rewards."""
    has_reward = [True] * len(batch) if batch.rewards is None else (~batch.rewards.isnan()).tolist()
    return [b for b, length in enumerate(batch.rows.lengths) if length and has_reward[b]]


def groups_of(batch: Batch) -> Tensor:
    """Return the batch's groups, (B,) int64, by default those of equal prompts."""
    return torch.tensor(equal_prompts(batch.rows.prompts)) if batch.groups is None else batch.groups


def credited_rows(batch: Batch, completions: str = "all") -> list[int]:
    """List the rows that get credit: counted ones with an advantage that is not 0, or "positive" in sum."""
    rows, advantages = compared_rows(batch), batch.advantages
    if batch.mask is not None:
        rows = [b for b in rows if batch.mask[b].any()]
    if advantages is None:
        return rows
    if completions == "positive":
        return [b for b in rows if _counted(batch, b).sum() > 0]
    return [b for b in rows if _counted(batch, b).any()]


def _counted(batch: Batch, b: int) -> Tensor:
    """Return the advantage of a row, or those of its tokens that the policy wrote."""
    own = batch.advantages[b]  # type: ignore[index]
    return own[batch.mask[b]] if own.ndim and batch.mask is not None else own


def written(batch: Batch, b: int) -> Tensor:
    """Return (T_b,) bool, which tokens of a row the policy wrote: by the mask, else by advantages per token."""
    if batch.mask is not None:
        return batch.mask[b]
    if isinstance(batch.advantages, list) and batch.advantages[b].any():
        return batch.advantages[b] != 0
    return torch.ones(batch.rows.lengths[b], dtype=torch.bool)


def mean_advantages(batch: Batch) -> list[float]:
    """Return the mean advantage of the tokens of each row that the policy wrote; 1 without advantages."""
    if isinstance(batch.advantages, list):
        return [float(row[written(batch, b)].mean()) for b, row in enumerate(batch.advantages)]
    return [1.0] * len(batch) if batch.advantages is None else batch.advantages.tolist()


def of_all_processes(batch: Batch, gather: Gather) -> Batch:
    """Join the rows of all processes, by rank; raise `ValueError` unless their numbers differ."""
    whole = Batch.joined(gather(batch)).with_columns(token_budget=batch.token_budget)
    if len({*whole.index}) < len(whole):
        twice = next(number for b, number in enumerate(whole.index) if number in whole.index[:b])
        raise ValueError(
            f"rows: number {twice} is of two rows; with gather, Rows(index=...) must number those of all processes"
        )
    return whole


def find_units(config: CounterfactualConfig, tokenizer: Any, batch: Batch) -> dict[int, Reasoning]:
    """Find answers, ends of reasoning and units of credited rows, as far as control and estimator need them.

    Completions with a probe, and all of them with gold answers, have units even without an answer. Turns are whole.
    """
    ids = {b: batch.rows.completions[b] for b in credited_rows(batch, config.completions)}
    probed = {b for b in ids if batch.probes is not None and batch.probes[b] is not None}
    if config.control == "off":
        return {b: Reasoning(None, len(row), []) for b, row in ids.items()}
    needs_answer = ANSWER in config.estimator.needs
    if config.target == "gold":
        probed = {*ids}
    masks = {b: written(batch, b) for b in ids}
    spans = config.spans if config.units == "spans" and config.reads_units else None
    reasoning = find_reasoning(
        ids, tokenizer, spans=spans, answers=config.answers, unanswered=not needs_answer or bool(probed),
        prompts={b: batch.rows.prompts[b] for b in ids}, masks={b: mask for b, mask in masks.items() if not mask.all()},
    )  # fmt: skip
    with_units = {b for b, row in reasoning.items() if row.answer or b in probed or not needs_answer}
    if config.units == "spans" or not config.reads_units:
        return {b: row if b in with_units else row._replace(spans=[]) for b, row in reasoning.items()}
    special, units = special_ids(tokenizer), dict[int, list[Span]]()
    for b in with_units:
        limit = min(reasoning[b].end, length_without_eos(ids[b], special)) if needs_answer else len(ids[b])
        if config.units == "turns":
            units[b] = [turn.written for turn in find_turns(masks[b]) if turn.written.start < limit]
        else:
            units[b] = [Span(t, t + 1) for t in masks[b][:limit].nonzero().flatten().tolist()]
    return {b: row._replace(spans=units.get(b, [])) for b, row in reasoning.items()}


def check_needed(config: CounterfactualConfig, batch: Batch) -> None:
    """Raise `ValueError` for advantages that are not finite, for a column that is missing, and for no turn at all."""
    if (own := batch.advantages) is not None:
        rows = compared_rows(batch)  # others have nan
        check_finite(
            "advantages",
            [batch.index[b] for b in rows],
            own[rows] if isinstance(own, Tensor) else [own[b] for b in rows],
        )
    elif config.completions == "positive":
        raise ValueError("advantages must be given with completions='positive', which selects by them, got None")
    if TARGETS in config.needs and batch.targets is None:
        raise ValueError("targets must be given with target='gold': a gold answer for each row, got None")
    if config.units != "turns" or config.control == "off" or not len(batch):
        return
    if batch.mask is None and not isinstance(batch.advantages, list):
        raise ValueError("mask must be given with units='turns', 1 on tokens that the policy wrote, got None")
    if batch.mask and not any(row.any() for row in batch.mask):
        raise ValueError("mask: holds no token of the policy in any row, so there are no turns")


def batch_to_score(
    config: CounterfactualConfig, tokenizer: Any, batch: Batch, units: Mapping[int, Reasoning], model: Any
) -> tuple[list[int], Batch]:
    """List the rows that the estimator scores or compares, and make its batch of them; `model` limits their ids."""
    groups, special, gold = groups_of(batch), special_ids(tokenizer), config.target == "gold"
    if SIBLINGS in config.needs and len(groups.unique()) == len(groups):  # with those that have no reward
        raise ValueError("groups: no two completions are of one group, so there is nothing to compare them with")
    rows = compared_rows(batch) if config.compares else [b for b, row in units.items() if row.spans]
    scored = []
    for b in rows:
        row = units.get(b, Reasoning(None, 0, []))
        row = row._replace(spans=_spans_to_score(config, batch, b, row, special))
        scored.append(_with_target(batch, b, row, special, model, gold))
    part, completions = batch.take(rows), [completion for completion, _ in scored]
    if any(map(operator.is_not, completions, [batch.rows.completions[b] for b in rows])):
        part = part.exchanged(scored=Rows(part.rows.prompts, completions, part.index))
    check_ids(model, part.scored)
    return rows, part.exchanged(
        units=[list(row.spans) for _, row in scored],
        answers=[row.answer if row.spans else None for _, row in scored],
        reasoning_ends=[row.end for _, row in scored],
        groups=groups[rows],
        placeholder=placeholder_of(config, tokenizer, model) if ANSWER in config.estimator.needs else None,
        token_budget=smallest_budget(config.token_budget, batch.token_budget),
        special_ids=special,
    )


def _spans_to_score(
    config: CounterfactualConfig, batch: Batch, b: int, row: Reasoning, special: Sequence[int]
) -> list[Span]:
    """List what an estimator scores for each unit of a row: of a turn what is before the answer, or `observes`."""
    if config.units != "turns" or not row.spans:
        return row.spans
    limit = batch.rows.lengths[b]
    if ANSWER in config.estimator.needs:
        limit = min(row.end, length_without_eos(batch.rows.completions[b], special))
    ends = {turn.written: turn.observation.end for turn in find_turns(written(batch, b))}
    return [Span(own.start, min(ends[own] if config.estimator.observes else own.end, limit)) for own in row.spans]


def target_ids(targets: Sequence[Tensor | str | None], tokenizer: Any) -> list[Any]:
    """Convert the targets that are text to ids, without special ones."""
    texts = [isinstance(target, str) and tokenizer(target, add_special_tokens=False)["input_ids"] for target in targets]
    return [
        target if ids is False else torch.tensor(ids, dtype=torch.int64)
        for target, ids in zip(targets, texts, strict=True)
    ]


def _with_target(
    batch: Batch, b: int, row: Reasoning, eos_ids: Sequence[int], model: PreTrainedModel | None, gold: bool
) -> tuple[Tensor, Reasoning]:
    """Append its probe to a row's completion, or replace its answer by its target; a `gold` one may follow the end."""
    completion, name, vocab = batch.rows.completions[b], batch.index[b], None if model is None else vocab_size(model)
    probe: Probe | None = None if batch.probes is None else batch.probes[b]
    target: Any = None if batch.targets is None else batch.targets[b]
    if not row.spans or (probe is None and target is None and not gold):
        return completion, row
    if (probe is None) == (target is None):
        problem = "has a probe too; give one of them" if target is not None else "is None, but the row has units"
        raise ValueError(f"targets row {name}: {problem}")
    if probe is None:
        target = token_ids(f"targets row {name}", target, vocab).cpu()
        if row.answer is not None:
            start = row.answer.start
            return torch.cat([completion[:start], target]), row._replace(answer=Span(start, start + len(target)))
        if not gold:
            raise ValueError(f"targets row {name}: the completion has no answer to replace; give a probe instead")
        probe = Probe(target, Span(0, len(target)))
    longer, answer = with_probe(name, completion, row.spans, probe, eos_ids, vocab)
    return longer, row._replace(answer=answer, end=len(longer) - len(probe.tokens))


def special_ids(tokenizer: Any) -> tuple[int, ...]:
    """List the ids that are not content: those that end a text or pad a batch."""
    ids = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    return tuple(token for token in ids if token is not None)


def placeholder_of(config: CounterfactualConfig, tokenizer: Any, model: PreTrainedModel | None) -> int:
    """Choose the id that replaces masked tokens: the estimator's own, else the pad or the end-of-text token."""
    own, vocab = getattr(config.estimator, "placeholder_id", None), None if model is None else vocab_size(model)
    for token in (own, tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token_ids("placeholder_id", torch.tensor([token]), vocab))
    raise ValueError("placeholder_id: the tokenizer has neither a pad nor an end-of-text token; name one")
