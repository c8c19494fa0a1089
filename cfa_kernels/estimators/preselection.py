"""Approximations of exact masking, each with a label that says what it leaves out, and how near each comes.

Fewer units (`preselected_masking`, `run_units`), a smaller model (`proxy_scores`), numbers kept from an earlier step
(`ImportanceCache`); `partial_branches.py` holds those that feed fewer rows of a branch. `compare_to_exact` reports
agreement beside cost.
"""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..fidelity import Interval, bootstrap_interval, spearman
from ..scoring.batch import check_columns
from ..scoring.masked import CounterfactualScores, ScoringWork, score_counterfactuals
from ..span import Span

CHEAP_ESTIMATES = ("length", "first", "last")
# `share * count` that misses a whole number by rounding alone is that number.
_ROUNDING = 1e-9


def top_units(importance: Tensor, share: float) -> list[int]:
    """Numbers of the `max(1, floor(share * K))` most important units, ascending; of equal ones the earlier.

    Args:
        importance: (K,) finite, high = matters. K may be 0, which gives no unit.
        share: in (0, 1].

    Raises:
        ValueError: a share outside (0, 1]; importances of another shape or not finite, naming unit and value.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}")
    if importance.ndim != 1:
        raise ValueError(f"importance must be (K,), got shape {tuple(importance.shape)}")
    values = importance.tolist()
    for k, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"importance, unit {k}: must be finite, got {value}")
    count = max(1, math.floor(share * len(values) + _ROUNDING))
    return sorted(sorted(range(len(values)), key=lambda k: -values[k])[:count])


def cheap_estimates(name: str, units: Sequence[Sequence[Span]]) -> list[Tensor]:
    """Estimates that cost nothing: `length` (long units first), `first` or `last` (by position).

    Args:
        name: one of the three.
        units: B lists of K_b spans.

    Returns:
        B tensors (K_b,) fp32, high = matters.

    Raises:
        ValueError: another name.
    """
    rules: dict[str, Callable[[Span], int]] = {
        "length": lambda unit: unit.end - unit.start,
        "first": lambda unit: -unit.start,
        "last": lambda unit: unit.start,
    }
    if name not in rules:
        raise ValueError(f"name must be one of {', '.join(CHEAP_ESTIMATES)}, got {name!r}")
    return [torch.tensor([float(rules[name](unit)) for unit in row]) for row in units]


@dataclass(frozen=True)
class Preselected:
    """Exact importances of some units, and for the others what was given, by default 0, which claims nothing.

    Attributes:
        importance: B tensors (K_b,) fp32 on the host, `-drop` where exact.
        exact: B bool tensors (K_b,), the units that were masked.
        base: (B,) fp32 on the host, as in `CounterfactualScores`.
        work: what was fed, that of the cheap estimator included if it was given.
    """

    importance: list[Tensor]
    exact: list[Tensor]
    base: Tensor
    work: ScoringWork


def preselected_masking(
    model: nn.Module,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    units: Sequence[Sequence[Span]],
    answers: Sequence[Span | None],
    cheap: Sequence[Tensor],
    *,
    share: float,
    others: Sequence[Tensor] | None = None,
    cheap_work: ScoringWork | None = None,
    score: Callable[..., CounterfactualScores] = score_counterfactuals,
    **options: Any,
) -> Preselected:
    """Approximation: mask only each completion's top share of units by a cheap estimate, those exactly.

    For CF's spans as for OAR-P's tokens. What a unit left out would have shown is lost; nothing else is.

    Args:
        model, prompts, completions, units, answers: as in `score_counterfactuals`.
        cheap: for each completion an estimate per unit, high = mask it: `cheap_estimates`, the absolute `prefix_gain`
            or gradient, entropies.
        share: of each completion's units, in (0, 1]; at least one is masked.
        others: for each completion a number per unit, taken where it is not masked, in the units of `-drop`, say of
            `answer_knockout`; None for 0.
        cheap_work: what the estimate cost, to be added.
        score: masks and scores, with the arguments of `score_counterfactuals`.
        **options: further ones of `score`: `placeholder_id`, `outcome`, `token_budget` ...

    Returns:
        `Preselected`.

    Raises:
        ValueError: an estimate of another length than the units or not finite, naming row, unit and value; a share
            outside (0, 1].
        Also whatever `score` raises, whose span numbers count the chosen units alone.
    """
    rest = [torch.zeros(len(row)) for row in units] if others is None else others
    check_columns(prompts, units=units, cheap=cheap, others=rest)
    chosen = []
    for b, (row, estimate, other) in enumerate(zip(units, cheap, rest, strict=True)):
        for name, given in (("cheap", estimate), ("others", other)):
            if given.shape != (len(row),):
                raise ValueError(f"{name} row {b}: must be ({len(row)},), one per unit, got shape {tuple(given.shape)}")
        try:
            chosen.append(top_units(estimate, share))
        except ValueError as error:
            raise ValueError(f"cheap row {b}: {error}") from error
    some = [[row[k] for k in numbers] for row, numbers in zip(units, chosen, strict=True)]
    scores = score(model, prompts, completions, some, answers, **options)
    importance, exact = [], []
    for other, numbers, drop in zip(rest, chosen, scores.drop, strict=True):
        masked = torch.zeros(len(other), dtype=torch.bool)
        masked[numbers] = True
        exact.append(masked)
        importance.append(other.detach().float().cpu().masked_scatter(masked, -drop.float().cpu()))
    work = scores.work if cheap_work is None else scores.work + cheap_work
    return Preselected(importance, exact, scores.base.cpu(), work)


def run_units(end: int, length: int, *, start: int = 0) -> list[Span]:
    """Approximation: tokens `[start, end)` in runs of `length`, the last one perhaps shorter, to be masked as one.

    OAR-P then takes one branch per run instead of one per token, and tells the tokens of a run not apart.

    Args:
        end: where the reasoning ends, usually at the answer's marker.
        length: tokens of a unit, at least 1; 1 is exact.
        start: where it starts.

    Raises:
        ValueError: a length below 1, a start outside [0, end].
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    if not 0 <= start <= end:
        raise ValueError(f"start must be in [0, {end}], got {start}")
    return [Span(first, min(first + length, end)) for first in range(start, end, length)]


def proxy_scores(
    proxy: nn.Module,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    spans: Sequence[Sequence[Span]],
    answers: Sequence[Span | None],
    *,
    tokenizer: PreTrainedTokenizerBase,
    proxy_tokenizer: PreTrainedTokenizerBase,
    **options: Any,
) -> CounterfactualScores:
    """Approximation: `score_counterfactuals` by another, usually smaller, model that reads the same token ids.

    It shows what the answer depends on to the proxy, not to the policy.

    Args:
        proxy: the model that scores.
        prompts, completions, spans, answers, **options: as in `score_counterfactuals`.
        tokenizer: the one that sampled the ids.
        proxy_tokenizer: the proxy's.

    Raises:
        ValueError: the tokenizers give a token different ids, which is named; else as `score_counterfactuals`.
    """
    ours, theirs = tokenizer.get_vocab(), proxy_tokenizer.get_vocab()
    for token in sorted(ours.keys() | theirs.keys()):
        if ours.get(token) != theirs.get(token):
            raise ValueError(
                f"proxy_tokenizer: token {token!r} has id {theirs.get(token)} in it and {ours.get(token)} in tokenizer"
            )
    return score_counterfactuals(proxy, prompts, completions, spans, answers, **options)


class ImportanceCache:
    """Approximation: importances kept by prompt, completion, units, answer and options, for data that come again.

    They are those of the model when they were computed. Only entries of at most `max_age` versions ago are handed out:
    with 0 that is exact, with more it assumes that the ranking outlives so many updates.

    Args:
        max_rows: completions kept at most; the least recently used goes first.
        max_age: versions, at least 0; None for any age, for a model that does not change what matters.

    Raises:
        ValueError: `max_rows` below 1, a negative `max_age`.
    """

    def __init__(self, max_rows: int, *, max_age: int | None = 0) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}")
        if max_age is not None and max_age < 0:
            raise ValueError(f"max_age must not be negative, got {max_age}")
        self.max_rows, self.max_age = max_rows, max_age
        self.hits = self.misses = 0
        self._kept: OrderedDict[Hashable, tuple[int, Tensor]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def importances(
        self,
        prompts: Sequence[Tensor],
        completions: Sequence[Tensor],
        units: Sequence[Sequence[Span]],
        answers: Sequence[Span | None],
        compute: Callable[[list[int]], Sequence[Tensor]],
        *,
        options: Hashable,
        version: int,
    ) -> list[Tensor]:
        """The importances of each completion, computed where none are kept.

        Args:
            prompts, completions, units, answers: as in `score_counterfactuals`.
            compute: from the numbers of the rows that are missing to one tensor (K_b,) for each; not called for none.
            options: whatever else the importances depend on, the estimator's name and options.
            version: a counter of the model's updates.

        Returns:
            B tensors (K_b,) on the host; those kept are copies.

        Raises:
            ValueError: `compute` gave another number of rows, or a row of another length than its units.
        """
        check_columns(prompts, completions=completions, units=units, answers=answers)
        found: list[Tensor | None] = [None] * len(prompts)
        keys = [_key(*row, options) for row in zip(prompts, completions, units, answers, strict=True)]
        for b, key in enumerate(keys):
            kept = self._kept.get(key)
            if kept is not None and (self.max_age is None or 0 <= version - kept[0] <= self.max_age):
                found[b] = kept[1].clone()
                self._kept.move_to_end(key)
        missing = [b for b, row in enumerate(found) if row is None]
        self.hits, self.misses = self.hits + len(found) - len(missing), self.misses + len(missing)
        computed = compute(missing) if missing else []
        if len(computed) != len(missing):
            raise ValueError(f"compute must give the {len(missing)} rows that it is asked for, got {len(computed)}")
        for b, row in zip(missing, computed, strict=True):
            if row.shape != (len(units[b]),):
                raise ValueError(f"compute, row {b}: must be ({len(units[b])},), got shape {tuple(row.shape)}")
            found[b] = on_host = row.detach().cpu()
            self._kept[keys[b]] = (version, on_host.clone())
            self._kept.move_to_end(keys[b])
            if len(self._kept) > self.max_rows:
                self._kept.popitem(last=False)
        return [row for row in found if row is not None]


def _key(prompt: Tensor, completion: Tensor, units: Sequence[Span], answer: Span | None, options: Hashable) -> Hashable:
    digests = [hashlib.blake2b(ids.cpu().numpy().tobytes()).digest() for ids in (prompt, completion)]
    return (*digests, tuple(tuple(unit) for unit in units), None if answer is None else tuple(answer), options)


@dataclass(frozen=True)
class Agreement:
    """How near an approximation comes to exact masking, and for what.

    Attributes:
        name: its label.
        spearman: mean over completions of the rank correlation with exact importances, with its bootstrap interval; 0
            where all of the approximation's are equal.
        pooled: the rank correlation over the units of all those completions together.
        top: share of those completions whose most important unit is the exact one's, ties for it counted in part.
        completions: in how many both are defined: exact importances of two units or more that are not all equal.
        cost: its tokens fed over those of exact masking, shared ones left out of both.
    """

    name: str
    spearman: Interval
    pooled: float
    top: float
    completions: int
    cost: float


def compare_to_exact(
    name: str,
    approximate: Sequence[Tensor],
    exact: Sequence[Tensor],
    *,
    work: ScoringWork,
    exact_work: ScoringWork,
    shared_tokens: int = 0,
    seed: int = 0,
) -> Agreement:
    """The agreement of an approximation's importances with exact ones.

    Args:
        name: its label.
        approximate, exact: B tensors (K_b,) each, high = matters; rows that are nan throughout have no answer and
            are left out.
        work, exact_work: what each fed.
        shared_tokens: tokens that both feed and the training step needs anyhow, prompts and completions.
        seed: of the bootstrap.

    Returns:
        `Agreement`.

    Raises:
        ValueError: rows of different numbers or lengths; no completion in which a rank correlation is defined.
    """
    if len(approximate) != len(exact):
        raise ValueError(f"approximate has {len(approximate)} rows, exact has {len(exact)}; they must agree")
    rows, both = list[tuple[float, float]](), list[Tensor]()
    for b, (ours, truth) in enumerate(zip(approximate, exact, strict=True)):
        if ours.shape != truth.shape:
            raise ValueError(f"approximate row {b}: has shape {tuple(ours.shape)}, exact has {tuple(truth.shape)}")
        if len(truth) > 1 and not truth.isnan().all() and (truth != truth[0]).any():
            largest = ours == ours.max()
            found = float(largest[truth.argmax()]) / int(largest.sum())
            both.append(torch.stack([ours.double(), truth.double()]))
            rows.append((0.0 if largest.all() else spearman(ours, truth), found))
    if not rows:
        raise ValueError("exact: no completion has two units or more that are not all equal")
    correlation = bootstrap_interval(lambda some: sum(row[0] for row in some) / len(some), rows, seed=seed)
    pooled = torch.cat(both, dim=1)
    together = 0.0 if (pooled[0] == pooled[0, 0]).all() else spearman(*pooled)
    cost = (work.tokens_fed - shared_tokens) / (exact_work.tokens_fed - shared_tokens)
    return Agreement(name, correlation, together, sum(row[1] for row in rows) / len(rows), len(rows), cost)
