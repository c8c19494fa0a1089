"""Find the answers and units of a batch's rows, and append probes; check the columns that come with them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..estimators.base import ANSWER
from ..estimators.probes import Probe, length_without_eos, with_probe
from ..options import as_numbers, check_class
from ..rows import Rows, check_columns, check_finite, check_floating, check_tokens, token_ids
from ..span import Span
from ..text.find import Reasoning, find_reasoning
from .config import CounterfactualConfig
from .weights import Gather


@dataclass(frozen=True)
class CreditInputs:
    """Rows to credit, with the columns that `counterfactual_credit` documents, checked and on the host."""

    rows: Rows
    advantages: Tensor | list[Tensor] | None = None  # (B,), or B tensors (T_b,)
    groups: Tensor | None = None  # (B,) int64
    rewards: Tensor | None = None  # (B,)
    entropies: Sequence[Tensor] | None = None  # B tensors (T_b,)
    external: Sequence[Any] | None = None
    probes: Sequence[Probe | None] | None = None
    targets: Sequence[Tensor | None] | None = None
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
        if "entropies" in columns:
            columns["entropies"] = _on_host("entropies", columns["entropies"], rows)
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
        moves = (advantages != 0).tolist() if isinstance(advantages, Tensor) else [row.any() for row in advantages]
        return [b for b in rows if moves[b]]

    def writes(self, b: int) -> Tensor:
        """Return (T_b,) bool, which tokens of a row the policy wrote: by the mask, else by advantages per token."""
        if self.mask is not None:
            return self.mask[b]
        if isinstance(self.advantages, list) and self.advantages[b].any():
            return self.advantages[b] != 0
        return torch.ones(self.rows.lengths[b], dtype=torch.bool)

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
    prompts, completions = ([ids for part in parts for ids in getattr(part.rows, name)] for name in _IDS)
    columns: dict[str, Any] = {}
    for name in vars(inputs).keys() - {"rows", "credited_rows"}:
        values = [getattr(part, name) for part in parts]
        if all(isinstance(value, Tensor) for value in values):
            columns[name] = torch.cat(values)
        elif values[0] is not None:
            columns[name] = list(chain.from_iterable(values))
    return replace(inputs, rows=Rows(prompts, completions, index), **columns)


_IDS = ("prompts", "completions")


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

    Completions with a probe have units even without an answer.
    """
    ids = {b: inputs.rows.completions[b].tolist() for b in inputs.credited}
    probed = {b for b in ids if inputs.probe(b) is not None}
    if config.control == "off":
        return {b: Reasoning(None, len(row), []) for b, row in ids.items()}
    needs_answer = ANSWER in config.estimator.needs
    tokens = config.units == "tokens"
    reasoning = find_reasoning(
        ids, tokenizer, spans=None if tokens or not config.reads_units else config.spans, answers=config.answers,
        unanswered=not needs_answer or bool(probed), prompts={b: inputs.rows.prompts[b] for b in ids},
        masks={b: inputs.writes(b) for b in ids},
    )  # fmt: skip
    with_units = {b for b, row in reasoning.items() if row.answer or b in probed or not needs_answer}
    if not (tokens and config.reads_units):
        return {b: row if b in with_units else row._replace(spans=[]) for b, row in reasoning.items()}
    special = special_ids(tokenizer)
    counts = dict.fromkeys(reasoning, 0)  # tokens of each row
    for b in with_units:
        counts[b] = len(ids[b]) if not needs_answer else min(reasoning[b].end, length_without_eos(ids[b], special))
    places = {b: inputs.writes(b)[: counts[b]].nonzero().flatten().tolist() for b in reasoning}
    return {b: row._replace(spans=[Span(t, t + 1) for t in places[b]]) for b, row in reasoning.items()}


def scored_as(
    inputs: CreditInputs, b: int, row: Reasoning, eos_ids: Sequence[int], vocab: int | None
) -> tuple[Tensor, Reasoning]:
    """Append its probe to a row's completion, or replace its answer by its target; `vocab` limits their ids."""
    completion, probe = inputs.rows.completions[b], inputs.probe(b)
    target, name = None if inputs.targets is None else inputs.targets[b], inputs.rows.index[b]
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
