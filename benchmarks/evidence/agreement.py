"""How well importances agree with a truth over many problems, with intervals over problems.

Where it stands: between the ledger's numbers and the tables. One problem's units are compared with each other alone:
importances of different problems have no common scale.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cfa_kernels.fidelity import Interval, auroc, bootstrap_interval, recall_at, spearman

Pairs = tuple[float, int, float, int]
"""Wins over earlier negatives and their number, wins over later ones and their number."""


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
    """AUROC within problems in which earlier and later negatives weigh half each: any rule by position alone gets 0.5.

    Steps that matter come late in a solution more often than not, so plain AUROC rewards a method for that. nan where
    no positive has an earlier, or none a later, negative.
    """
    won_early, early, won_late, late = np.sum(np.asarray(problems, dtype=float), axis=0)
    return float((won_early / early + won_late / late) / 2) if early and late else float("nan")


def agreement(
    scores: Sequence[Sequence[float]], truths: Sequence[Sequence[bool]], *, draws: int = 1000
) -> dict[str, Any]:
    """AUROC (free of position, and plain), Spearman and recall of binary truths; problems of one class are left out.

    A method that gives all units of a problem one number ranks nothing there: its Spearman counts as 0. Recall is among
    as many top units as are true.

    Returns:
        For each figure `value`, `low` and `high` (95 % of bootstrap draws over problems), and the number of `problems`.

    Raises:
        ValueError: no problem has both classes.
    """
    both = [(s, t) for s, t in zip(scores, truths, strict=True) if 0 < sum(t) < len(t)]
    if not both:
        raise ValueError("truths: no problem has both classes")
    pairs = [ordered_pairs(s, t) for s, t in both]
    figures = {
        "auroc": _or_none(lambda: bootstrap_interval(position_free_auroc, pairs, draws=draws)),
        "plain_auroc": _mean([auroc(s, t) for s, t in both], draws),
        "spearman": _mean([rank_correlation(s, t) for s, t in both], draws),
        "recall": _mean([recall_at(s, t, sum(t) / len(t)) for s, t in both], draws),
    }
    return {name: interval and interval._asdict() for name, interval in figures.items()} | {"problems": len(both)}


def auroc_alone(scores: Sequence[Sequence[float]], truths: Sequence[Sequence[bool]]) -> float | None:
    """`position_free_auroc` of problems with both classes, without an interval; None where it is not defined."""
    pairs = [ordered_pairs(s, t) for s, t in zip(scores, truths, strict=True) if 0 < sum(t) < len(t)]
    value = position_free_auroc(pairs) if pairs else float("nan")
    return None if np.isnan(value) else value


def correlation(
    scores: Sequence[Sequence[float]], truths: Sequence[Sequence[float]], *, draws: int = 1000
) -> dict[str, Any]:
    """Mean Spearman within problems, those with a constant truth left out; `value`, `low`, `high` and `problems`."""
    ranked = [(s, t) for s, t in zip(scores, truths, strict=True) if len(set(t)) > 1]
    if not ranked:
        return {"value": None, "low": None, "high": None, "problems": 0}
    return _mean([rank_correlation(s, t) for s, t in ranked], draws)._asdict() | {"problems": len(ranked)}


def rank_correlation(scores: Sequence[float], truth: Sequence[float]) -> float:
    """Spearman of one problem; 0 where the scores are all equal."""
    return spearman(scores, truth) if len(set(scores)) > 1 else 0.0


def _mean(values: Sequence[float], draws: int) -> Interval:
    return bootstrap_interval(lambda drawn: float(np.mean(drawn)), values, draws=draws)


def _or_none(interval: Any) -> Interval | None:
    """The interval, or None where a resample is not defined: too few problems to say."""
    try:
        return interval()
    except ValueError:
        return None
