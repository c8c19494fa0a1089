"""Score counterfactuals: how much an answer's log-prob drops when a span of the reasoning is masked.

Completions and their branches (`branch`) become packed trees (`plan.py`); one forward per pack gives all answer
log-probs. The host lays out a pack while the device runs the one before, and reads values once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from itertools import count, groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..batch import Batch, Masks
from ..model.attention import KeyValueStore
from ..model.check.verify import check_supported
from ..model.head import Head
from ..model.memory import run_in_memory
from ..model.merged import merged_weights
from ..model.parts import causal_lm
from ..model.run_inside import run_inside
from ..model.tree_forward import pack_states, packed_hidden, tree_attention_mode
from ..model.walk import Model, ModelWalk
from ..ops.upload import upload
from ..rows import Rows
from ..span import Span
from ..tree.packs import lay_out, lay_out_split
from ..tree.prefix_tree import Pack, Query
from .branches import check_ids
from .outcomes import OUTCOMES, Divergences, Outcome
from .plan import QueryPlan, plan_queries, plan_scoring


@dataclass(frozen=True)
class ScoringWork:
    """Counts of what scoring did; compare `tokens_fed` with `tokens_unshared`."""

    forwards: int = 0
    tokens_fed: int = 0
    tokens_unshared: int = 0  # tokens if every query (log-probs, base answer, each branch) took its own forward

    def __add__(self, other: "ScoringWork") -> "ScoringWork":
        """Add two counts."""
        return ScoringWork(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class CounterfactualScores:
    """Scores of the answers of B completions, as sampled and without each span, fp32 in nats, on the host once read.

    A span matters by its drop, its importance. If the outcome is a distribution (`last`, `mean`), `base` is 0 and
    `masked` minus the KL divergence from the unmasked one.
    """

    base: Tensor  # (B,) log P(answer | prompt, reasoning), or its mean over tokens; nan where there is no answer
    masked: list[Tensor]  # B tensors (K_b,), the same with span k masked
    drop: list[Tensor]  # B tensors (K_b,), `base - masked`, below 0 for a distractor (minus D of CF paper, eq. 3)
    work: ScoringWork


def score_counterfactuals(
    model: nn.Module,
    rows: Rows,
    spans: Sequence[Sequence[Span]],
    answers: Sequence[Span | None],
    *,
    mask: Masks,
    token_budget: int | None = None,
    outcome: Outcome = "logprob",
) -> CounterfactualScores:
    """Score the answer of each completion as sampled and with each span masked (CF paper, eqs. 3 and 5).

    The numbers are those of one full forward per span, to rounding. With spans of one token each and a divergence as
    the outcome this is OAR-P (OAR paper).

    Args:
        model: a transformers causal model that uses the attention interface, bare or under PEFT (LoRA), torch.compile,
            DDP, FSDP or ZeRO-3; it is left exactly as it was. All processes that share its weights must call, each with
            its own rows or none; all raise what one raises.
        rows: prompts and completions. Tokens after the answer are allowed and not fed.
        spans: for each completion, spans to mask one at a time. They may overlap each other, never the answer; a
            span after the answer has drop 0 by causality.
        answers: for each completion its answer, or None; then its scores are nan.
        mask: replacement of a masked span: an id for each of its tokens; "drop" for no token, so that later ones move
            up; or a function of `ScoredRow` and the span's number that gives int64 ids, of any number.
        token_budget: maximum tokens per forward; default by free memory. The result does not depend on it.
        outcome: quantity to compare, of `Outcome`.

    Raises:
        ValueError: bad input; the message names argument, row and value.
        TypeError, NotImplementedError: models that cannot be scored; the message says why.
        FloatingPointError: the model gave a nan log-prob; the message names the row.
    """
    causal = causal_lm(model)

    def body() -> CounterfactualScores:
        if outcome not in OUTCOMES:
            raise ValueError(f"outcome must be one of {', '.join(OUTCOMES)}, got {outcome!r}")
        batch = Batch(rows, units=spans, answers=answers, token_budget=token_budget)
        check_ids(causal, rows)
        return score_batch(causal, batch, outcome, mask)

    return run_inside(model, body)


def score_batch(
    model: Model, batch: Batch, outcome: Outcome = "logprob", mask: Masks = None, merge_adapters: bool = False
) -> CounterfactualScores:
    """Score a batch whose ids are checked as `score_counterfactuals` does; None masks by the batch's placeholder."""
    walk = ModelWalk.of(model)
    plan = plan_scoring(walk, batch, outcome, mask)
    values, work = run_plan(walk, check_supported(walk), plan, plan.packs(), merge_adapters=merge_adapters)
    return collect_scores(on_host(values, plan), plan.sizes, batch, outcome, work)


def query_logprobs(
    model: nn.Module,
    bundles: Sequence[Sequence[Query]],
    *,
    index: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
    token_budget: int | None = None,
) -> tuple[list[list[Tensor]], ScoringWork]:
    """Compute log-probs of all queries' targets, without gradient, from packed trees, which feed common prefixes once.

    Each bundle has the queries of one row, whose ids are not checked; `index` names rows in errors, and rows of equal
    `groups` are fed side by side. Returns for each bundle a list with, for each query, fp32 log-probs (A,) in nats on
    the host; and counts of work.
    """

    def body() -> tuple[list[list[Tensor]], ScoringWork]:
        walk = ModelWalk.of(causal_lm(model))
        plan = plan_queries(walk, bundles, index=index, groups=groups, token_budget=token_budget)
        values, work = run_plan(walk, check_supported(walk), plan, plan.packs())
        return collect_logprobs(on_host(values, plan), plan), work

    return run_inside(model, body)


class _Reading(NamedTuple):
    """Values that the queries of a pack read off it."""

    pack: Pack
    values: Tensor  # on the device
    order: np.ndarray  # int64: index into `values` that lists them one query after the other


def run_plan(
    walk: ModelWalk,
    head: Head,
    plan: QueryPlan,
    packs: Iterable[Pack],
    trunks: Mapping[Pack, tuple[Tensor, KeyValueStore | None]] | None = None,
    *,
    merge_adapters: bool = False,
    meanwhile: Callable[[], object] = lambda: None,
) -> tuple[Tensor, ScoringWork]:
    """Feed packs that answer the queries of `plan`, smaller ones where memory ends; queue values in order, count work.

    A pack may continue one of `trunks`, given with their hidden states, keys and values, or a pack without queries.
    `meanwhile` is called while the device runs, and also if a forward raises. `on_host` reads the values.
    """
    divergences, given = Divergences(head), trunks or {}
    states = dict(given)

    def run(pack: Pack) -> _Reading:
        if not pack.queries:
            for own_trunk in states.keys() - given.keys():
                del states[own_trunk]  # nothing continues the one before any more
            own = KeyValueStore()
            states[pack] = packed_hidden(walk, pack, store=own), own
            return _Reading(pack, head.weight.new_zeros(0), np.zeros(0, np.int64))
        hidden, store = (None, None) if pack.trunk is None else states[pack.trunk]
        rows = pack_states(walk, head, pack, store=store, earlier=hidden)
        if not plan.queries[0].divergence:  # as all others
            return _Reading(pack, head.logprobs(rows.states, rows.targets), pack.query_index)
        counts = np.array([len(plan.queries[n].targets) for n in pack.queries])
        read = rows.states.index_select(0, *upload([pack.query_index], rows.states.device))
        values = divergences.read(read, counts, [plan.bundle_of[n] for n in pack.queries])
        return _Reading(pack, -values, np.arange(len(values)))

    def smaller(pack: Pack) -> Iterable[Pack]:
        half = pack.num_tokens // 2
        if pack.trunk is not None:
            return lay_out(plan.queries, [[n] for n in pack.queries], half, trunk=pack.trunk)
        bundles = [list(bundle) for _, bundle in groupby(pack.queries, plan.bundle_of.__getitem__)]
        return lay_out_split(plan.queries, [bundles], replace(plan.limits, token_budget=half))

    try:
        with merged_weights(walk) if merge_adapters else nullcontext(), tree_attention_mode(walk):
            readings = list(run_in_memory(packs, run, smaller))
    finally:
        meanwhile()
    return _collect(plan, readings)


def _collect(plan: QueryPlan, readings: Sequence[_Reading]) -> tuple[Tensor, ScoringWork]:
    """Put the values of all queries in order, on their device; count the work."""
    work = ScoringWork(
        forwards=len([one for one in readings if one.pack.num_tokens]),
        tokens_fed=sum(one.pack.num_tokens for one in readings),
        tokens_unshared=sum(len(query.tokens) for query in plan.queries),
    )
    if not readings:
        return torch.zeros(0), work
    ends = np.cumsum([len(one.values) for one in readings])
    index = np.concatenate([one.order + end - len(one.values) for one, end in zip(readings, ends, strict=True)])
    query_of = np.concatenate([np.array(one.pack.queries, dtype=np.int64) for one in readings])
    order = np.argsort(np.repeat(query_of, np.array(plan.sizes)[query_of]), kind="stable")
    values = torch.cat([one.values for one in readings])
    return values.index_select(0, *upload([index[order]], values.device)), work


def on_host(values: Tensor, plan: QueryPlan) -> Tensor:
    """Copy the values of a plan to the host, which waits for the device; raise `FloatingPointError` for a nan."""
    values = values.cpu()
    if (bad := torch.isnan(values)).any():
        number = np.searchsorted(np.cumsum(plan.sizes), int(bad.nonzero()[0]), side="right")
        row = plan.index[plan.bundle_of[int(number)]]
        raise FloatingPointError(f"completions row {row}: the model gave a nan log-prob")
    return values


def collect_logprobs(values: Tensor, plan: QueryPlan) -> list[list[Tensor]]:
    """Split the values of a plan by bundle and query."""
    each = iter(values.split(plan.sizes))
    return [[next(each) for _ in bundle] for bundle in plan.bundles]


def collect_scores(
    values: Tensor, sizes: Sequence[int], batch: Batch, outcome: Outcome, work: ScoringWork
) -> CounterfactualScores:
    """Put the values of the queries of a batch, `sizes` of them each, together to answer scores, where they are."""
    base_of, branch_of, queries, absent = [], [], count(), len(sizes)  # of each row, and of each span: a score's index
    for row in batch.scored_rows:
        base_of.append(absent if row.answer is None else next(queries))
        # A span after the answer masks nothing that the answer depends on: it scores as the base itself.
        branch_of += [next(queries) if masks else base_of[-1] for masks in row.masks_something]
    spans = [len(row.spans) for row in batch.scored_rows]
    arrays = [np.array(one, np.int64) for one in (sizes, base_of, branch_of, np.repeat(base_of, spans))]
    lengths, own, branches, before = upload(arrays, values.device)
    reduction = "mean" if outcome == "mean_logprob" else "sum"
    scores = torch.segment_reduce(values, reduction, lengths=lengths, unsafe=True) if len(sizes) else values
    scores = torch.cat([scores, scores.new_full((1,), float("nan"))])  # the last is that of a row without an answer
    base, masked = scores.index_select(0, own), scores.index_select(0, branches)
    drop = scores.index_select(0, before) - masked
    return CounterfactualScores(base, list(masked.split(spans)), list(drop.split(spans)), work)
