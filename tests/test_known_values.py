"""What is computed from fixed batches is what was computed before: scores, losses, gradients and credit."""

import pytest

from cfa_kernels import CounterfactualConfig
from cfa_kernels.credit.weights import WEIGHTS
from cfa_kernels.estimators import ESTIMATORS
from cfa_kernels.losses.checks import LEVELS, LOSS_TYPES
from tests.support import known_values

pytestmark = [pytest.mark.slow, pytest.mark.traced]  # all is on the host: nothing to tell apart

TOLERANCE = 1e-4  # of a tensor's norm: some layers and weights are computed in float32 whatever the model's dtype


def test_figures_of_fixed_batches_are_the_known_ones():
    found, known = known_values.figures(), known_values.read()
    assert found.keys() == known.keys(), "write them anew: python -m tests.support.known_values"
    for name, figures in known.items():
        assert len(found[name]) == len(figures), name
        pairs = list(zip(found[name], figures, strict=True))
        for norm, total in zip(pairs[::2], pairs[1::2], strict=True):
            allowed = TOLERANCE * abs(norm[1]) + 1e-9
            assert abs(norm[0] - norm[1]) <= allowed, f"{name}: norm {norm[0]}, known {norm[1]}"
            assert abs(total[0] - total[1]) <= allowed, f"{name}: sum by position {total[0]}, known {total[1]}"


def test_every_estimator_weight_rule_and_loss_has_known_figures():
    configs = [CounterfactualConfig(**options) for options in known_values.CREDIT.values()]
    assert {config.estimator.name for config in configs} == set(ESTIMATORS)
    assert {type(config.weights).__name__ for config in configs if config.weights} == {
        rule.__name__ for rule in WEIGHTS.values()
    }
    names = known_values.read().keys()
    assert {f"loss, {kind}, {level}, beta 0" for kind in LOSS_TYPES for level in LEVELS} <= names
    assert {f"credit, {name}" for name in known_values.CREDIT} <= names


def test_no_two_cases_of_credit_are_the_same_figures():
    """A case that equals another tells of nothing that the other does not."""
    known = known_values.read()
    seen: dict[tuple[float, ...], str] = {}
    for name in (f"credit, {name}" for name in known_values.CREDIT):
        assert (twin := seen.setdefault(tuple(known[name]), name)) == name, f"{name} and {twin}"
