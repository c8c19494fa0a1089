"""Score an answer after each step of the reasoning.

A probe is tokens appended after a beginning of a completion, and scored there. `prefix_values` scores it after every
step, which shows what a step adds to the text before it; masking shows what is lost while all other text stays.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ..hf.limits import rope_lengths
from ..hf.model import context_length, vocab_size
from ..packing.prefix_tree import Query
from ..scoring.access import LOGPROBS, MODEL, ModelAccess
from ..scoring.batch import Row, ScoredBatch, check_columns
from ..scoring.masked import ScoringWork
from ..span import Span
from .base import ANSWER, Importances
from .probes import Probe, check_probe, own_probe

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
        assert batch.reasoning_ends is not None
        probes = [
            own_probe(completion, answer, end) if answer is not None and units else None
            for completion, answer, end, units in zip(
                batch.completions, batch.answers, batch.reasoning_ends, batch.units, strict=True
            )
        ]
        return prefix_gain(access, batch, probes)


def prefix_values(
    access: ModelAccess,
    batch: ScoredBatch,
    boundaries: Sequence[Sequence[int]],
    probes: Sequence[Probe | None],
    *,
    measure: str = "probability",
) -> tuple[list[Tensor], ScoringWork]:
    """Score a probe after beginnings of each completion: pi(target | prompt, completion[:t], probe up to the target).

    All are queries of one packed tree: the cost is the completion up to its last boundary, and one probe per boundary.
    A log-prob service gets a sequence of its own for each boundary.

    Args:
        access: access to the model.
        batch: completions.
        boundaries: for each completion, numbers of its tokens before the probe; any order, repeats allowed.
        probes: for each completion its probe; None only where there are no boundaries.
        measure: `probability`, exp of the mean log-prob of the target's tokens, or `mean_logprob`, nats.

    Returns:
        B tensors (N_b,) fp32 on the host, one value per boundary; and counts of work.

    Raises:
        ValueError: bad input; the message names argument, row and value.
        TypeError, NotImplementedError, FloatingPointError: as `score_counterfactuals`.

    Source: IGPO (arXiv 2510.14967) and PACR (arXiv 2510.22255), whose pi is the exponential of the mean log-prob.
    """
    if measure not in MEASURES:
        raise ValueError(f"measure must be one of {', '.join(MEASURES)}, got {measure!r}")
    check_columns(batch.rows, boundaries=boundaries, probes=probes)
    limits: tuple[int | None, int | None] = (None, None)
    if MODEL in access.capabilities:
        limits = vocab_size(access.model), context_length(access.model)
    for b, row, row_boundaries, probe in zip(batch.numbers, batch.rows, boundaries, probes, strict=True):
        if probe is None and row_boundaries:
            raise ValueError(f"probes row {b}: is None, but the row has {len(row_boundaries)} boundaries to score at")
        if probe is not None:
            check_probe(b, probe, limits[0])
            _check_boundaries(b, row_boundaries, row, probe, limits[1])
    ask = _by_queries if MODEL in access.capabilities else _by_scores
    means, work = ask(access, batch, boundaries, probes)
    return [row.exp() if measure == "probability" else row for row in means], work


def _by_queries(
    access: ModelAccess, batch: ScoredBatch, boundaries: Sequence[Sequence[int]], probes: Sequence[Probe | None]
) -> tuple[list[Tensor], ScoringWork]:
    """Compute the mean log-probs of the targets at each boundary, from packed trees."""
    queries = [
        [] if probe is None else [_query(row.prompt, row.completion, int(t), probe) for t in row_boundaries]
        for row, row_boundaries, probe in zip(batch.rows, boundaries, probes, strict=True)
    ]
    switches = rope_lengths(access.model)[0]
    groups, places, owners = list[list[Query]](), list[list[int]](), list[int]()
    for b, row_queries in enumerate(queries):
        # Longest first: then every other prefix leaves the same path. Frequencies that follow a length keep queries on
        # different sides of it in rows of their own.
        order = sorted(range(len(row_queries)), key=lambda i, of_row=row_queries: -of_row[i].length)  # type: ignore[misc]
        sides = [sum(query.length > switch for switch in switches) for query in row_queries]
        for side in dict.fromkeys(sides[i] for i in order):
            places.append([i for i in order if sides[i] == side])
            groups.append([row_queries[i] for i in places[-1]])
            owners.append(b)
    found, work = access.query(groups, row_numbers=[batch.numbers[b] for b in owners], token_budget=batch.token_budget)
    values = [torch.zeros(len(row)) for row in boundaries]
    for b, group_places, group_values in zip(owners, places, found, strict=True):
        for i, value in zip(group_places, group_values, strict=True):
            values[b][i] = value.mean()
    return values, work


def _by_scores(
    access: ModelAccess, batch: ScoredBatch, boundaries: Sequence[Sequence[int]], probes: Sequence[Probe | None]
) -> tuple[list[Tensor], ScoringWork]:
    """Compute the same by scoring completions that are cut at each boundary and continued by the probe."""
    rows, numbers = list[Row](), list[int]()
    for b, row, row_boundaries, probe in zip(batch.numbers, batch.rows, boundaries, probes, strict=True):
        for t in row_boundaries:
            assert probe is not None
            cut = np.concatenate([row.completion[:t], probe.tokens.cpu().numpy()])
            rows.append(Row(row.prompt, cut, [], Span(t + probe.target.start, t + probe.target.end)))
            numbers.append(b)
    if not rows:
        return [torch.zeros(0) for _ in boundaries], ScoringWork()
    scores = access.score(ScoredBatch(rows, numbers, token_budget=batch.token_budget))
    sizes = torch.tensor([row.answer.end - row.answer.start for row in rows if row.answer])
    return list((scores.base.float().cpu() / sizes).split([len(row) for row in boundaries])), scores.work


def prefix_gain(
    access: ModelAccess, batch: ScoredBatch, probes: Sequence[Probe | None], *, measure: str = "probability"
) -> Importances:
    """Judge each unit by what it adds to the answer's value: the value after it less the value after the unit before.

    Text between two units counts towards the later one. The first unit's gain is from its own start, so text before it
    counts towards none; the gains of a row sum to the value after its last unit less that at the start of its first.

    Args:
        access: access to the model.
        batch: completions with disjoint units in order of position.
        probes: as in `prefix_values`; a probe may be None only where there are no units.
        measure: as in `prefix_values`.

    Returns:
        Importances, positive where the unit raised the answer's value.

    Raises:
        ValueError: as `prefix_values`; units that overlap or are out of order.

    Source: IGPO (arXiv 2510.14967), PACR (arXiv 2510.22255).
    """
    for b, row in zip(batch.numbers, batch.units, strict=True):
        end = 0
        for k, unit in enumerate(row):
            if not end <= unit.start < unit.end:
                raise ValueError(f"units row {b}, unit {k}: {tuple(unit)} is empty or starts before {end}")
            end = unit.end
    boundaries = [[row[0].start, *(unit.end for unit in row)] if row else [] for row in batch.units]
    values, work = prefix_values(access, batch, boundaries, probes, measure=measure)
    change_of: Literal["probability", "mean_logprob"] = "probability" if measure == "probability" else "mean_logprob"
    return Importances([row.diff() for row in values], work=work, change_of=change_of)


def _check_boundaries(b: int, boundaries: Iterable[int], row: Row, probe: Probe, longest: int | None) -> None:
    prompt, completion = len(row.prompt), len(row.completion)
    for boundary in boundaries:
        if not 0 <= boundary <= completion:
            raise ValueError(f"boundaries row {b}: {boundary} is outside [0, {completion}], the completion's tokens")
        if longest is not None and (length := prompt + boundary + len(probe.tokens)) > longest:
            raise ValueError(
                f"probes row {b}: prompt, {boundary} tokens of the completion and the probe are {length} tokens, more "
                f"than the model's context of {longest}"
            )


def _query(prompt: np.ndarray, completion: np.ndarray, boundary: int, probe: Probe) -> Query:
    tokens = np.concatenate([prompt, completion[:boundary], probe.tokens.cpu().numpy()])
    start, end = (len(prompt) + boundary + edge for edge in probe.target)
    return Query(tokens[: end - 1], start - 1, tokens[start:end], beyond=tokens[end - 1 :])
