"""Measure how concentrated credit is, and how far a statistic may be off."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from scipy import stats

Group = TypeVar("Group")
Numbers = Sequence[float] | np.ndarray


class Estimate(NamedTuple):
    """Statistic and its bootstrap interval `[low, high]`."""

    value: float
    low: float
    high: float


def ess_ratio(weights: Numbers) -> float:
    """Compute the effective sample size of T weights over T, `(sum w)^2 / (T sum w^2)`: 1 for equal weights.

    No weight may be negative, nor all of them 0. Source: "Outcome-Grounded Advantage Reshaping".
    """
    w = np.asarray(weights, float) / max(weights)  # squares of very small weights would leave the range of a double
    return float(w.sum() ** 2 / (len(w) * (w**2).sum()))


def top_mass(values: Numbers, share: float = 0.1) -> float:
    """Compute the share of `sum |x|`, not 0, that the largest `|x|` hold: a top `share` of the values, at least one.

    Source: "Outcome-Grounded Advantage Reshaping".
    """
    sizes = np.sort(np.abs(np.asarray(values, float)))[::-1]
    return float(sizes[: max(1, math.floor(share * len(sizes) + 1e-9))].sum() / sizes.sum())  # 0.29 * 100 is below 29


def bootstrap_interval(
    statistic: Callable[[list[Group]], float], groups: Sequence[Group], *, draws: int = 1000
) -> Estimate:
    """Measure a statistic of independent groups with its 95 % percentile bootstrap interval (Efron, 1979).

    Whole groups are drawn with replacement: values that depend on each other, such as the tokens of one completion,
    belong to one group. Raises `ValueError` if the statistic is not finite on every resample.
    """
    value = float(statistic(list(groups)))
    if len(groups) == 1:  # every resample is the group itself
        return Estimate(value, value, value)
    result = stats.bootstrap(
        (np.arange(len(groups)),), lambda chosen: float(statistic([groups[i] for i in chosen])), n_resamples=draws,
        vectorized=False, method="percentile", rng=np.random.default_rng(0),
    )  # fmt: skip
    if not np.isfinite([value, *result.bootstrap_distribution]).all():
        raise ValueError("statistic must be finite for the groups and for every draw of them")
    return Estimate(value, float(result.confidence_interval.low), float(result.confidence_interval.high))
