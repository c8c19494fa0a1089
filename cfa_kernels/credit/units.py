"""Find the answers and units of a batch's rows, and append probes; check the columns that come with them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..estimators.base import ANSWER
from ..estimators.probes import Probe, length_without_eos, with_probe
from ..model.parts import context_length, vocab_size
from ..options import as_numbers, check_class
from ..rows import Rows, check_columns, check_finite, check_floating, check_tokens, token_ids
from ..span import Span
from ..text.find import Reasoning, find_reasoning
from ..text.turns import find_turns
from .config import CounterfactualConfig
from .rollouts import check_traces
from .weights import Gather


@dataclass(frozen=True)
class CreditInputs:
    """Rows to credit, with the columns that `counterfactual_credit` documents, checked and on the host."""

    rows: Rows
    advantages: Tensor | list[Tensor] | None = None  # (B,), or B tensors (T_b,)
    groups: Tensor | None = None  # (B,) int64
    rewards: Tensor | None = None  # (B,)
    entropies: Sequence[Tensor] | None = None  # B tensors (T_b,)
    logprobs: Sequence[Tensor] | None = None  # B tensors (T_b,)
    ref_logprobs: Sequence[Tensor] | None = None  # B tensors (T_b,)
    external: Sequence[Any] | None = None
    probes: Sequence[Probe | None] | None = None
    targets: Sequence[Tensor | str | None] | None = None
    mask: list[Tensor] | None = None  # B tensors (T_b,) bool
    credited_rows: str = "all"  # `CounterfactualConfig.completions`

    @classmethod
    def of(
        cls, rows: Rows, advantages: Tensor | Sequence[Tensor] | None, *, credited_rows: str = "all", **columns: Any
    ) -> "CreditInputs":
        """Check that every column has a value for each row, and that advantages are finite."""
        if credited_rows == "positive" and advantages is None:
            raise ValueError("advantages must be given with completions='positive', which judges by them, got None")
        check_class(Rows, rows=rows)
        columns = {name: column for name, column in columns.items() if column is not None}
        own = None if advantages is None else _on_host("advantages", advantages, rows)
        for name in {"entropies", "logprobs", "ref_logprobs"} & columns.keys():
            columns[name] = _on_host(name, columns[name], rows)
        if "mask" in columns:
            columns["mask"] = _as_mask(columns["mask"], rows)
        if "rewards" in columns:
            columns["rewards"] = as_numbers(columns["rewards"], "rewards", f"{len(rows)} completions")
        if "groups" in columns:
            columns["groups"] = _group_numbers(columns["groups"])
        check_columns(rows.prompts, **columns)
        inputs = cls(rows, own, credited_rows=credited_rows, **columns)
        if own is not None:
            check_floating("advantages", own)
            compared = inputs.with_tokens
            check_finite("advantages", [rows.index[b] for b in compared], [own[b] for b in compared])
        check_traces(rows, list(map(inputs.writes, range(len(rows)))), own)
        return inputs

    @property
    def with_tokens(self) -> list[int]:
        """List the rows that are compared: those with a completion, and with a reward where there are rewards."""
        has_reward = [True] * len(self.rows) if self.rewards is None else (~self.rewards.isnan()).tolist()
        return [b for b, length in enumerate(self.rows.lengths) if length and has_reward[b]]

    @property
    def credited(self) -> list[int]:
        """List the rows that get credit: counted ones with an advantage that is not 0, or positive in sum."""
        rows, advantages = self.with_tokens, self.advantages
        if self.mask is not None:
            rows = [b for b in rows if self.mask[b].any()]
        if advantages is None:
            return rows
        if self.credited_rows == "positive":
            return [b for b in rows if advantages[b].sum() > 0]
        return [b for b in rows if (advantages[b] != 0).any()]

    def writes(self, b: int) -> Tensor:
        """Return (T_b,) bool, which tokens of a row the policy wrote: by the mask, else by advantages per token."""
        if self.mask is not None:
            return self.mask[b]
        if isinstance(self.advantages, list) and self.advantages[b].any():
            return self.advantages[b] != 0
        return torch.ones(self.rows.lengths[b], dtype=torch.bool)

    def advantage(self, b: int) -> float:
        """Return the mean advantage of the tokens that the policy wrote; 1 without advantages."""
        if self.advantages is None:
            return 1.0
        own = self.advantages[b]
        return float(own[self.writes(b)].mean() if own.ndim else own)

    def probe(self, b: int) -> Probe | None:
        """Return the probe of a row, if any."""
        return None if self.probes is None else self.probes[b]


def of_all_processes(inputs: CreditInputs, gather: Gather) -> CreditInputs:
    """Join the rows of all processes, by rank; raise `ValueError` unless each has a number of its own."""
    parts: list[CreditInputs] = gather(inputs)
    index = [number for part in parts for number in part.rows.index]
    if len({*index}) < len(index):
        twice = next(number for b, number in enumerate(index) if number in index[:b])
        raise ValueError(
            f"rows: number {twice} is of two rows; with gather, Rows(index=...) must number those of all processes"
        )
    prompts, completions, rollouts = (list(chain.from_iterable(getattr(p.rows, name) for p in parts)) for name in _IDS)
    columns: dict[str, Any] = {}
    for name in vars(inputs).keys() - {"rows", "credited_rows"}:
        values = [getattr(part, name) for part in parts]
        if all(isinstance(value, Tensor) for value in values):
            columns[name] = torch.cat(values)
        elif values[0] is not None:
            columns[name] = list(chain.from_iterable(values))
    return replace(inputs, rows=Rows(prompts, completions, index, rollouts), **columns)


_IDS = ("prompts", "completions", "rollouts")


def _on_host(name: str, column: Any, rows: Rows) -> Any:
    check_tokens(name, column, rows)
    return column.detach().cpu() if isinstance(column, Tensor) else [row.detach().cpu() for row in column]


def _as_mask(mask: Any, rows: Rows) -> list[Tensor]:
    column = _on_host("mask", mask, rows)
    for b, row in zip(rows.index, column, strict=True):
        for t in ((row != 0) & (row != 1)).nonzero().flatten().tolist():
            raise ValueError(f"mask row {b}, token {t}: must be 1 or 0, got {row[t].item()}")
    return [row.bool() for row in column]


def _group_numbers(groups: Any) -> Tensor:
    try:
        return torch.as_tensor(groups).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"groups must be (B,) integers, got {groups!r}") from error


def find_units(config: CounterfactualConfig, tokenizer: Any, inputs: CreditInputs) -> dict[int, Reasoning]:
    """Find answers, ends of reasoning and units of credited rows, as far as control and estimator need them.

    Completions with a probe, and all of them with gold answers, have units even without an answer. Turns are whole;
    `judged_spans` gives the part of each that an estimator judges.
    """
    ids = {b: inputs.rows.completions[b].tolist() for b in inputs.credited}
    probed = {b for b in ids if inputs.probe(b) is not None}
    if config.control == "off":
        return {b: Reasoning(None, len(row), []) for b, row in ids.items()}
    needs_answer = ANSWER in config.estimator.needs
    if config.target == "gold":
        probed = {*ids}
    if config.units == "turns":
        _require_turns(inputs)
    spans = config.spans if config.units == "spans" and config.reads_units else None
    reasoning = find_reasoning(
        ids, tokenizer, spans=spans, answers=config.answers, unanswered=not needs_answer or bool(probed),
        prompts={b: inputs.rows.prompts[b] for b in ids}, masks={b: inputs.writes(b) for b in ids},
    )  # fmt: skip
    with_units = {b for b, row in reasoning.items() if row.answer or b in probed or not needs_answer}
    if config.units == "spans" or not config.reads_units:
        return {b: row if b in with_units else row._replace(spans=[]) for b, row in reasoning.items()}
    special, units = special_ids(tokenizer), dict[int, list[Span]]()
    for b in with_units:
        limit = min(reasoning[b].end, length_without_eos(ids[b], special)) if needs_answer else len(ids[b])
        if config.units == "turns":
            units[b] = [turn.written for turn in find_turns(inputs.writes(b)) if turn.written.start < limit]
        else:
            units[b] = [Span(t, t + 1) for t in inputs.writes(b)[:limit].nonzero().flatten().tolist()]
    return {b: row._replace(spans=units.get(b, [])) for b, row in reasoning.items()}


def _require_turns(inputs: CreditInputs) -> None:
    """Raise `ValueError` without a column that says what the policy wrote, or where that is nothing in any row."""
    if inputs.mask is None and not isinstance(inputs.advantages, list):
        raise ValueError("mask must be given with units='turns', 1 on tokens that the policy wrote, got None")
    if inputs.mask is not None and len(inputs.mask) and not any(row.any() for row in inputs.mask):
        b = max(range(len(inputs.rows)), key=inputs.rows.lengths.__getitem__)
        raise ValueError(
            f"mask row {inputs.rows.index[b]}: holds no token of the policy among {inputs.rows.lengths[b]}, nor does "
            "any other row, so there are no turns; it must be 1 on tokens that the policy wrote"
        )


def judged_spans(
    config: CounterfactualConfig, inputs: CreditInputs, b: int, row: Reasoning, special: Sequence[int]
) -> list[Span]:
    """List what an estimator judges for each unit of a row: the unit or, of a turn, what stands before the answer.

    An estimator that `observes` judges a turn with its observation.
    """
    if config.units != "turns" or not row.spans:
        return row.spans
    limit = inputs.rows.lengths[b]
    if ANSWER in config.estimator.needs:
        limit = min(row.end, length_without_eos(inputs.rows.completions[b], special))
    ends = {turn.written: turn.observation.end for turn in find_turns(inputs.writes(b))}
    return [Span(own.start, min(ends[own] if config.estimator.observes else own.end, limit)) for own in row.spans]


def target_ids(targets: Sequence[Tensor | str | None] | None, tokenizer: Any) -> list[Tensor | None] | None:
    """Convert the targets that are text to ids, without special ones."""

    def ids(target: Any) -> Any:
        if not isinstance(target, str):
            return target
        return torch.tensor(tokenizer(target, add_special_tokens=False)["input_ids"], dtype=torch.int64)

    return None if targets is None else list(map(ids, targets))


def scored_as(
    inputs: CreditInputs, b: int, row: Reasoning, eos_ids: Sequence[int], model: PreTrainedModel | None, gold: bool
) -> tuple[Tensor, Reasoning]:
    """Append its probe to a row's completion, or replace its answer by its target; `model` limits their ids.

    A `gold` target is required, and appended where there is no answer to replace.
    """
    completion, probe, target = inputs.rows.completions[b], inputs.probe(b), None
    vocab, name = None if model is None else vocab_size(model), inputs.rows.index[b]
    if inputs.targets is not None:
        target = inputs.targets[b]
    if not row.spans or (probe is None and target is None and not gold):
        return completion, row
    if probe is not None and target is not None:
        raise ValueError(f"targets row {name}: has a probe too; give one of them")
    if target is None and probe is None:
        raise ValueError(
            f"targets row {name}: is None, but the row has {len(row.spans)} units, the first at token "
            f"{row.spans[0].start}, to be judged by a gold answer; give one, or an advantage of 0"
        )
    if probe is None:
        target = token_ids(f"targets row {name}", target, vocab).cpu()
        fits = len(inputs.rows.prompts[b]) + (len(completion) if row.answer is None else row.answer.start) + len(target)
        if model is not None and (longest := context_length(model)) is not None and fits > longest:
            raise ValueError(
                f"targets row {name}: {len(target)} tokens after {fits - len(target)} of prompt and completion exceed "
                f"the model's context of {longest}"
            )
        if row.answer is not None:
            start = row.answer.start
            other = torch.cat([completion[:start], target])
            return other, row._replace(answer=Span(start, start + len(target)))
        if not gold:
            raise ValueError(f"targets row {name}: the completion has no answer to replace; give a probe instead")
        probe = Probe(target, Span(0, len(target)))
    longer, answer = with_probe(name, completion, row.spans, probe, eos_ids, vocab)
    return longer, row._replace(answer=answer, end=len(longer) - len(probe.tokens))


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
