"""Probes, and what an answer is worth after each step of the reasoning.

A probe is tokens appended after a completion, or after a beginning of it, and scored there. `with_probes` gives an
answer to completions that have none; `prefix_values` asks the same after every step, which shows the total effect of a
step, where masking shows the direct one alone.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from .hf import causal_lm, context_length, rope_lengths, vocab_size
from .scoring import CounterfactualScores, ScoringWork, query_logprobs
from .spans import Span
from .token_rows import check_columns, checked_ids, equal_prompts_together
from .tree import Query

MEASURES = ("probability", "mean_logprob")


class Probe(NamedTuple):
    """Tokens to append, and which of them are scored."""

    tokens: Tensor  # (L,) int64
    target: Span  # of `tokens`


def text_probe(tokenizer: PreTrainedTokenizerBase, lead_in: str, target: str) -> Probe:
    """A probe from text: `lead_in`, fed and not scored, then `target`.

    The two are tokenised apart, so that the target's tokens do not depend on what leads to it. "\\n#### " and "18" ask
    unmarked maths for its answer, "\\n\\nassert f(2, 3) == " and "5" ask code for a value.

    Args:
        tokenizer: that of the model.
        lead_in: may be empty.
        target: what is scored.

    Returns:
        The probe, ids on the host.

    Raises:
        ValueError: a target that gives no token.
    """
    lead, scored = (tokenizer.encode(text, add_special_tokens=False) if text else [] for text in (lead_in, target))
    if not scored:
        raise ValueError(f"target must give at least one token, got {target!r}")
    return Probe(torch.tensor([*lead, *scored]), Span(len(lead), len(lead) + len(scored)))


def own_probe(completion: Tensor, answer: Span, reasoning_end: int) -> Probe:
    """A completion's own marker and answer: its tokens from `reasoning_end` to the answer's end, the answer scored.

    Args:
        completion: (T,) int64.
        answer: its answer.
        reasoning_end: first token of the answer's marker, at most `answer.start`.

    Raises:
        ValueError: a reasoning end behind the answer's start, an answer outside the completion.
    """
    if not 0 <= reasoning_end <= answer.start < answer.end <= len(completion):
        raise ValueError(
            f"reasoning_end and answer must lie in order inside the {len(completion)} tokens, got {reasoning_end} and "
            f"{tuple(answer)}"
        )
    target = Span(answer.start - reasoning_end, answer.end - reasoning_end)
    return Probe(completion[reasoning_end : answer.end], target)


def length_without_eos(completion: Tensor | Sequence[int], eos_ids: Collection[int]) -> int:
    """Tokens of a completion (T,) before the end-of-text tokens that it ends with, if any."""
    length, ending = len(completion), set(eos_ids)
    while length and int(completion[length - 1]) in ending:
        length -= 1
    return length


def with_probes(
    completions: Sequence[Tensor],
    answers: Sequence[Span | None],
    probes: Sequence[Probe | None],
    eos_ids: Collection[int],
    *,
    spans: Sequence[Sequence[Span]] | None = None,
) -> tuple[list[Tensor], list[Span | None]]:
    """Completions with their probes behind them, and the answers that are then scored.

    For `score_counterfactuals` as they are. A row with a probe loses the end-of-text tokens that it ends with and is
    scored on the probe's target, whatever its own answer; a row without one stays as it is. Token positions of the
    completions do not move, so spans stay valid and weights, made for the completion's own length, never cover a probe.

    Args:
        completions: B 1-D int64 tensors, unpadded.
        answers: for each completion its answer, or None.
        probes: for each completion its probe, or None.
        eos_ids: the ids that end a text.
        spans: if given, B lists of spans that will be masked; those of a row with a probe must end before it.

    Returns:
        B extended completions, and B answers, None where there is neither answer nor probe.

    Raises:
        ValueError: lists of different lengths; a probe that is no 1-D int64 tensor, is empty or has its target
            outside; a span that reaches the probe. The message names row and value.
    """
    for name, column in (("answers", answers), ("probes", probes), ("spans", spans)):
        if column is not None and len(column) != len(completions):
            raise ValueError(f"{name} has {len(column)} rows, completions has {len(completions)}; they must agree")
    extended, scored = list[Tensor](), list[Span | None]()
    for b, (completion, answer, probe) in enumerate(zip(completions, answers, probes, strict=True)):
        if probe is None:
            extended.append(completion)
            scored.append(answer)
            continue
        _check_probe(b, probe)
        kept = length_without_eos(completion, eos_ids)
        for k, span in enumerate(spans[b] if spans is not None else ()):
            if span.end > kept:
                raise ValueError(f"spans row {b}, span {k}: {tuple(span)} reaches the probe, which starts at {kept}")
        extended.append(torch.cat([completion[:kept], probe.tokens.to(completion.device)]))
        scored.append(Span(kept + probe.target.start, kept + probe.target.end))
    return extended, scored


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


def _check_probe(b: int, probe: Probe, vocab: int | None = None) -> None:
    ids, target = probe.tokens, probe.target
    if not isinstance(ids, Tensor) or ids.ndim != 1 or ids.dtype != torch.int64:
        got = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"probes row {b}: tokens must be a 1-D int64 tensor of token ids, got {got}")
    if not 0 <= target[0] < target[1] <= len(ids):
        raise ValueError(f"probes row {b}: target {tuple(target)} is not a non-empty span of {len(ids)} tokens")
    if vocab is not None and ((ids < 0) | (ids >= vocab)).any():
        bad = ids[(ids < 0) | (ids >= vocab)][0]
        raise ValueError(f"probes row {b}: id {int(bad)} is outside the vocabulary [0, {vocab})")


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
