"""Counterfactual scores: how much an answer's log-prob drops when a span of the reasoning is masked.

Completions and their masked branches become packed trees (`tree.py`); one forward per pack (`packed_model.py`) yields
all answer log-probs and, when asked, the log-prob of every completion token. `outcomes.py` says what else than a
log-prob may drop. The host lays out a pack while the device runs the one before, and looks at values once, at the end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
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
from .memory import run_in_memory
from .outcomes import DIVERGENCES, Outcome, OutcomeReader, checked_outcome
from .packed_model import HeadRows, KeyValueStore, pack_states, packed_hidden, tree_attention_mode
from .proof import prove_supported
from .recurrent import has_cells
from .spans import Span
from .token_rows import check_columns, checked_ids, equal_prompts_together
from .tree import Chain, Limits, Pack, Query, chain_units


@dataclass(frozen=True)
class ScoringWork:
    """What scoring did, for accounting: compare `tokens_fed` with `tokens_unshared`."""

    forwards: int = 0
    tokens_fed: int = 0
    tokens_unshared: int = 0  # if every query (log-probs, base answer, each branch) took a forward of its own
    head_rows: int = 0

    def __add__(self, other: "ScoringWork") -> "ScoringWork":
        """The sum of two counts."""
        return ScoringWork(
            self.forwards + other.forwards,
            self.tokens_fed + other.tokens_fed,
            self.tokens_unshared + other.tokens_unshared,
            self.head_rows + other.head_rows,
        )


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
    fills: Sequence[Sequence[Tensor]] | None = None

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
    fills: Sequence[Sequence[Tensor]] | None = None,
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
        fills: if given, the int64 ids that replace each span instead, as many as it has tokens; see `resampled_fills`.
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
    options = ScoringOptions(placeholder_id, token_budget, outcome, logprobs, temperature, fills)
    plan = _plan(causal, prompts, completions, spans, answers, options)
    values, work = _run(causal, plan, options.temperature)
    return collect_scores(values, plan, options, work)


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
        For each unit a list with, for each of its queries, fp32 log-probs (A,) in nats on the host; and what it took.

    Raises:
        ValueError: `lengths` or `row_numbers` of another number than `units`, a token budget below 1, a temperature
            that is not positive.
        TypeError, NotImplementedError: models that cannot be scored; the message says why.
        FloatingPointError: the model gave a nan log-prob; the message names the row.
    """
    causal = causal_lm(model)
    plan = plan_queries(
        causal, units, lengths=lengths, row_numbers=row_numbers, token_budget=token_budget, temperature=temperature
    )
    values, work = _run(causal, plan, temperature)
    return collect_logprobs(values, plan), work


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
class _Part:
    """Units, by number, that may share a forward: all, unless the model's positions follow the longest of a forward."""

    units: list[int]
    limits: Limits


@dataclass(frozen=True)
class ScoringPlan:
    """What is asked in one call, and what may be fed together."""

    order: list[int]  # the caller's number of each row
    units: list[list[Query]]  # of each row
    rows: list[Row] = field(default_factory=list)  # equal prompts side by side; none where queries alone are given
    parts: list[_Part] = field(default_factory=list)

    @cached_property
    def queries(self) -> list[Query]:
        """Those of all units, by number."""
        return [query for unit in self.units for query in unit]

    @cached_property
    def numbers(self) -> list[range]:
        """The numbers of each unit's queries."""
        stops = np.cumsum([len(unit) for unit in self.units]).tolist()
        return [range(stop - len(unit), stop) for unit, stop in zip(self.units, stops, strict=True)]

    @cached_property
    def unit_of(self) -> list[int]:
        """The unit of each query, by number."""
        return [i for i, unit in enumerate(self.units) for _ in unit]

    def chains(self) -> Iterator[Chain]:
        """Every chain of packs, in order, made when it is asked for."""
        for part in self.parts:
            yield from chain_units(self.queries, [self.numbers[i] for i in part.units], part.limits)

    @property
    def packs(self) -> list[Pack]:
        """Every forward, in order."""
        return [pack for chain in self.chains() for pack, _ in chain.packs(self.queries)]


def plan_scoring(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    spans: Sequence[Sequence[Span]],
    answers: Sequence[Span | None],
    **options: Any,
) -> ScoringPlan:
    """Check the input of `score_counterfactuals`; nothing runs on a device. `options` are those of `ScoringOptions`.

    Packs are laid out when they are asked for.
    """
    return _plan(model, prompts, completions, spans, answers, ScoringOptions(**options))


def plan_queries(
    model: PreTrainedModel,
    units: Sequence[Sequence[Query]],
    *,
    lengths: Sequence[int] | None = None,
    row_numbers: Sequence[int] | None = None,
    token_budget: int | None = None,
    temperature: float = 1.0,
) -> ScoringPlan:
    """Check the input of `query_logprobs`; nothing runs on a device."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    asked = [list(unit) for unit in units]
    if lengths is None:
        lengths = [max((query.length for query in unit), default=0) for unit in asked]
    numbers = list(range(len(asked)) if row_numbers is None else row_numbers)
    for name, column in (("lengths", lengths), ("row_numbers", numbers)):
        if len(column) != len(asked):
            raise ValueError(f"{name} has {len(column)} rows, units has {len(asked)}; they must agree")
    return _lay_out(model, numbers, asked, lengths, token_budget, rows=[])


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
    rows = checked_rows(model, ids, spans, answers, options.placeholder_id, options.fills)
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
    limits = Limits(
        rows_per_forward(model, token_budget),
        continues=not has_cells(model),  # layers that carry a state keep none for branches of a later forward
        most_rows=largest_forward(model),
    )
    parts = apart_by_length(model, units, lengths, order)
    return ScoringPlan(
        order,
        [max(unit, key=len) for unit in zip(*parts, strict=True)],  # each asks in one part at most
        rows,
        [_Part([i for i, unit in enumerate(part) if unit], limits) for part in parts],
    )


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
    for k, span in enumerate(row.spans):
        if row.masks_something(span):
            branch = fed.copy()
            filler = options.placeholder_id if row.fills is None else row.fills[k]
            branch[prompt_length + span.start : prompt_length + span.end] = filler
            queries.append(Query(branch, first, targets, beyond=beyond, divergence=divergence))
    return queries


class Read(NamedTuple):
    """A pack that was fed, and what the queries that it answers read of it."""

    pack: Pack
    numbers: Sequence[int]  # of those queries
    values: Tensor  # on the device
    places: np.ndarray  # int64: of the queries' values among `values`, one query after the other


def _run(model: PreTrainedModel, plan: ScoringPlan, temperature: float) -> tuple[Tensor, ScoringWork]:
    """The values of every query in order, fp32 on the host, and what it took."""
    head = prove_supported(model)
    reader = OutcomeReader(head, temperature)
    with tree_attention_mode(model):
        found = run_in_memory(
            plan.chains(), partial(_read_chain, model, head, plan, reader), partial(_smaller_chains, plan)
        )
        read = [one for chain in found for one in chain]
    return gather(plan, read)


def gather(plan: ScoringPlan, read: Sequence[Read]) -> tuple[Tensor, ScoringWork]:
    """The values of all queries of `plan` in order, on the host, and what it took.

    One copy for all of them, which waits for the device.
    """
    work = ScoringWork(
        forwards=len([one for one in read if one.pack.num_tokens]),
        tokens_fed=sum(one.pack.num_tokens for one in read),
        tokens_unshared=sum(len(query.tokens) for query in plan.queries),
        head_rows=sum(len(one.pack.rows) for one in read),
    )
    if not read:
        return torch.zeros(0), work
    ends = np.cumsum([len(one.values) for one in read])
    places = np.concatenate([one.places + end - len(one.values) for one, end in zip(read, ends, strict=True)])
    order = _in_order([n for one in read for n in one.numbers], [query.num_values for query in plan.queries])
    return torch.cat([one.values for one in read]).cpu()[torch.from_numpy(places[order])], work


def _in_order(answered: list[int], sizes: list[int]) -> np.ndarray:
    """Index that puts the values of queries `answered` one after the other in the order of their numbers."""
    size, numbers = np.array(sizes), np.array(answered)
    starts = np.empty(len(sizes), dtype=np.int64)
    starts[numbers] = np.cumsum(size[numbers]) - size[numbers]
    return np.repeat(starts - (np.cumsum(size) - size), size) + np.arange(size.sum())


def _read_chain(
    model: PreTrainedModel, head: Head, plan: ScoringPlan, reader: OutcomeReader, chain: Chain
) -> list[Read]:
    """What a chain's packs say."""
    store, hidden, read = None, None, list[Read]()
    for pack, numbers in chain.packs(plan.queries):
        if chain.continued and hidden is None:
            store = KeyValueStore()
            hidden = packed_hidden(model, pack, store=store)
            read.append(Read(pack, [], hidden.new_zeros(0), np.zeros(0, np.int64)))
        else:
            rows = pack_states(model, head, pack, store=store, earlier=hidden)
            read.append(read_pack(reader, plan, pack, numbers, rows))
    return read


def read_pack(reader: OutcomeReader, plan: ScoringPlan, pack: Pack, numbers: Sequence[int], rows: HeadRows) -> Read:
    """What the queries `numbers` of `plan`, those of `pack`, read of its rows."""
    queries, units = [plan.queries[n] for n in numbers], [plan.unit_of[n] for n in numbers]
    return Read(pack, numbers, *reader.read(pack, queries, units, rows))


def _smaller_chains(plan: ScoringPlan, chain: Chain) -> list[Chain]:
    """The queries of a chain in more packs, of half the rows or of one query each; none if that is what it has."""
    sizes = [pack.num_tokens for pack, _ in chain.packs(plan.queries)]
    for budget in (max(sizes[1:] or sizes) // 2, 1):
        limits = replace(chain.limits, token_budget=max(budget, 1))
        chains = list(chain_units(plan.queries, chain.units, limits))
        if sum(1 for one in chains for _ in one.packs(plan.queries)) > len(sizes):
            return chains
    return []


def collect_logprobs(values: Tensor, plan: ScoringPlan) -> list[list[Tensor]]:
    """Values, as from `gather`, by unit and query."""
    _reject_nan(values, plan)
    each = iter(values.split([query.num_values for query in plan.queries]))
    return [[next(each) for _ in unit] for unit in plan.units]


def collect_scores(
    values: Tensor, plan: ScoringPlan, options: ScoringOptions, work: ScoringWork
) -> CounterfactualScores:
    """Put values, as from `gather`, together to answer scores and hand all back in the caller's order of rows."""
    _reject_nan(values, plan)
    sizes = [query.num_values for query in plan.queries]
    reduction = "mean" if options.outcome == "mean_logprob" else "sum"
    scores = torch.segment_reduce(values, reduction, lengths=torch.tensor(sizes)) if sizes else values
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
