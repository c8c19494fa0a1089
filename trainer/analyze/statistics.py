"""Measure how concentrated credit is, and how well importances agree with a truth or with each other.

1-D tensors, arrays or sequences in, a float out. Equal values count as equal: ranks are averaged, pairs count half, and
only `recall_at`, which has to choose, takes the earlier token first. Ranks and resampling are scipy's.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from scipy import stats
from torch import Tensor

Numbers = Tensor | np.ndarray | Sequence[float] | Sequence[bool]
"""A row of numbers: a 1-D tensor on any device, a 1-D array or a sequence."""

Group = TypeVar("Group")

# `share * length` that misses a whole number only by rounding (0.29 * 100 = 28.999999999999996) is that number.
_ROUNDING = 1e-9


class Interval(NamedTuple):
    """Statistic and its bootstrap interval `[low, high]`."""

    value: float
    low: float
    high: float


def ess_ratio(weights: Numbers) -> float:
    """Compute the effective sample size of token weights over their number: `(sum w)^2 / (T sum w^2)`.

    Args:
        weights: (T,) finite and not negative, at least one above 0.

    Returns:
        In [1/T, 1]; 1 for equal weights, 1/T when one token has all the weight.

    Raises:
        ValueError: empty, negative, non-finite or all zero; names the position and the value.

    Source: "Outcome-Grounded Advantage Reshaping", the ESS ratio of its analysis.
    """
    w = _vector("weights", weights)
    if (w < 0).any():
        i = int((w < 0).argmax())
        raise ValueError(f"weights, position {i}: must not be negative, got {w[i]}")
    if not w.any():
        raise ValueError(f"weights: all {len(w)} are 0, at least one must be above")
    w /= w.max()  # squares of very small or large weights would leave the range of a double
    return float(w.sum() ** 2 / (len(w) * (w**2).sum()))


def top_mass(values: Numbers, share: float = 0.1) -> float:
    """Compute the share of `sum |x|` that the largest `|x|` hold, for a top `share` of the tokens, at least one.

    Args:
        values: (T,) finite, at least one not 0; advantages, weights or gradient norms of tokens.
        share: in (0, 1]; `max(1, floor(share * T))` tokens count as the top.

    Returns:
        In (0, 1].

    Raises:
        ValueError: empty, non-finite or all zero values, a share outside (0, 1].

    Source: "Outcome-Grounded Advantage Reshaping", the top-10 % mass of its analysis.
    """
    sizes = np.abs(_vector("values", values))
    if not sizes.any():
        raise ValueError(f"values: all {len(sizes)} are 0, they have no mass to share")
    sizes = np.sort(sizes / sizes.max())
    return float(sizes[len(sizes) - _top_count(len(sizes), share) :].sum() / sizes.sum())


def recall_at(importances: Numbers, truth: Numbers, share: float) -> float:
    """Compute the share of the true tokens that are among the most important `share` of all tokens.

    Args:
        importances: (T,) finite, high = matters. Of equal ones the earlier token comes first.
        truth: (T,) bool or 0 and 1, at least one true.
        share: in (0, 1]; `max(1, floor(share * T))` tokens are taken.

    Returns:
        In [0, 1].

    Raises:
        ValueError: empty or non-finite importances, no true token, different lengths, a share outside (0, 1].
    """
    scores, labels = _vector("importances", importances), _labels("truth", truth)
    _check_lengths(importances=scores, truth=labels)
    if not labels.any():
        raise ValueError(f"truth: none of {len(labels)} is true, there is nothing to recall")
    top = np.argsort(-scores, kind="stable")[: _top_count(len(scores), share)]
    return float(labels[top].sum() / labels.sum())


def auroc(scores: Numbers, labels: Numbers) -> float:
    """Compute the probability that a positive scores above a negative, pairs of equal scores counted half.

    Args:
        scores: (N,) finite.
        labels: (N,) bool or 0 and 1, both present.

    Returns:
        In [0, 1]; 0.5 for scores that say nothing.

    Raises:
        ValueError: empty or non-finite scores, labels of one class, different lengths.
    """
    values, positive = _vector("scores", scores), _labels("labels", labels)
    _check_lengths(scores=values, labels=positive)
    ones = int(positive.sum())
    zeros = len(positive) - ones
    if not ones or not zeros:
        raise ValueError(f"labels: must hold both classes, all {len(positive)} are {bool(ones)}")
    # Mann and Whitney's U from the positives' ranks; scipy's own test would also compute a p-value.
    return float((stats.rankdata(values)[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def spearman(a: Numbers, b: Numbers) -> float:
    """Compute Spearman's rank correlation: Pearson's of the average ranks.

    Args:
        a, b: (N,) finite, N at least 2, neither constant.

    Returns:
        In [-1, 1].

    Raises:
        ValueError: empty, non-finite or constant values (their ranks correlate with nothing), different lengths.
    """
    first, second = _vector("a", a), _vector("b", b)
    _check_lengths(a=first, b=second)
    for name, values in (("a", first), ("b", second)):
        if (values == values[0]).all():
            raise ValueError(f"{name}: all {len(values)} values are {values[0]}, a constant has no rank correlation")
    # Twice the centred ranks are whole numbers, so these sums are exact and a perfect agreement is exactly 1, which it
    # is not in scipy's own correlation.
    x, y = (2 * stats.rankdata(values) - (len(values) + 1) for values in (first, second))
    return float(np.clip((x @ y) / math.sqrt((x @ x) * (y @ y)), -1.0, 1.0))


def bootstrap_interval(
    statistic: Callable[[list[Group]], float],
    groups: Sequence[Group],
    *,
    draws: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Give a statistic of independent groups (problems, say) its percentile bootstrap interval.

    Whole groups are drawn with replacement, so what is dependent within a group (the tokens of one completion) stays
    together.

    Args:
        statistic: from a list of groups to a finite number. It must be defined on every resample: a mean over groups
            of a figure per group is; a pooled AUROC is not where few groups hold a class.
        groups: at least one, of any type; equal seeds draw equal resamples for equal numbers of groups.
        draws: resamples, at least 1.
        level: coverage in (0, 1).
        seed: of numpy's generator.

    Returns:
        `Interval(value, low, high)`: the statistic of `groups`, and the quantiles `(1 -+ level) / 2` of the
        resamples' statistics, linearly interpolated.

    Raises:
        ValueError: no group, options outside their range, a statistic that is not finite (names the draw).

    Source: Efron, "Bootstrap Methods: Another Look at the Jackknife" (1979); the percentile interval.
    """
    if not len(groups):
        raise ValueError("groups: is empty")
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
    value = float(statistic(list(groups)))
    if not math.isfinite(value):
        raise ValueError(f"statistic: must be finite, got {value} for the groups")
    if len(groups) == 1:  # every resample is the group itself
        return Interval(value, value, value)
    found = stats.bootstrap(
        (np.arange(len(groups)),),
        lambda chosen: float(statistic([groups[i] for i in chosen])),
        n_resamples=draws,
        vectorized=False,
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    drawn = found.bootstrap_distribution
    if not np.isfinite(drawn).all():
        i = int((~np.isfinite(drawn)).argmax())
        raise ValueError(f"statistic: must be finite, got {drawn[i]} for draw {i}")
    return Interval(value, float(found.confidence_interval.low), float(found.confidence_interval.high))


def _top_count(length: int, share: float) -> int:
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}")
    return max(1, math.floor(share * length + _ROUNDING))


def _vector(name: str, values: Numbers) -> np.ndarray:
    """Check numbers and copy them to (N,) float64."""
    given = values.detach().double().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if given.ndim != 1:
        raise ValueError(f"{name}: must be one row of numbers, got shape {given.shape}")
    if not len(given):
        raise ValueError(f"{name}: is empty")
    row = given.astype(np.float64)
    if not np.isfinite(row).all():
        i = int((~np.isfinite(row)).argmax())
        raise ValueError(f"{name}, position {i}: must be finite, got {row[i]}")
    return row


def _labels(name: str, values: Numbers) -> np.ndarray:
    row = _vector(name, values)
    other = (row != 0) & (row != 1)
    if other.any():
        i = int(other.argmax())
        raise ValueError(f"{name}, position {i}: must be true or false, got {row[i]}")
    return row == 1


def _check_lengths(**rows: np.ndarray) -> None:
    (first, a), (second, b) = rows.items()
    if len(a) != len(b):
        raise ValueError(f"{second}: has {len(b)} values, {first} has {len(a)}")
