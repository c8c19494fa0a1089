"""Measure how concentrated credit is, and how well importances agree with each other.

Rows of finite numbers in (1-D tensors, arrays or sequences), a float out; `ValueError` names what cannot be measured.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from scipy import stats

Numbers = torch.Tensor | np.ndarray | Sequence[float] | Sequence[bool]
Group = TypeVar("Group")


class Interval(NamedTuple):
    """Statistic and its bootstrap interval `[low, high]`."""

    value: float
    low: float
    high: float


def ess_ratio(weights: Numbers) -> float:
    """Compute the effective sample size of token weights over their number, `(sum w)^2 / (T sum w^2)`: 1 if equal.

    Source: "Outcome-Grounded Advantage Reshaping", the ESS ratio of its analysis.
    """
    w = _row(weights)
    if (w < 0).any() or not w.any():
        raise ValueError(f"weights must not be negative, nor all 0, got {w.tolist()}")
    w /= w.max()  # squares of very small or large weights would leave the range of a double
    return float(w.sum() ** 2 / (len(w) * (w**2).sum()))


def top_mass(values: Numbers, share: float = 0.1) -> float:
    """Compute the share of `sum |x|` that the largest `|x|` hold, for a top `share` of the tokens, at least one.

    Source: "Outcome-Grounded Advantage Reshaping", the top-10 % mass of its analysis.
    """
    sizes = np.sort(np.abs(_row(values)))
    if not sizes.any():
        raise ValueError(f"values must not be all 0, got {len(sizes)}")
    sizes /= sizes[-1]
    return float(sizes[len(sizes) - _count(len(sizes), share) :].sum() / sizes.sum())


def spearman(a: Numbers, b: Numbers) -> float:
    """Compute Spearman's rank correlation; neither row may be constant."""
    # Twice the centred ranks are whole numbers, so these sums are exact and a perfect agreement is exactly 1, which it
    # is not in scipy's own correlation.
    x, y = (2 * stats.rankdata(_row(values)) - (len(values) + 1) for values in (a, b))
    if not x.any() or not y.any():
        raise ValueError("a constant row has no rank correlation")
    return float(np.clip((x @ y) / math.sqrt((x @ x) * (y @ y)), -1.0, 1.0))


def bootstrap_interval(
    statistic: Callable[[list[Group]], float], groups: Sequence[Group], *, draws: int = 1000, level: float = 0.95,
    seed: int = 0,
) -> Interval:  # fmt: skip
    """Measure a statistic of independent groups with its percentile bootstrap interval.

    Whole groups are drawn with replacement, so values that depend on each other within a group (the tokens of one
    completion) stay together. The statistic must be finite on every resample. Equal seeds draw equal resamples for
    equal numbers of groups.

    Source: Efron, "Bootstrap Methods: Another Look at the Jackknife" (1979).
    """
    value = float(statistic(list(groups)))
    if len(groups) == 1:  # every resample is the group itself
        return Interval(value, value, value)
    result = stats.bootstrap(
        (np.arange(len(groups)),), lambda chosen: float(statistic([groups[i] for i in chosen])), n_resamples=draws,
        vectorized=False, confidence_level=level, method="percentile", rng=np.random.default_rng(seed),
    )  # fmt: skip
    if not np.isfinite([value, *result.bootstrap_distribution]).all():
        raise ValueError("statistic must be finite for the groups and for every draw of them")
    return Interval(value, float(result.confidence_interval.low), float(result.confidence_interval.high))


def _count(length: int, share: float) -> int:
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}")
    return max(1, math.floor(share * length + 1e-9))  # 0.29 * 100 is 28.999999999999996


def _row(values: Numbers) -> np.ndarray:
    row = values.detach().double().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    row = row.astype(np.float64)
    if row.ndim != 1 or not len(row) or not np.isfinite(row).all():
        raise ValueError(f"expected one row of finite numbers, got {values!r:.80}")
    return row
