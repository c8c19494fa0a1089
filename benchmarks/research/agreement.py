"""Measure how well importances agree with a truth over many problems, with intervals over problems.

Units are compared only within a problem: importances of different problems have no common scale.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from trainer.analyze.tables import Estimate, bootstrap_interval

Rows = Sequence[Sequence[float]]
Figure = tuple[Callable[[np.ndarray, np.ndarray], Any], Callable[[Any], float]]
"""From the scores and the truth of one problem to what is summed up over problems, and the sum."""


def ordered_pairs(scores: np.ndarray, truth: np.ndarray) -> tuple[float, int, float, int]:
    """Of one problem a positive's wins over earlier negatives and their number, and over later ones; ties win half."""
    yes, no = np.flatnonzero(truth), np.flatnonzero(truth == 0)
    more, later = scores[yes][:, None] - scores[no], no > yes[:, None]
    wins = (more > 0) + 0.5 * (more == 0)
    return wins[~later].sum(), (~later).sum(), wins[later].sum(), later.sum()


def position_free_auroc(problems: Sequence[tuple[float, int, float, int]]) -> float:
    """AUROC within problems in which earlier and later negatives weigh half each: any rule by position only gets 0.5.

    Steps that matter come late in a solution more often than not, so plain AUROC rewards a method for that. nan where
    no positive has an earlier, or none a later, negative.
    """
    won_early, early, won_late, late = np.sum(np.asarray(problems, dtype=float), axis=0)
    return float((won_early / early + won_late / late) / 2) if early and late else float("nan")


def rank_correlation(scores: Sequence[float] | np.ndarray, truth: Sequence[float] | np.ndarray) -> float:
    """Spearman of one problem; 0 where the scores are all equal."""
    return float(stats.spearmanr(scores, truth).statistic) if len(set(scores)) > 1 else 0.0


AUROC: dict[str, Figure] = {"auroc": (ordered_pairs, position_free_auroc)}
SPEARMAN: dict[str, Figure] = {"spearman": (rank_correlation, np.mean)}


def agreement(scores: Rows | None, truths: Rows, figures: Mapping[str, Figure], *, draws: int = 1000) -> dict[str, Any]:
    """Sum figures up over problems; those with a constant truth are left out.

    Each figure has `value`, `low` and `high` (95 % of bootstrap draws over problems), or is None where it is not
    defined. For `scores` None it is the mean over draws of numbers that know nothing, within the bounds of 95 % of the
    draws.
    """
    kept = [i for i, truth in enumerate(truths) if len(set(truth)) > 1]
    labels, rng = [np.asarray(truths[i], float) for i in kept], np.random.default_rng(0)
    result: dict[str, Any] = {"problems": len(kept)}
    for name, (measure, summary) in figures.items() if kept else ():
        if scores is None:
            luck = [summary([measure(rng.random(len(t)), t) for t in labels]) for _ in range(min(draws, 200))]
            bounds = Estimate(float(np.mean(luck)), *np.quantile(luck, (0.025, 0.975)))._asdict()
            result[name] = bounds if np.isfinite(luck).all() else None
            continue
        values = [measure(np.asarray(scores[i], float), t) for i, t in zip(kept, labels, strict=True)]
        try:
            result[name] = bootstrap_interval(summary, values, draws=draws)._asdict() if len(kept) > 1 else None
        except ValueError:  # not defined on every resample
            result[name] = None
    return result
