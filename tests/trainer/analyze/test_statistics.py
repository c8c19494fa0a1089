"""Fidelity metrics against definitions written out pair by pair and token by token."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.analyze.tables import bootstrap_interval, ess_ratio, top_mass

# Few distinct values, so that ties are common.
VALUES = st.lists(st.integers(-4, 4), min_size=2, max_size=12)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=12).filter(any))
def test_ess_ratio_is_the_formula_and_does_not_see_the_scale(weights):
    top = max(weights)
    scaled = [w / top for w in weights]
    assert ess_ratio(weights) == pytest.approx(sum(scaled) ** 2 / (len(scaled) * sum(w * w for w in scaled)))
    assert 1 / len(weights) - 1e-12 <= ess_ratio(weights) <= 1 + 1e-12
    assert ess_ratio([1e-300, 1e-300]) == 1  # squares alone would be 0


@given(VALUES.filter(any), st.sampled_from([0.1, 0.3, 0.5, 1.0]))
def test_top_mass_is_the_share_of_the_largest_absolute_values(values, share):
    sizes = sorted((abs(v) for v in values), reverse=True)
    count = max(1, int(Fraction(str(share)) * len(values)))
    assert top_mass(values, share) == pytest.approx(sum(sizes[:count]) / sum(sizes))


def test_a_statistic_that_is_not_finite_has_no_interval():
    with pytest.raises(ValueError, match="statistic must be finite"):
        bootstrap_interval(lambda _: math.nan, [1, 2], draws=2)


def test_the_bootstrap_interval_holds_the_quantiles_of_resampled_groups():
    groups = [3.0, 1.0, 4.0, 1.0, 5.0]
    interval = bootstrap_interval(np.mean, groups, draws=50)
    rng = np.random.default_rng(0)
    means = sorted(np.mean([groups[i] for i in rng.integers(5, size=5)]) for _ in range(50))
    at = lambda q: (1 - (49 * q) % 1) * means[int(49 * q)] + (49 * q) % 1 * means[min(int(49 * q) + 1, 49)]  # noqa: E731
    assert interval.value == pytest.approx(2.8)
    assert interval.low == pytest.approx(at(0.025))
    assert interval.high == pytest.approx(at(0.975))
    assert bootstrap_interval(np.mean, groups, draws=50) == interval
