"""Estimate total effects by masking: `examples.estimators.total_effects:TotalEffects`.

A unit acts on the answer directly and through later units. Every branch feeds the text after the masked unit, so it
also tells how much less probable each later unit becomes: the links of a chain that ends at the answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from cfa_kernels.batch import Batch, Mask, ScoredRow
from cfa_kernels.estimators.base import ANSWER, Estimator, Importances
from cfa_kernels.options import TokenId, check_fields
from cfa_kernels.rows import fed_together
from cfa_kernels.scoring.access import MODEL, ModelAccess
from cfa_kernels.scoring.branches import branch
from cfa_kernels.span import Span
from cfa_kernels.tree.prefix_tree import Query


@dataclass(frozen=True)
class TotalEffects(Estimator):
    """Mask each unit and see what the answer loses, directly and through later units that depend on it."""

    name = "total_effects"
    negative = True
    needs = frozenset({ANSWER, MODEL})
    continues = True

    placeholder_id: TokenId | None = None
    """Id that replaces masked tokens; None takes the tokenizer's pad token, else its end-of-text token."""

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, access: ModelAccess, batch: Batch) -> Importances:
        """Judge the units of a batch."""
        return total_effects(access, batch)


def total_effects(access: ModelAccess, batch: Batch) -> Importances:
    """Mask each unit, see how the answer and every later unit move, and sum all paths from the unit to the answer.

    Units are disjoint; else raises `ValueError` naming row and units, and otherwise as `score_counterfactuals`. The
    model must be in this process. Links are as in Thought Anchors (arXiv 2506.19143), which suppresses attention to a
    sentence; the rule by which they are chained is this library's own.

    Returns:
        Total effects by the rule of `chained_effects`, with `base`. Details, of each completion: `direct` (K_b,) fp32,
        the drop of `CounterfactualScores`; `links` (K_b, K_b) fp32, at [i, j] how much less probable unit j's
        tokens are with unit i masked, by the mean of their log-probs, at least 0, and 0 unless j is between i and the
        answer. A completion without an answer has nan throughout.
    """
    if not isinstance(batch.placeholder, int):
        raise ValueError(f"mask={batch.placeholder!r} cannot be combined with total effects: units after it would move")
    rows, orders = batch.scored_rows, [_order(row) for row in batch.scored_rows]
    queries = [_queries(row, order, batch.placeholder) for row, order in zip(rows, orders, strict=True)]
    logprobs, work = access.query(
        queries, index=batch.index, groups=fed_together(batch.rows), token_budget=batch.token_budget
    )
    base = torch.full((len(rows),), float("nan"))
    total, direct = ([torch.full((len(row.spans),), float("nan")) for row in rows] for _ in range(2))
    links = [torch.full((len(row.spans),) * 2, float("nan")) for row in rows]
    unshared = 0
    for b, (row, order, values) in enumerate(zip(rows, orders, logprobs, strict=True)):
        if row.answer is None:
            continue
        base[b], own_direct, own_links = _effects([row.spans[k] for k in order], row.answer, values)
        total[b].zero_()[order] = torch.from_numpy(chained_effects(own_direct, own_links)).float()
        direct[b].zero_()[order] = torch.from_numpy(own_direct).float()
        links[b].zero_()[np.ix_(order, order)] = torch.from_numpy(own_links).float()
        unshared += (1 + len(order)) * (len(row.prompt) + row.answer.end - 1)
    work = replace(work, tokens_unshared=unshared)
    return Importances(total, base=base, work=work, change_of="logprob", details={"direct": direct, "links": links})


def chained_effects(direct: np.ndarray, links: np.ndarray) -> np.ndarray:
    """Chain links to total effects (K,), nats: `T_i = D_i + sum over j > i of (1 - exp(-L_ij)) max(T_j, 0)`.

    `1 - exp(-L_ij)` is the probability that a token of unit j would not have come out as it did without unit i.

    Args:
        direct: (K,) float64 D, nats, of units in order of position; may be negative.
        links: (K, K) float64 L, nats, not negative, infinity allowed; read only above the diagonal.
    """
    total, lost = np.array(direct, dtype=np.float64), -np.expm1(-links)
    for i in range(len(total) - 2, -1, -1):
        reached = np.flatnonzero(lost[i, i + 1 :]) + i + 1  # others lose nothing, even of inf
        total[i] += lost[i, reached] @ np.maximum(total[reached], 0.0)
    return total


def _order(row: ScoredRow) -> list[int]:
    """Number the units of a row that can move its answer, in order of position; refuse overlaps."""
    order = sorted(range(len(row.spans)), key=lambda k: row.spans[k])
    for k, later in pairwise(order):
        if row.spans[k].end > row.spans[later].start:
            raise ValueError(
                f"units row {row.index}: must be disjoint for total effects, but unit {k} {tuple(row.spans[k])} "
                f"overlaps unit {later} {tuple(row.spans[later])}"
            )
    return [k for k in order if row.masks_something[k]]


def _runs(units: Sequence[Span], answer: Span) -> Iterator[list[Span]]:
    """Yield the runs of tokens to score, later units and the answer: of the row as sampled, then of each branch."""
    # Those that touch are one run: gaps would cost rows of the head, and many short queries time of the host.
    runs = list[Span]()
    for start, end in (*units, answer):
        if runs and runs[-1].end == start:
            start = runs.pop().start
        runs.append(Span(start, end))
    first = units[0].end if units else 0
    for behind in (first, *(unit.end for unit in units)):
        yield [Span(max(start, behind), end) for start, end in runs if end > behind]


def _queries(row: ScoredRow, order: Sequence[int], mask: Mask) -> list[Query]:
    if row.answer is None:
        return []
    prompt = len(row.prompt)
    fed, beyond = np.split(row.tokens, [prompt + row.answer.end - 1])
    queries = []
    for i, runs in enumerate(_runs([row.spans[k] for k in order], row.answer)):
        tokens = branch(row, order[i - 1] if i else None, mask).tokens[: len(fed)]
        for start, end in runs:
            queries.append(Query(tokens, prompt + start - 1, row.completion[start:end], beyond=beyond))
    return queries


def _effects(units: Sequence[Span], answer: Span, values: Sequence[Tensor]) -> tuple[float, np.ndarray, np.ndarray]:
    """Compute the answer's log-prob, direct effects (K,) and links (K, K), float64, from the values of `_queries`."""
    edges, remaining = np.array([*units, answer]).ravel(), iter(values)
    sums = []  # of each branch, (K + 1,) log-probs of the units and of the answer; 0 where no query scores any
    for runs in _runs(units, answer):
        logprobs = np.zeros(answer.end + 1)
        for start, end in runs:
            logprobs[start:end] = next(remaining).numpy()
        sums.append(np.add.reduceat(logprobs, edges)[::2])
    sampled, masked = sums[0], np.array(sums[1:]).reshape(-1, len(sums[0]))
    with np.errstate(invalid="ignore"):
        losses = sampled - masked
    # A token that was impossible as sampled has lost nothing: fmax takes 0 over the nan of -inf - -inf.
    # Mean over tokens: summed over a long unit, every link would saturate at 1.
    sizes = np.array([unit.end - unit.start for unit in units], dtype=np.int64)
    return float(sampled[-1]), losses[:, -1], np.triu(np.fmax(losses[:, :-1] / sizes, 0.0), 1)
