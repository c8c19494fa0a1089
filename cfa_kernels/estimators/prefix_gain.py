"""Score an answer after each step of the reasoning.

A completion is cut after each step and continued by its own marker and answer, which shows what a step adds to the text
before it; masking shows what is lost while all other text stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..batch import Batch, ScoredRow
from ..rows import Rows, fed_together
from ..scoring.access import LOGPROBS, MODEL, ModelAccess
from ..scoring.masked import ScoringWork
from ..scoring.plan import queries_of
from ..span import Span
from .base import ANSWER, Estimator, Importances, required


@dataclass(frozen=True)
class PrefixGain(Estimator):
    """Gain in the probability of the answer, asked right after each unit (IGPO 2510.14967, PACR 2510.22255).

    The value of a beginning of the completion is the exponential of the mean log-prob of the answer's tokens after
    `completion[:t]` and the marker: the completion's own tokens from the end of the reasoning to the answer. A unit's
    gain is the value after it less that after the unit before; the first unit's is from its own start. Text between two
    units counts towards the later one; a turn's observation counts towards the turn, whose value is asked after it.

    All are queries of one packed tree: the cost is the completion up to its last unit, and marker and answer once for
    each value. A log-prob service gets a sequence of its own for each.
    """

    name = "prefix_gain"
    negative = True
    needs = frozenset({ANSWER, LOGPROBS})
    continues = True
    observes = True

    def __call__(self, access: ModelAccess, batch: Batch) -> Importances:
        """Score disjoint units in order of position; raises `ValueError` naming row and unit of others."""
        ends = required("reasoning_ends", batch.reasoning_ends)
        cuts = [_cuts(row, end) for row, end in zip(batch.scored_rows, ends, strict=True)]
        means, work = (_by_queries if MODEL in access.capabilities else _by_scores)(access, batch, cuts)
        return Importances([row.exp().diff() for row in means], work=work, change_of="probability")


def _cuts(row: ScoredRow, reasoning_end: int) -> list[ScoredRow]:
    """Cut a completion before its first unit and after each, and continue it by its own marker and answer."""
    end = 0
    for k, unit in enumerate(row.spans):
        if not end <= unit.start < unit.end:
            raise ValueError(f"units row {row.index}, unit {k}: {tuple(unit)} is empty or starts before {end}")
        end = unit.end
    if not row.spans:
        return []
    if row.answer is None or not 0 <= reasoning_end <= row.answer.start:
        raise ValueError(
            f"row {row.index}: its reasoning must end before its answer, got {reasoning_end}, {row.answer}"
        )
    marker_and_answer = row.completion[reasoning_end : row.answer.end]
    cuts = []
    for t in (row.spans[0].start, *(unit.end for unit in row.spans)):
        answer = Span(*(t + edge - reasoning_end for edge in row.answer))
        completion = np.concatenate([row.completion[:t], marker_and_answer])
        cuts.append(replace(row, completion=completion, spans=[], answer=answer))
    return cuts


def _by_queries(
    access: ModelAccess, batch: Batch, cuts: Sequence[Sequence[ScoredRow]]
) -> tuple[list[Tensor], ScoringWork]:
    """Compute the mean log-probs of the answers of every row's cuts, from packed trees."""
    # Longest first: then every other prefix leaves the same path.
    bundles = [[queries_of(cut)[0] for cut in reversed(row)] for row in cuts]
    values, work = access.query(
        bundles, index=batch.index, groups=fed_together(batch.rows), token_budget=batch.token_budget
    )
    means = [[logprobs.mean() for logprobs in row[::-1]] for row in values]
    return [torch.stack(row) if row else torch.zeros(0) for row in means], work


def _by_scores(
    access: ModelAccess, batch: Batch, cuts: Sequence[Sequence[ScoredRow]]
) -> tuple[list[Tensor], ScoringWork]:
    """Compute the same by scoring the cuts as completions of their own."""
    rows = [cut for row in cuts for cut in row]
    if not rows:
        return [torch.zeros(0) for _ in cuts], ScoringWork()
    prompts, completions = ([torch.from_numpy(getattr(row, name)) for row in rows] for name in ("prompt", "completion"))
    scored = Rows(prompts, completions, [row.index for row in rows])
    scores = access.score(Batch(scored, answers=[row.answer for row in rows], token_budget=batch.token_budget))
    sizes = torch.tensor([row.answer.end - row.answer.start for row in rows if row.answer])
    return list((scores.base.float().cpu() / sizes).split([len(row) for row in cuts])), scores.work
