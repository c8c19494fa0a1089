"""Counterfactual scores: how much an answer's log-prob drops when a span of the reasoning is masked.

Completions and their masked branches become packed trees (`tree.py`); one forward per pack (`hf.py`) yields
all answer log-probs and, when asked, the log-prob of every completion token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .hf import (
    Head,
    apart_by_length,
    causal_lm,
    context_length,
    embedding,
    rows_per_forward,
    vocab_size,
)
from .packed_model import pack_logprobs, tree_attention_mode
from .proof import prove_supported
from .spans import Span
from .token_rows import check_columns, checked_ids, equal_prompts_together
from .tree import Pack, Query, pack_units


@dataclass(frozen=True)
class ScoringWork:
    """What scoring did, for accounting: compare `tokens_fed` with `tokens_unshared`."""

    forwards: int
    tokens_fed: int
    tokens_unshared: int  # if every query (log-probs, base answer, each branch) took a forward of its own
    head_rows: int


@dataclass(frozen=True)
class CounterfactualScores:
    """Answer log-probs in nats, with and without each span, of B completions.

    Attributes:
        base: (B,) fp32 log P(answer | prompt, reasoning); nan where there is no answer.
        masked: B tensors (K_b,) fp32, the same with span k replaced by placeholders.
        drop: B tensors (K_b,) fp32, `masked - base`; positive marks a distractor (CF paper, eq. 3).
        logprobs: B tensors (T_b,) fp32 of every completion token, if asked for.
        work: counts of what was computed.
    """

    base: Tensor
    masked: list[Tensor]
    drop: list[Tensor]
    logprobs: list[Tensor] | None
    work: ScoringWork


def score_counterfactuals(
    model: nn.Module,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    spans: Sequence[Sequence[Span]],
    answers: Sequence[Span | None],
    *,
    placeholder_id: int,
    fills: Sequence[Sequence[Tensor]] | None = None,
    token_budget: int | None = None,
    logprobs: bool = False,
    temperature: float = 1.0,
) -> CounterfactualScores:
    """Score the answer of each completion as sampled and with each span masked (CF paper, eqs. 3 and 5).

    Exact: the same numbers as one full forward per span, to rounding, from far fewer tokens. Prompts, completions,
    branches and any longer prefixes that are equal are computed once.

    Args:
        model: a transformers causal model that uses the attention interface, bare or under PEFT (LoRA), DDP or
            torch.compile. Left exactly as it was: mode, attention implementation, random state.
        prompts: B 1-D int64 tensors of token ids, unpadded.
        completions: B 1-D int64 tensors, unpadded. Tokens after the answer are allowed and not fed.
        spans: for each completion, spans to mask one at a time. They may overlap each other, never the answer; a
            span after the answer has drop 0 by causality.
        answers: for each completion its answer, or None; then it has no scores (`base` nan, `drop` nan).
        placeholder_id: the id that replaces each token of a masked span, so positions do not move.
        fills: if given, the int64 ids that replace each span instead, as many as it has tokens; see `resampled_fills`.
        token_budget: most tokens per forward; default by free memory. A completion and its branches stay
            together, even over the budget. The result does not depend on it (to rounding).
        logprobs: also return the log-prob of every completion token, from the same forward.
        temperature: divides the logits of `logprobs` alone (the sampling temperature, for old log-probs as TRL
            defines them); answers are always scored at 1.

    Raises:
        ValueError: bad input; the message names argument, row and value.
        TypeError, NotImplementedError: models that cannot be scored; the message says why.
        FloatingPointError: the model gave a nan log-prob; the message names the row.
    """
    causal = causal_lm(model)
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    plan = plan_scoring(
        causal, prompts, completions, spans, answers, placeholder_id=placeholder_id, fills=fills,
        token_budget=token_budget, logprobs=logprobs, tempered=temperature != 1.0,
    )  # fmt: skip
    values, work = _run(causal, plan.units, plan.parts, temperature)
    return collect_scores(values, plan.rows, plan.units, plan.order, logprobs=logprobs, work=work)


def query_logprobs(
    model: nn.Module,
    units: Sequence[Sequence[Query]],
    *,
    lengths: Sequence[int] | None = None,
    row_numbers: Sequence[int] | None = None,
    token_budget: int | None = None,
    temperature: float = 1.0,
) -> tuple[list[list[Tensor]], ScoringWork]:
    """Log-probs of every query's targets, without gradient, from packed trees: what queries have in common is fed once.

    Args:
        model: as in `score_counterfactuals`.
        units: U sequences of queries, each those of one row; a row may ask nothing. Neighbours share their common
            prefixes, so put rows of one prompt side by side. A query feeds at least one token; its ids are trusted.
        lengths: (U,) tokens of each row fed alone and whole, by which models whose rotary frequencies follow a
            sequence's length choose them; default the longest query of the row with what lies beyond it.
        row_numbers: (U,) what errors call each row; default its place in `units`.
        token_budget: as in `score_counterfactuals`.
        temperature: divides the logits of the queries that are `tempered`.

    Returns:
        For each unit a list with, for each of its queries, fp32 log-probs (A,) in nats on the model's device; and
        what it took.

    Raises:
        ValueError: `lengths` of another number than `units`, a token budget below 1, a temperature that is not
            positive.
        TypeError, NotImplementedError: models that cannot be scored; the message says why.
        FloatingPointError: the model gave a nan log-prob; the message names the row.
    """
    causal = causal_lm(model)
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    asked = [list(unit) for unit in units]
    if lengths is None:
        lengths = [max((query.length for query in unit), default=0) for unit in asked]
    if len(lengths) != len(asked):
        raise ValueError(f"lengths has {len(lengths)} rows, units has {len(asked)}; they must agree")
    if row_numbers is not None and len(row_numbers) != len(asked):
        raise ValueError(f"row_numbers has {len(row_numbers)} rows, units has {len(asked)}; they must agree")
    order = range(len(asked)) if row_numbers is None else row_numbers
    parts = _lay_out(causal, asked, lengths, order, token_budget)
    values, work = _run(causal, asked, parts, temperature)
    _reject_nan(values, asked, order)
    each = iter(values.split([len(query.targets) for unit in asked for query in unit]))
    return [[next(each) for _ in unit] for unit in asked], work


@dataclass(frozen=True)
class Row:
    """One completion, checked, as numpy arrays."""

    prompt: np.ndarray  # (P,) int64
    completion: np.ndarray  # (T,) int64
    spans: list[Span]
    answer: Span | None
    fills: list[np.ndarray] | None = None  # what replaces each span, int64; None for placeholders

    def masks_something(self, span: Span) -> bool:
        """Whether masking `span` can change the answer: a later span cannot, by causality."""
        return self.answer is not None and span.start < self.answer.start


@dataclass(frozen=True)
class ScoringPlan:
    """What is fed for one call: all that the CPU decides before the first forward."""

    rows: list[Row]  # equal prompts side by side
    order: list[int]  # the caller's number of each row
    units: list[list[Query]]  # of each row
    parts: list["_Part"]

    @property
    def packs(self) -> list[Pack]:
        """Every forward, in order."""
        return [pack for part in self.parts for pack in part.packs]


@dataclass(frozen=True)
class _Part:
    """Queries that may share a forward: all of them, unless the model's positions follow the longest of a forward."""

    units: list[list[Query]]  # of each row, empty where the row asks nothing here
    packs: list[Pack]


def plan_scoring(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    spans: Sequence[Sequence[Span]],
    answers: Sequence[Span | None],
    *,
    placeholder_id: int,
    fills: Sequence[Sequence[Tensor]] | None = None,
    token_budget: int | None = None,
    logprobs: bool = False,
    tempered: bool = False,
) -> ScoringPlan:
    """Check the input of `score_counterfactuals` and lay its trees out in packs; nothing runs on a device."""
    check_columns(prompts, completions=completions)
    ids = checked_ids(prompts, completions, vocab_size(model), context_length(model))
    rows = checked_rows(model, ids, spans, answers, placeholder_id, fills)
    order = equal_prompts_together([row.prompt for row in rows])
    rows = [rows[b] for b in order]
    units = [queries_of(row, placeholder_id, logprobs=logprobs, tempered=tempered) for row in rows]
    lengths = [len(row.prompt) + len(row.completion) for row in rows]
    return ScoringPlan(rows, order, units, _lay_out(model, units, lengths, order, token_budget))


def _lay_out(
    model: PreTrainedModel,
    units: list[list[Query]],
    lengths: Sequence[int],
    order: Sequence[int],
    token_budget: int | None,
) -> list[_Part]:
    budget = rows_per_forward(model, token_budget)
    return [_Part(part, pack_units(part, budget)) for part in apart_by_length(model, units, lengths, order)]


def checked_rows(
    model: PreTrainedModel,
    ids: Sequence[tuple[np.ndarray, np.ndarray]],
    spans: Sequence[Sequence[Span]],
    answers: Sequence[Span | None],
    placeholder_id: int,
    fills: Sequence[Sequence[Tensor]] | None = None,
) -> list[Row]:
    """Checked prompts and completions with spans, answers and fills, checked too; see `score_counterfactuals`."""
    check_columns(ids, spans=spans, answers=answers, **({} if fills is None else {"fills": fills}))
    vocab = vocab_size(model)
    if isinstance(placeholder_id, bool) or not isinstance(placeholder_id, int) or not 0 <= placeholder_id < vocab:
        raise ValueError(f"placeholder_id must be an id in [0, {vocab}), got {placeholder_id!r}")
    rows = []
    for b, (prompt, completion) in enumerate(ids):
        given = answers[b]
        answer = None if given is None else _checked_span(f"answers row {b}", given, len(completion))
        row_spans = []
        for k, span in enumerate(spans[b]):
            row_spans.append(_checked_span(f"spans row {b}, span {k}", span, len(completion)))
            if answer is not None and row_spans[-1].start < answer.end and answer.start < row_spans[-1].end:
                raise ValueError(f"spans row {b}, span {k}: {tuple(span)} overlaps the answer {tuple(answer)}")
        row_fills = None if fills is None else _checked_fills(b, fills[b], row_spans, vocab)
        rows.append(Row(prompt, completion, row_spans, answer, row_fills))
    return rows


def _checked_fills(b: int, fills: Sequence[Tensor], spans: list[Span], vocab: int) -> list[np.ndarray]:
    if len(fills) != len(spans):
        raise ValueError(f"fills row {b}: has {len(fills)} fills for {len(spans)} spans")
    checked = []
    for k, (fill, (start, end)) in enumerate(zip(fills, spans, strict=True)):
        if not isinstance(fill, Tensor) or fill.dtype != torch.int64 or fill.shape != (end - start,):
            got = f"{fill.dtype} of shape {tuple(fill.shape)}" if isinstance(fill, Tensor) else type(fill).__name__
            raise ValueError(f"fills row {b}, span {k}: must be an int64 tensor ({end - start},), got {got}")
        ids = fill.cpu().numpy()
        if (bad := (ids < 0) | (ids >= vocab)).any():
            raise ValueError(f"fills row {b}, span {k}: id {ids[bad][0]} is outside the vocabulary [0, {vocab})")
        checked.append(ids)
    return checked


def _checked_span(where: str, span: Span, length: int) -> Span:
    start, end = (int(edge) for edge in span)
    if not 0 <= start < end <= length:
        raise ValueError(f"{where}: {(start, end)} is not a non-empty span inside a completion of {length} tokens")
    return Span(start, end)


def queries_of(row: Row, placeholder_id: int, *, logprobs: bool, tempered: bool = False) -> list[Query]:
    """What to ask for one completion: every token's log-prob if wanted, the base answer, then a branch per span."""
    prompt_length = len(row.prompt)
    tokens = np.concatenate([row.prompt, row.completion])
    queries = []
    if logprobs:
        queries.append(Query(tokens[:-1], prompt_length - 1, row.completion, tempered, beyond=tokens[-1:]))
    if row.answer is None:
        return queries
    targets = row.completion[row.answer.start : row.answer.end]
    first = prompt_length + row.answer.start - 1
    fed, beyond = np.split(tokens, [first + len(targets)])
    queries.append(Query(fed, first, targets, beyond=beyond))
    for k, span in enumerate(row.spans):
        if row.masks_something(span):
            branch = fed.copy()
            filler = placeholder_id if row.fills is None else row.fills[k]
            branch[prompt_length + span.start : prompt_length + span.end] = filler
            queries.append(Query(branch, first, targets, beyond=beyond))
    return queries


def _run(
    model: PreTrainedModel, units: list[list[Query]], parts: list[_Part], temperature: float
) -> tuple[Tensor, ScoringWork]:
    """Log-prob of every target of every query in order, fp32, and what it took."""
    head = prove_supported(model)
    device = embedding(model).device
    values, done = [torch.zeros(0, device=device)], list[Pack]()
    with tree_attention_mode(model):
        for part in parts:
            values += _run_part(model, head, part, temperature, done)
    joined = torch.cat([value.to(device) for value in values])
    if len(parts) > 1:
        joined = joined[torch.from_numpy(_order_of_parts(units, parts)).to(device)]
    work = ScoringWork(
        forwards=len(done),
        tokens_fed=sum(pack.num_tokens for pack in done),
        tokens_unshared=sum(len(query.tokens) for unit in units for query in unit),
        head_rows=sum(len(pack.rows) for pack in done),
    )
    return joined, work


def _order_of_parts(units: list[list[Query]], parts: list[_Part]) -> np.ndarray:
    """Index that puts the targets of all parts, one part after the other, in the order of `units`."""
    starts, position = dict[int, int](), 0
    for part in parts:
        for i, unit in enumerate(part.units):
            if unit:
                starts[i] = position
                position += sum(len(query.targets) for query in unit)
    sizes = [sum(len(query.targets) for query in unit) for unit in units]
    return np.concatenate([starts[i] + np.arange(size) for i, size in enumerate(sizes) if size])


def _run_part(model: PreTrainedModel, head: Head, part: _Part, temperature: float, done: list[Pack]) -> list[Tensor]:
    """The log-probs of each pack, which joins `done`.

    A pack that does not fit in memory is halved and tried again; one completion that does not fit is an error.
    """
    units, todo = part.units, list(reversed(part.packs))
    values: list[Tensor] = []
    while todo:
        pack = todo.pop()
        try:
            scored = pack_logprobs(model, head, pack, temperature)
        except torch.OutOfMemoryError:
            if len(pack.units) == 1:
                raise
            scored = None
        if scored is None:  # outside the handler, whose traceback would keep the failed forward's memory
            torch.cuda.empty_cache()
            inside = [units[i] for i in pack.units]
            halves = pack_units(inside, max(1, pack.num_tokens // 2))
            if len(halves) == 1:
                halves = pack_units(inside, 1)
            shift = pack.units.start
            todo += [half.moved(shift) for half in reversed(halves)]
            continue
        values.append(scored[torch.from_numpy(pack.query_index).to(scored.device)])
        done.append(pack)
    return values


def collect_scores(
    values: Tensor,
    rows: list[Row],
    units: list[list[Query]],
    order: list[int],
    *,
    logprobs: bool,
    work: ScoringWork,
) -> CounterfactualScores:
    """Sum target log-probs to answer scores and hand everything back in the caller's order of rows."""
    _reject_nan(values, units, order)
    lengths = torch.tensor([len(query.targets) for unit in units for query in unit], device=values.device)
    sums = torch.segment_reduce(values, "sum", lengths=lengths) if len(lengths) else values
    tokens = iter(values.split(lengths.tolist()))
    base = values.new_full((len(rows),), float("nan"))
    masked, drop, per_token = ([values.new_empty(0)] * len(rows) for _ in range(3))
    start = 0
    for unit, row, b in zip(units, rows, order, strict=True):
        token_values = [next(tokens) for _ in unit]
        answered = sums[start + logprobs : start + len(unit)]  # the base, then a branch per span that matters
        start += len(unit)
        if logprobs:
            per_token[b] = token_values[0]
        if row.answer is None:
            masked[b] = drop[b] = base.new_full((len(row.spans),), float("nan"))
            continue
        base[b] = answered[0]
        # A span after the answer masks nothing that the answer depends on: it scores as the base itself.
        matters = [row.masks_something(span) for span in row.spans]
        source = np.where(matters, np.cumsum(matters), 0) if matters else np.zeros(0, np.int64)
        masked[b] = answered[torch.from_numpy(source).to(answered.device)]
        drop[b] = masked[b] - base[b]
    return CounterfactualScores(base, masked, drop, per_token if logprobs else None, work)


def _reject_nan(values: Tensor, units: list[list[Query]], order: Sequence[int]) -> None:
    if not torch.isnan(values).any():
        return
    position = int(torch.isnan(values).nonzero()[0])
    ends = np.cumsum([sum(len(query.targets) for query in unit) for unit in units])
    raise FloatingPointError(
        f"completions row {order[int(np.searchsorted(ends, position, side='right'))]}: the model gave a nan log-prob"
    )
