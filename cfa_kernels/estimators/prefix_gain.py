"""Score an answer after each step of the reasoning.

A completion is cut after each step and continued by its own marker and answer, which shows what a step adds to the text
before it; masking shows what is lost while all other text stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ..hf.limits import rope_lengths
from ..packing.prefix_tree import Query
from ..scoring.access import LOGPROBS, MODEL, ModelAccess
from ..scoring.batch import ScoredBatch, ScoredRow
from ..scoring.masked import ScoringWork
from ..scoring.plan import queries_of
from ..span import Span
from .base import ANSWER, Importances, given

MEASURES = ("probability", "mean_logprob")


@dataclass(frozen=True)
class PrefixGain:
    """Gain in the probability of the answer, asked right after each unit (IGPO 2510.14967, PACR 2510.22255).

    The probe is the completion's own marker and answer, from the end of the reasoning on.
    """

    name: ClassVar[str] = "prefix_gain"
    judges: ClassVar[str] = "spans"
    negative: ClassVar[bool] = True
    weights: ClassVar[str | None] = "range"
    needs: ClassVar[frozenset[str]] = frozenset({ANSWER, LOGPROBS})
    continues: ClassVar[bool] = True

    def __call__(self, access: ModelAccess, batch: ScoredBatch) -> Importances:
        """Judge the units of a batch; `reasoning_ends` must be known."""
        return prefix_gain(access, batch)


def prefix_gain(access: ModelAccess, batch: ScoredBatch, *, measure: str = "probability") -> Importances:
    """Judge each unit by what it adds to the answer's value: the value after it less the value after the unit before.

    The value of a beginning of the completion is pi(answer | prompt, completion[:t], marker), where the marker is the
    completion's own tokens from the end of the reasoning to the answer. Text between two units counts towards the later
    one. The first unit's gain is from its own start, so text before it counts towards none; the gains of a row sum to
    the value after its last unit less that at the start of its first.

    All are queries of one packed tree: the cost is the completion up to its last unit, and marker and answer once for
    each value. A log-prob service gets a sequence of its own for each.

    Args:
        access: access to the model.
        batch: completions with disjoint units in order of position, and `reasoning_ends`. Those with units need an
            answer.
        measure: `probability`, exp of the mean log-prob of the answer's tokens, or `mean_logprob`, nats.

    Returns:
        Importances, positive where the unit raised the answer's value.

    Raises:
        ValueError: bad input, units that overlap or are out of order; the message names argument, row and value.
        TypeError, NotImplementedError, FloatingPointError: as `score_counterfactuals`.

    Source: IGPO (arXiv 2510.14967), PACR (arXiv 2510.22255), whose pi is the exponential of the mean log-prob.
    """
    if measure not in MEASURES:
        raise ValueError(f"measure must be one of {', '.join(MEASURES)}, got {measure!r}")
    ends = given("reasoning_ends", batch.reasoning_ends)
    cuts = [_cuts(row, end) for row, end in zip(batch.rows, ends, strict=True)]
    means, work = (_by_queries if MODEL in access.capabilities else _by_scores)(access, batch, cuts)
    change_of: Literal["probability", "mean_logprob"] = "probability" if measure == "probability" else "mean_logprob"
    values = [row.exp() if measure == "probability" else row for row in means]
    return Importances([row.diff() for row in values], work=work, change_of=change_of)


def _cuts(row: ScoredRow, reasoning_end: int) -> list[ScoredRow]:
    """Cut a completion before its first unit and after each, and continue it by its own marker and answer."""
    end = 0
    for k, unit in enumerate(row.spans):
        if not end <= unit.start < unit.end:
            raise ValueError(f"units row {row.index}, unit {k}: {tuple(unit)} is empty or starts before {end}")
        end = unit.end
    if not row.spans:
        return []
    if row.answer is None:
        raise ValueError(
            f"answers row {row.index}: is None, but the row has {len(row.spans)} units that are judged by it"
        )
    if not 0 <= reasoning_end <= row.answer.start:
        raise ValueError(f"reasoning_ends row {row.index}: {reasoning_end} is outside [0, {row.answer.start}]")
    marker_and_answer = row.completion[reasoning_end : row.answer.end]
    cuts = []
    for t in (row.spans[0].start, *(unit.end for unit in row.spans)):
        answer = Span(*(t + edge - reasoning_end for edge in row.answer))
        completion = np.concatenate([row.completion[:t], marker_and_answer])
        cuts.append(replace(row, completion=completion, spans=[], answer=answer))
    return cuts


def _by_queries(
    access: ModelAccess, batch: ScoredBatch, cuts: Sequence[Sequence[ScoredRow]]
) -> tuple[list[Tensor], ScoringWork]:
    """Compute the mean log-probs of the answers of every row's cuts, from packed trees."""
    switches = rope_lengths(access.model)[0]
    groups, owners = list[list[Query]](), list[int]()
    for b, row in enumerate(cuts):
        # Longest first: then every other prefix leaves the same path. Frequencies that follow a length keep queries on
        # different sides of it in rows of their own.
        queries = [queries_of(cut)[0] for cut in reversed(row)]
        for _, group in groupby(queries, lambda query: sum(query.length > switch for switch in switches)):
            groups.append(list(group))
            owners.append(b)
    found, work = access.query(groups, index=[batch.index[b] for b in owners], token_budget=batch.token_budget)
    means: list[list[Tensor]] = [[] for _ in cuts]
    for b, values in zip(owners, found, strict=True):
        means[b] += [value.mean() for value in values]
    return [torch.stack(row[::-1]) if row else torch.zeros(0) for row in means], work


def _by_scores(
    access: ModelAccess, batch: ScoredBatch, cuts: Sequence[Sequence[ScoredRow]]
) -> tuple[list[Tensor], ScoringWork]:
    """Compute the same by scoring the cuts as completions of their own."""
    rows = [cut for row in cuts for cut in row]
    if not rows:
        return [torch.zeros(0) for _ in cuts], ScoringWork()
    scores = access.score(ScoredBatch(rows, token_budget=batch.token_budget))
    sizes = torch.tensor([row.answer.end - row.answer.start for row in rows if row.answer])
    return list((scores.base.float().cpu() / sizes).split([len(row) for row in cuts])), scores.work
