"""Additive shaping by entropy, against a case worked by hand and the formula in float64."""

import math

import pytest
import torch

from cfa_kernels import CounterfactualConfig, EntropyShaping, Rows, counterfactual_credit
from tests.support.small_tokenizers import get_tokenizer

LENGTHS = (4, 3, 2)
ROWS = Rows([torch.tensor([5])] * 3, [torch.arange(6, 6 + n) for n in LENGTHS])
ENTROPIES = [torch.tensor([0.0, 0.5, 1.0, 9.0]), torch.tensor([0.25, 2.0, -1e-4]), torch.tensor([3.0, 3.0])]


def shaped(advantages, entropies=ENTROPIES, control=None, **options):
    config = CounterfactualConfig(EntropyShaping(**options), control=control)
    return counterfactual_credit(
        None, get_tokenizer("byte-level, single digits"), ROWS, advantages=advantages, entropies=entropies,
        config=config, seed=3,
    )  # fmt: skip


def test_an_advantage_grows_by_its_tokens_entropies_up_to_a_part_of_itself():
    credit = shaped(torch.tensor([2.0, -1.0, 0.0]), alpha=0.5, kappa=4.0)
    assert credit.advantages[0].tolist() == [2.0, 2.25, 2.5, 2.5]
    assert credit.advantages[1].tolist() == pytest.approx([-0.875, -0.75, -1.00005])
    assert credit.advantages[2].tolist() == [0.0, 0.0]
    assert all(row.eq(1).all() for row in credit.weights)
    assert credit.metrics()["credit/added_fraction"] == pytest.approx(6 / 9)
    against = shaped(torch.tensor([2.0, -1.0, 0.0]), alpha=0.5, kappa=4.0, control="inverted")
    assert against.advantages[0].tolist() == [2.0, 1.75, 1.5, 1.5]


def wrong(b: int, t: int, value: float) -> list[torch.Tensor]:
    rows = [row.clone() for row in ENTROPIES]
    rows[b][t] = value
    return rows


@pytest.mark.parametrize("estimator", ["entropy", "entropy_shaping"])
@pytest.mark.parametrize(("value", "said"), [(math.nan, "nan"), (math.inf, "inf"), (-2.5, "-2.5")])
def test_an_entropy_that_cannot_be_one_is_named(estimator, value, said):
    config = CounterfactualConfig(estimator=estimator)
    columns = {"advantages": torch.ones(3), "entropies": wrong(1, 2, value), "config": config}
    with pytest.raises(ValueError, match=f"entropies row 1, token 2: must be finite and not negative, got {said}"):
        counterfactual_credit(None, get_tokenizer("byte-level, single digits"), ROWS, **columns)
