"""Probes, and what an answer is worth after each step of the reasoning.

A probe is tokens appended after a completion, or after a beginning of it, and scored there. `with_probes` gives an
answer to completions that have none; `prefix_values` asks the same after every step, which shows the total effect of a
step, where masking shows the direct one alone.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..hf.limits import rope_lengths
from ..hf.model import causal_lm, context_length, vocab_size
from ..packing.prefix_tree import Query
from ..scoring.batch import check_columns, checked_ids, equal_prompts_together
from ..scoring.masked import CounterfactualScores, ScoringWork, query_logprobs
from ..span import Span
from .probes import Probe, _check_probe

MEASURES = ("probability", "mean_logprob")


@dataclass(frozen=True)
class PrefixValues:
    """What a probe's target is worth after beginnings of B completions.

    Attributes:
        values: B tensors (N_b,) fp32 on the host, one per boundary.
        work: counts of what was computed.
    """

    values: list[Tensor]
    work: ScoringWork


def prefix_values(
    model: nn.Module,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    boundaries: Sequence[Sequence[int]],
    probes: Sequence[Probe | None],
    *,
    measure: str = "probability",
    token_budget: int | None = None,
    score: Callable[..., CounterfactualScores] | None = None,
    ask: Callable[..., tuple[list[list[Tensor]], ScoringWork]] = query_logprobs,
) -> PrefixValues:
    """Score a probe after beginnings of each completion: pi(target | prompt, completion[:t], probe up to the target).

    All are queries of one packed tree: it costs the completion up to its last boundary, and one probe per boundary.

    Args:
        model: as in `score_counterfactuals`.
        prompts, completions: B 1-D int64 tensors, unpadded.
        boundaries: for each completion, how many of its tokens stand before the probe; any order, repeats allowed.
        probes: for each completion its probe; None only where there are no boundaries.
        measure: `probability`, exp of the mean log-prob of the target's tokens, or `mean_logprob`, nats.
        token_budget: as in `score_counterfactuals`.
        score: stands in for `score_counterfactuals` where the model lies in other processes; then nothing is checked
            against the model, and each boundary is a sequence of its own.
        ask: stands in for `query_logprobs`: that of a `PackedForward`, which has fed the completions already.

    Returns:
        `PrefixValues`.

    Raises:
        ValueError: bad input; the message names argument, row and value.
        TypeError, NotImplementedError, FloatingPointError: as `score_counterfactuals`.

    Source: IGPO (arXiv 2510.14967) and PACR (arXiv 2510.22255), whose pi is the exponential of the mean log-prob.
    """
    if measure not in MEASURES:
        raise ValueError(f"measure must be one of {', '.join(MEASURES)}, got {measure!r}")
    check_columns(prompts, completions=completions, boundaries=boundaries, probes=probes)
    if score is not None:
        return _by_scores(score, model, prompts, completions, boundaries, probes, measure, token_budget)
    causal = causal_lm(model)
    vocab, longest = vocab_size(causal), context_length(causal)
    rows = checked_ids(prompts, completions, vocab, longest)
    queries: list[list[Query]] = []
    for b, (row, row_boundaries, probe) in enumerate(zip(rows, boundaries, probes, strict=True)):
        if probe is None and row_boundaries:
            raise ValueError(f"probes row {b}: is None, but the row has {len(row_boundaries)} boundaries to score at")
        if probe is not None:
            _check_probe(b, probe, vocab)
            _check_boundaries(b, row_boundaries, row, probe, longest)
        queries.append([] if probe is None else [_query(*row, int(t), probe) for t in row_boundaries])
    switches = rope_lengths(causal)[0]
    units, places, numbers = list[list[Query]](), list[list[int]](), list[int]()
    for b in equal_prompts_together([prompt for prompt, _ in rows]):
        # Longest first: then every other prefix leaves the same path. Frequencies that follow a length keep queries on
        # different sides of it in rows of their own.
        order = sorted(range(len(queries[b])), key=lambda i: -queries[b][i].length)
        sides = [sum(query.length > switch for switch in switches) for query in queries[b]]
        for side in dict.fromkeys(sides[i] for i in order):
            places.append([i for i in order if sides[i] == side])
            units.append([queries[b][i] for i in places[-1]])
            numbers.append(b)
    found, work = ask(model, units, row_numbers=numbers, token_budget=token_budget)
    values = [torch.zeros(len(row)) for row in boundaries]
    for b, unit_places, unit_values in zip(numbers, places, found, strict=True):
        for i, value in zip(unit_places, unit_values, strict=True):
            values[b][i] = value.mean()
    return PrefixValues(_measured(values, measure), work)


def _measured(means: Sequence[Tensor], measure: str) -> list[Tensor]:
    return [row.exp() if measure == "probability" else row for row in means]


def _by_scores(
    score: Callable[..., CounterfactualScores],
    model: nn.Module,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    boundaries: Sequence[Sequence[int]],
    probes: Sequence[Probe | None],
    measure: str,
    token_budget: int | None,
) -> PrefixValues:
    """The answer's own score of a completion that was cut at each boundary and continued by the probe."""
    rows, sequences, answers = list[int](), list[Tensor](), list[Span]()
    for b, (completion, row_boundaries, probe) in enumerate(zip(completions, boundaries, probes, strict=True)):
        if probe is None:
            continue
        _check_probe(b, probe)
        for t in row_boundaries:
            rows.append(b)
            sequences.append(torch.cat([completion[:t], probe.tokens.to(completion.device)]))
            answers.append(Span(t + probe.target.start, t + probe.target.end))
    if not rows:
        return PrefixValues([torch.zeros(0) for _ in boundaries], ScoringWork())
    scores = score(
        model, [prompts[b] for b in rows], sequences, [[] for _ in rows], answers, placeholder_id=0,
        token_budget=token_budget,
    )  # fmt: skip
    sizes = torch.tensor([answer.end - answer.start for answer in answers])
    means = (scores.base.float().cpu() / sizes).split([len(row) for row in boundaries])
    return PrefixValues(_measured(means, measure), scores.work)


def prefix_gain(
    model: nn.Module,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    units: Sequence[Sequence[Span]],
    probes: Sequence[Probe | None],
    *,
    measure: str = "probability",
    token_budget: int | None = None,
    score: Callable[..., CounterfactualScores] | None = None,
    ask: Callable[..., tuple[list[list[Tensor]], ScoringWork]] = query_logprobs,
) -> tuple[list[Tensor], ScoringWork]:
    """How much each unit adds to the answer's value: the value after it less the value after the unit before.

    Text between two units counts to the later one. The first unit's gain is from its own start, so that text before it
    counts to none; the gains of a row sum to the value after its last unit less that at the start of its first.

    Args:
        model, prompts, completions, probes, measure, token_budget, score, ask: as in `prefix_values`; a probe may be
            None only where there are no units.
        units: for each completion, disjoint spans in order of position.

    Returns:
        B tensors (K_b,) fp32 on the host, positive where the unit raised the answer's value; and what it took.

    Raises:
        ValueError: as `prefix_values`; units that overlap or are out of order.

    Source: IGPO (arXiv 2510.14967), PACR (arXiv 2510.22255).
    """
    check_columns(prompts, units=units)
    for b, row in enumerate(units):
        end = 0
        for k, unit in enumerate(row):
            if not end <= unit.start < unit.end:
                raise ValueError(f"units row {b}, unit {k}: {tuple(unit)} is empty or starts before {end}")
            end = unit.end
    boundaries = [[row[0].start, *(unit.end for unit in row)] if row else [] for row in units]
    found = prefix_values(
        model,
        prompts,
        completions,
        boundaries,
        probes,
        measure=measure,
        token_budget=token_budget,
        score=score,
        ask=ask,
    )
    return [values.diff() for values in found.values], found.work


def _check_boundaries(
    b: int, boundaries: Iterable[int], row: tuple[np.ndarray, np.ndarray], probe: Probe, longest: int | None
) -> None:
    prompt, completion = map(len, row)
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
