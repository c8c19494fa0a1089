"""Counterfactual scores: how much an answer's log-prob drops when a span of the reasoning is masked.

Completions and their masked branches become packed trees (`tree.py`); one forward per pack (`hf.py`) yields
all answer log-probs and, when asked, the log-prob of every completion token. `outcomes.py` says what else than a
log-prob may drop.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .hf import (
    Head,
    apart_by_length,
    causal_lm,
    context_length,
    largest_forward,
    rows_per_forward,
    vocab_size,
)
from .outcomes import DIVERGENCES, Outcome, OutcomeReader, checked_outcome
from .packed_model import KeyValueStore, head_states, pack_states, packed_hidden, tree_attention_mode
from .proof import prove_supported
from .recurrent import has_cells
from .spans import Span
from .token_rows import check_columns, checked_ids, equal_prompts_together
from .tree import Chain, Pack, Query, chain_units


@dataclass(frozen=True)
class ScoringWork:
    """What scoring did, for accounting: compare `tokens_fed` with `tokens_unshared`."""

    forwards: int
    tokens_fed: int
    tokens_unshared: int  # if every query (log-probs, base answer, each branch) took a forward of its own
    head_rows: int


@dataclass(frozen=True)
class CounterfactualScores:
    """What each span does to the answers of B completions, in nats.

    Where the outcome is a log-prob, `base` and `masked` are that of the answer; where it is a distribution (`last`,
    `mean`), they are minus its KL divergence from the unmasked one, so `base` is 0. Either way a span matters the
    more the lower its drop is: its importance is `-drop`.

    Attributes:
        base: (B,) fp32 log P(answer | prompt, reasoning), or its mean over tokens, or 0; nan where there is no answer.
        masked: B tensors (K_b,) fp32, the same with span k replaced by placeholders; or minus the divergence.
        drop: B tensors (K_b,) fp32, `masked - base`; of log-probs, positive marks a distractor (CF paper, eq. 3);
            minus a divergence is never positive.
        logprobs: B tensors (T_b,) fp32 of every completion token, if asked for.
        work: counts of what was computed.

    All tensors are on the host.
    """

    base: Tensor
    masked: list[Tensor]
    drop: list[Tensor]
    logprobs: list[Tensor] | None
    work: ScoringWork


@dataclass(frozen=True)
class ScoringOptions:
    """The keyword options of `score_counterfactuals`, which see.

    Raises:
        ValueError: a temperature that is not positive, an outcome that is none.
    """

    placeholder_id: int
    token_budget: int | None = None
    outcome: Outcome = "logprob"
    logprobs: bool = False
    temperature: float = 1.0

    def __post_init__(self) -> None:
        checked_outcome(self.outcome)
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")


def score_counterfactuals(
    model: nn.Module,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    spans: Sequence[Sequence[Span]],
    answers: Sequence[Span | None],
    *,
    placeholder_id: int,
    token_budget: int | None = None,
    outcome: Outcome = "logprob",
    logprobs: bool = False,
    temperature: float = 1.0,
) -> CounterfactualScores:
    """Score the answer of each completion as sampled and with each span masked (CF paper, eqs. 3 and 5).

    Exact: the same numbers as one full forward per span, to rounding, from far fewer tokens. Prompts, completions,
    branches and any longer prefixes that are equal are computed once. With spans of one token each and a divergence
    for outcome this is OAR-P (OAR paper).

    Args:
        model: a transformers causal model that uses the attention interface, bare or under PEFT (LoRA), DDP or
            torch.compile. Left exactly as it was: mode, attention implementation, random state.
        prompts: B 1-D int64 tensors of token ids, unpadded.
        completions: B 1-D int64 tensors, unpadded. Tokens after the answer are allowed and not fed.
        spans: for each completion, spans to mask one at a time. They may overlap each other, never the answer; a
            span after the answer has drop 0 by causality.
        answers: for each completion its answer, or None; then it has no scores (`base` nan, `drop` nan).
        placeholder_id: the id that replaces each token of a masked span, so positions do not move.
        token_budget: most tokens per forward; default by free memory. Where a completion and its branches are over
            it, the completion is fed first and its branches, in several forwards, continue its keys and values;
            layers that carry a state begin again with what branches have in common. The result does not depend on
            the budget (to rounding).
        outcome: what is compared, of `Outcome`: the answer's log-prob (`logprob`), its mean over tokens
            (`mean_logprob`), or by KL divergence the distribution of the answer's first token (`last`) or that of
            the mean logits over its tokens (`mean`).
        logprobs: also return the log-prob of every completion token, from the same forward.
        temperature: divides the logits of `logprobs` alone (the sampling temperature, for old log-probs as TRL
            defines them); answers are always scored at 1.

    Raises:
        ValueError: bad input; the message names argument, row and value.
        TypeError, NotImplementedError: models that cannot be scored; the message says why.
        FloatingPointError: the model gave a nan log-prob; the message names the row.
    """
    causal = causal_lm(model)
    options = ScoringOptions(placeholder_id, token_budget, outcome, logprobs, temperature)
    plan = _plan(causal, prompts, completions, spans, answers, options)
    values, work = _run(causal, plan, options.temperature)
    return collect_scores(values, plan, options, work)


def query_logprobs(
    model: nn.Module,
    units: Sequence[Sequence[Query]],
    *,
    lengths: Sequence[int] | None = None,
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
        token_budget: as in `score_counterfactuals`.
        temperature: divides the logits of the queries that are `tempered`.

    Returns:
        For each unit a list with, for each of its queries, fp32 log-probs (A,) in nats on the host; and what it took.

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
    plan = _lay_out(causal, list(range(len(asked))), asked, lengths, token_budget, rows=[])
    values, work = _run(causal, plan, temperature)
    _reject_nan(values, plan)
    each = iter(values.split([query.num_values for query in plan.queries]))
    return [[next(each) for _ in unit] for unit in asked], work


@dataclass(frozen=True)
class Row:
    """One completion, checked, as numpy arrays."""

    prompt: np.ndarray  # (P,) int64
    completion: np.ndarray  # (T,) int64
    spans: list[Span]
    answer: Span | None

    def masks_something(self, span: Span) -> bool:
        """Whether masking `span` can change the answer: a later span cannot, by causality."""
        return self.answer is not None and span.start < self.answer.start


@dataclass(frozen=True)
class ScoringPlan:
    """What is fed for one call: all that the CPU decides before the first forward."""

    order: list[int]  # the caller's number of each row
    units: list[list[Query]]  # of each row
    rows: list[Row]  # equal prompts side by side; none where queries alone are given
    parts: list[list[range]] = field(default_factory=list)  # the queries of each unit, by what may share a forward
    token_budget: int = 1
    continues: bool = True  # a forward's keys and values are all that its branches need
    most_rows: int | None = None  # of a forward with those that it continues

    @cached_property
    def queries(self) -> list[Query]:
        """Those of all units, by number."""
        return [query for unit in self.units for query in unit]

    @cached_property
    def unit_of(self) -> list[int]:
        """The unit of each query, by number."""
        return [i for i, unit in enumerate(self.units) for _ in unit]

    @property
    def packs(self) -> list[Pack]:
        """Every forward, in order."""
        return [pack for chain in self.chains() for pack, _ in chain.packs(self.queries)]

    def chains(self) -> Iterator[Chain]:
        """The forwards, each laid out when it is asked for."""
        for part in self.parts:
            yield from self.lay_out(part, self.token_budget)

    def lay_out(self, units: Sequence[Sequence[int]], token_budget: int) -> Iterator[Chain]:
        """Some units, by the numbers of their queries, in forwards of at most so many tokens."""
        return chain_units(self.queries, units, token_budget, continues=self.continues, most_rows=self.most_rows)


def plan_scoring(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    spans: Sequence[Sequence[Span]],
    answers: Sequence[Span | None],
    **options: Any,
) -> ScoringPlan:
    """Check the input of `score_counterfactuals` and lay its trees out in packs; nothing runs on a device.

    Packs that continue others are laid out when their turn comes. `options` are those of `ScoringOptions`.
    """
    return _plan(model, prompts, completions, spans, answers, ScoringOptions(**options))


def _plan(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    spans: Sequence[Sequence[Span]],
    answers: Sequence[Span | None],
    options: ScoringOptions,
) -> ScoringPlan:
    check_columns(prompts, completions=completions)
    ids = checked_ids(prompts, completions, vocab_size(model), context_length(model))
    rows = checked_rows(model, ids, spans, answers, options.placeholder_id)
    order = equal_prompts_together([row.prompt for row in rows])
    rows = [rows[b] for b in order]
    units = [queries_of(row, options) for row in rows]
    lengths = [len(row.prompt) + len(row.completion) for row in rows]
    return _lay_out(model, order, units, lengths, options.token_budget, rows)


def _lay_out(
    model: PreTrainedModel,
    order: list[int],
    units: list[list[Query]],
    lengths: Sequence[int],
    token_budget: int | None,
    rows: list[Row],
) -> ScoringPlan:
    """Rows that may share a forward are all rows, unless the model's positions follow the longest of a forward."""
    apart = apart_by_length(model, units, lengths, order)
    units = [max(unit, key=len) for unit in zip(*apart, strict=True)]
    stops = np.cumsum([len(unit) for unit in units]).tolist()
    numbers = [range(stop - len(unit), stop) for unit, stop in zip(units, stops, strict=True)]
    return ScoringPlan(
        order,
        units,
        rows,
        parts=[[own for unit, own in zip(part, numbers, strict=True) if unit] for part in apart],
        token_budget=rows_per_forward(model, token_budget),
        continues=not has_cells(model),  # layers that carry a state keep none for branches of a later forward
        most_rows=largest_forward(model),
    )


def checked_rows(
    model: PreTrainedModel,
    ids: Sequence[tuple[np.ndarray, np.ndarray]],
    spans: Sequence[Sequence[Span]],
    answers: Sequence[Span | None],
    placeholder_id: int,
) -> list[Row]:
    """Checked prompts and completions with their spans and answers, checked too; see `score_counterfactuals`."""
    check_columns(ids, spans=spans, answers=answers)
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
        rows.append(Row(prompt, completion, row_spans, answer))
    return rows


def _checked_span(where: str, span: Span, length: int) -> Span:
    start, end = (int(edge) for edge in span)
    if not 0 <= start < end <= length:
        raise ValueError(f"{where}: {(start, end)} is not a non-empty span inside a completion of {length} tokens")
    return Span(start, end)


def queries_of(row: Row, options: ScoringOptions) -> list[Query]:
    """What to ask for one completion: every token's log-prob if wanted, the base answer, then a branch per span."""
    prompt_length = len(row.prompt)
    tokens = np.concatenate([row.prompt, row.completion])
    queries = []
    if options.logprobs:
        tempered = options.temperature != 1.0
        queries.append(Query(tokens[:-1], prompt_length - 1, row.completion, tempered, beyond=tokens[-1:]))
    if row.answer is None:
        return queries
    targets = row.completion[row.answer.start : row.answer.end]
    if options.outcome == "last":
        targets = targets[:1]
    divergence = options.outcome in DIVERGENCES
    first = prompt_length + row.answer.start - 1
    fed, beyond = np.split(tokens, [first + len(targets)])
    queries.append(Query(fed, first, targets, beyond=beyond, divergence=divergence))
    for span in row.spans:
        if row.masks_something(span):
            branch = fed.copy()
            branch[prompt_length + span.start : prompt_length + span.end] = options.placeholder_id
            queries.append(Query(branch, first, targets, beyond=beyond, divergence=divergence))
    return queries


class Read(NamedTuple):
    """A pack that was fed, the numbers of the queries that it answers, and their values, one after the other."""

    pack: Pack
    numbers: list[int]
    values: Tensor


def _run(model: PreTrainedModel, plan: ScoringPlan, temperature: float) -> tuple[Tensor, ScoringWork]:
    """The values of every query in order, fp32, and what it took."""
    head = prove_supported(model)
    reader, read = OutcomeReader(head, temperature), list[Read]()
    upcoming, todo = plan.chains(), list[Chain]()
    with tree_attention_mode(model):
        while (chain := todo.pop() if todo else next(upcoming, None)) is not None:
            found, smaller = _read_chain(model, head, plan, chain, reader)
            read += found
            if smaller:
                torch.cuda.empty_cache()
                todo += reversed(smaller)
    return gather(plan, read)


def gather(plan: ScoringPlan, read: Sequence[Read]) -> tuple[Tensor, ScoringWork]:
    """The values of all queries of `plan` in order, fetched to the host at once, and what it took."""
    values = torch.cat([one.values for one in read]).cpu() if read else torch.zeros(0)
    index = _back_in_order([n for one in read for n in one.numbers], [query.num_values for query in plan.queries])
    work = ScoringWork(
        forwards=len([one for one in read if one.pack.num_tokens]),
        tokens_fed=sum(one.pack.num_tokens for one in read),
        tokens_unshared=sum(len(query.tokens) for query in plan.queries),
        head_rows=sum(len(one.pack.rows) for one in read),
    )
    return values if index is None else values[torch.from_numpy(index)], work


def _back_in_order(answered: list[int], sizes: list[int]) -> np.ndarray | None:
    """Index that puts the values of queries `answered` one after the other in order of their numbers, if need be."""
    if answered == list(range(len(answered))):
        return None
    size, numbers = np.array(sizes), np.array(answered)
    starts = np.empty(len(sizes), dtype=np.int64)
    starts[numbers] = np.cumsum(size[numbers]) - size[numbers]
    return np.repeat(starts - (np.cumsum(size) - size), size) + np.arange(size.sum())


def _read_chain(
    model: PreTrainedModel, head: Head, plan: ScoringPlan, chain: Chain, reader: OutcomeReader
) -> tuple[list[Read], list[Chain]]:
    """What a chain's packs say; or, where one does not fit in memory, chains of smaller ones to read instead.

    Raises `torch.OutOfMemoryError` if there are none.
    """
    store = KeyValueStore() if chain.left else None
    hidden = None
    read = []
    try:
        if store is not None:
            hidden = packed_hidden(model, chain.pack, store=store)
        for pack, numbers in chain.packs(plan.queries):
            if hidden is not None and pack is chain.pack:
                states = head_states(head, hidden, pack.rows)
            else:
                states = pack_states(model, head, pack, store=store, earlier=hidden)
            read.append(Read(pack, numbers, read_pack(reader, plan, pack, numbers, states)))
    except torch.OutOfMemoryError:
        smaller = _smaller(plan, chain)
        if not smaller:
            raise
        return [], smaller
    return read, []


def read_pack(reader: OutcomeReader, plan: ScoringPlan, pack: Pack, numbers: Sequence[int], states: Tensor) -> Tensor:
    """The values of the queries `numbers` of `plan`, those of `pack`, from the states (R, H) of its rows."""
    return reader.read(pack, [plan.queries[n] for n in numbers], [plan.unit_of[n] for n in numbers], states)


def _smaller(plan: ScoringPlan, chain: Chain) -> list[Chain]:
    """The queries of a chain in more packs, of half the rows or of one query each; none if that is what it has."""
    sizes = [pack.num_tokens for pack, _ in chain.packs(plan.queries)]
    for budget in (max(sizes[1:] or sizes) // 2, 1):
        chains = list(plan.lay_out(chain.units, max(budget, 1)))
        if sum(1 for one in chains for _ in one.packs(plan.queries)) > len(sizes):
            return chains
    return []


def collect_scores(
    values: Tensor, plan: ScoringPlan, options: ScoringOptions, work: ScoringWork
) -> CounterfactualScores:
    """Put values together to answer scores and hand everything back in the caller's order of rows."""
    _reject_nan(values, plan)
    sizes = [query.num_values for query in plan.queries]
    lengths = torch.tensor(sizes)
    reduction = "mean" if options.outcome == "mean_logprob" else "sum"
    scores = torch.segment_reduce(values, reduction, lengths=lengths) if sizes else values
    tokens = iter(values.split(sizes))
    base = values.new_full((len(plan.rows),), float("nan"))
    masked, drop, per_token = ([values.new_empty(0)] * len(plan.rows) for _ in range(3))
    start = 0
    for unit, row, b in zip(plan.units, plan.rows, plan.order, strict=True):
        token_values = [next(tokens) for _ in unit]
        answered = scores[start + options.logprobs : start + len(unit)]  # the base, then a branch per span that matters
        start += len(unit)
        if options.logprobs:
            per_token[b] = token_values[0]
        if row.answer is None:
            masked[b] = drop[b] = base.new_full((len(row.spans),), float("nan"))
            continue
        base[b] = answered[0]
        # A span after the answer masks nothing that the answer depends on: it scores as the base itself.
        matters = [row.masks_something(span) for span in row.spans]
        source = np.where(matters, np.cumsum(matters), 0) if matters else np.zeros(0, np.int64)
        masked[b] = answered[torch.from_numpy(source)]
        drop[b] = masked[b] - base[b]
    return CounterfactualScores(base, masked, drop, per_token if options.logprobs else None, work)


def _reject_nan(values: Tensor, plan: ScoringPlan) -> None:
    if not torch.isnan(values).any():
        return
    position = int(torch.isnan(values).nonzero()[0])
    ends = np.cumsum([sum(query.num_values for query in unit) for unit in plan.units])
    row = plan.order[int(np.searchsorted(ends, position, side="right"))]
    raise FloatingPointError(f"completions row {row}: the model gave a nan log-prob")
