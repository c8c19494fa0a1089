"""Columns of rows to credit: what is wrong with them is said before a model is asked."""

import math
import re

import pytest
import torch

from cfa_kernels import CounterfactualConfig, counterfactual_credit
from tests.support.log_prob_hosts import batch_rows

ROWS = batch_rows()
CREDIT = [{}, {"completions": "positive"}, {"estimator": "prefix_tree"}, {"control": "random"}]
INTEGERS = "advantages must be floating point, got torch.int64; convert them with .float()"


@pytest.mark.parametrize("options", CREDIT, ids=str)
@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        (torch.tensor([1, -1, 1, 0, 1, 1]), INTEGERS),
        ([torch.ones(n, dtype=torch.float if n > 3 else torch.int64) for n in ROWS.lengths], INTEGERS),
        (torch.tensor([1.0, 0, math.nan, 1, 1, 1]), "advantages row 2: must be finite, got nan"),
        (torch.tensor([1.0, 0, -math.inf, 1, 1, 1]), "advantages row 2: must be finite, got -inf"),
        ([torch.full((n,), math.inf) for n in ROWS.lengths], "advantages row 0, token 0: must be finite, got inf"),
    ],
)
def test_advantages_that_are_integers_or_not_finite_are_an_error_whatever_the_credit(advantages, message, options):
    with pytest.raises(ValueError, match=re.escape(message)):
        counterfactual_credit(None, None, ROWS, advantages=advantages, config=CounterfactualConfig.of(options))
