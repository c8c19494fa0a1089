"""Measure how well importances agree with a truth over many problems, with intervals over problems.

Units are compared only within a problem: importances of different problems have no common scale.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainer.analyze.statistics import Estimate, bootstrap_interval, spearman

Rows = Sequence[Sequence[float]]
Pairs = tuple[float, int, float, int]
"""Wins over earlier negatives and their number, wins over later ones and their number."""

Measure = Callable[[Any, Any], Any]
"""From the scores and the truth of one problem to what is summed up over problems."""
Summary = Callable[[Any], float]

CHANCE_DRAWS = 200


def ordered_pairs(scores: Sequence[float], truth: Sequence[bool]) -> Pairs:
    """Pairs of a positive and a negative of one problem, apart by which of the two comes first; ties win half."""
    wins, counts = [0.0, 0.0], [0, 0]
    for i, positive in enumerate(truth):
        for j, other in enumerate(truth):
            if positive and not other:
                later = int(j > i)
                wins[later] += (scores[i] > scores[j]) + 0.5 * (scores[i] == scores[j])
                counts[later] += 1
    return wins[0], counts[0], wins[1], counts[1]


def position_free_auroc(problems: Sequence[Pairs]) -> float:
    """AUROC within problems in which earlier and later negatives weigh half each: any rule by position only gets 0.5.

    Steps that matter come late in a solution more often than not, so plain AUROC rewards a method for that. nan where
    no positive has an earlier, or none a later, negative.
    """
    won_early, early, won_late, late = np.sum(np.asarray(problems, dtype=float), axis=0)
    return float((won_early / early + won_late / late) / 2) if early and late else float("nan")


def agreement(scores: Rows | None, truths: Sequence[Sequence[bool]], *, draws: int = 1000) -> dict[str, Any]:
    """AUROC (free of position, and plain), Spearman and recall of binary truths; problems of one class are left out.

    A method that gives all units of a problem one number ranks nothing there: its Spearman counts as 0. Recall is among
    as many top units as are true.

    Args:
        scores: a row for each problem; None for numbers that know nothing (see `chance`).
        truths: as many rows as long.
        draws: bootstrap draws.

    Returns:
        For each figure `value`, `low` and `high` (95 % of bootstrap draws over problems), and the number of `problems`.

    Raises:
        ValueError: no problem has both classes.
    """
    rows: Rows = truths if scores is None else scores
    both = [(s, t) for s, t in zip(rows, truths, strict=True) if 0 < sum(t) < len(t)]
    if not both:
        raise ValueError("truths: no problem has both classes")
    known, labels = [s for s, _ in both], [t for _, t in both]
    figures = {
        name: _judged(measure, summary, None if scores is None else known, labels, draws)
        for name, (measure, summary) in _FIGURES.items()
    }
    return {name: interval and interval._asdict() for name, interval in figures.items()} | {"problems": len(both)}


def auroc_alone(scores: Rows | None, truths: Sequence[Sequence[bool]]) -> float | None:
    """`position_free_auroc` of problems with both classes, without an interval; None where it is not defined."""
    labels = [t for t in truths if 0 < sum(t) < len(t)]
    if scores is None:
        result = chance(ordered_pairs, position_free_auroc, labels) if labels else None
        return result and result.value
    pairs = [ordered_pairs(s, t) for s, t in zip(scores, truths, strict=True) if 0 < sum(t) < len(t)]
    value = position_free_auroc(pairs) if pairs else float("nan")
    return None if np.isnan(value) else value


def correlation(scores: Rows | None, truths: Rows, *, draws: int = 1000) -> dict[str, Any]:
    """Mean Spearman within problems, those with a constant truth left out; `value`, `low`, `high` and `problems`."""
    rows: Rows = truths if scores is None else scores
    ranked = [(s, t) for s, t in zip(rows, truths, strict=True) if len(set(t)) > 1]
    if not ranked:
        return {"value": None, "low": None, "high": None, "problems": 0}
    known = None if scores is None else [s for s, _ in ranked]
    result = _judged(rank_correlation, _mean, known, [t for _, t in ranked], draws)
    assert result is not None  # a mean is defined on every resample
    return result._asdict() | {"problems": len(ranked)}


def chance(measure: Measure, summary: Summary, truths: Rows, *, draws: int = CHANCE_DRAWS) -> Estimate | None:
    """Compute what random numbers get: the mean over many draws of them, and the bounds of 95 % of the draws.

    A single draw is as likely to miss 0.5 by an interval's width as any method that finds nothing: of 200 problems'
    total truths the draws' standard deviation is 0.024. None where the figure is not defined.
    """
    rng = np.random.default_rng(0)
    result = [
        summary([measure(row, truth) for row, truth in zip(_numbers(rng, truths), truths, strict=True)])
        for _ in range(draws)
    ]
    if not np.isfinite(result).all():
        return None
    low, high = np.quantile(result, [0.025, 0.975])
    return Estimate(float(np.mean(result)), float(low), float(high))


def _numbers(rng: np.random.Generator, truths: Rows) -> Rows:
    return [rng.random(len(truth)).tolist() for truth in truths]


def rank_correlation(scores: Sequence[float], truth: Sequence[float]) -> float:
    """Spearman of one problem; 0 where the scores are all equal."""
    return spearman(scores, truth) if len(set(scores)) > 1 else 0.0


def auroc(scores: Sequence[float], truth: Sequence[bool]) -> float:
    """Compute the share of pairs of a positive and a negative of one problem that scores order; ties count half."""
    won_early, early, won_late, late = ordered_pairs(scores, truth)
    return (won_early + won_late) / (early + late)


def recall_among_top(scores: Sequence[float], truth: Sequence[float]) -> float:
    """Recall among as many top units as are true; the earlier of equal scores is taken."""
    true = np.asarray(truth, dtype=bool)
    top = np.argsort(-np.asarray(scores), kind="stable")[: true.sum()]
    return float(true[top].mean())


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


_FIGURES: dict[str, tuple[Measure, Summary]] = {
    "auroc": (ordered_pairs, position_free_auroc),
    "plain_auroc": (auroc, _mean),
    "spearman": (rank_correlation, _mean),
    "recall": (recall_among_top, _mean),
}


def _judged(measure: Measure, summary: Summary, scores: Rows | None, truths: Rows, draws: int) -> Estimate | None:
    """The figure with its interval over problems, or what chance gives; None where a resample is not defined."""
    if scores is None:
        return chance(measure, summary, truths, draws=min(draws, CHANCE_DRAWS))
    try:
        return bootstrap_interval(summary, [measure(*row) for row in zip(scores, truths, strict=True)], draws=draws)
    except ValueError:
        return None  # too few problems to say
