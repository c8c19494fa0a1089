"""A share of the units, chosen by length or another estimator, is masked exactly; the others claim nothing."""

import pytest
import torch

from cfa_kernels.estimators import ESTIMATORS
from cfa_kernels.estimators.masking import Masking, top_units
from cfa_kernels.scoring.access import InProcess
from cfa_kernels.span import Span
from tests.support.models import PLACEHOLDER, batch, batch_of, make_model, score_columns


def preselected(model, *data, reasoning_ends=None, entropies=None, external=None, **options):
    """Importances in the order of `data`, and what it took."""
    rows = batch_of(model, *data, reasoning_ends=reasoning_ends, entropies=entropies, external=external)
    result = Masking(**options)(InProcess(model), rows)
    return result.values, result.work


@pytest.mark.parametrize(
    ("values", "share", "top"),
    [
        ([1, 3, 2, 3], 0.5, [1, 3]), ([1, 3, 2, 3], 0.25, [1]), ([1, 3, 2, 3], 0.01, [1]), ([0, 0, 0], 0.67, [0, 1]),
        ([5], 1, [0]), ([], 0.5, []),
    ],
)  # fmt: skip
def test_the_top_units_are_the_largest_the_earlier_of_equals(values, share, top):
    assert top_units(torch.tensor([float(value) for value in values]), share) == top


def test_preselected_units_are_masked_exactly_and_the_others_claim_nothing(qwen3):
    values, work = preselected(qwen3, *batch(), preselect=0.5)
    whole = score_columns(qwen3, *batch(), mask=PLACEHOLDER)
    masked = [[0, 1], [1], [0], [0], [1], [], [1]]
    for ours, drop, units in zip(values, whole.drop, masked, strict=True):
        expected = torch.zeros(len(drop))
        expected[units] = drop[units]
        torch.testing.assert_close(ours, expected, rtol=0, atol=4e-5, equal_nan=True)
    assert work.tokens_fed < whole.work.tokens_fed
    assert work.forwards == 1


@pytest.mark.parametrize("name", ["length", "prefix_gain", "gradient", "entropy", "external"])
def test_the_units_that_are_masked_are_those_that_the_estimate_finds_most_important(qwen3, name):
    data = [column[2:5] for column in batch()]
    data[2] = [[Span(0, 1), Span(1, 4), Span(4, 6), Span(6, 7)] for _ in data[2]]
    data[3] = [Span(8, 10) for _ in data[3]]
    numbers = [torch.rand(len(row), generator=torch.Generator().manual_seed(b)) for b, row in enumerate(data[1])]
    known = {"reasoning_ends": [8] * 3, "entropies": numbers, "external": numbers}
    rows = batch_of(qwen3, *data, **known)
    estimates, work = [torch.tensor([1.0, 3.0, 2.0, 1.0])] * 3, None
    if name != "length":
        estimate = ESTIMATORS[name]()(InProcess(qwen3), rows)
        estimates, work = estimate.values, estimate.work
    values, total = preselected(qwen3, *data, **known, preselect=0.5, preselect_by=name)
    assert [row.nonzero().flatten().tolist() for row in values] == [
        sorted(row.abs().topk(2).indices.tolist()) for row in estimates
    ]
    assert total.forwards == 1 + (work.forwards if work else 0)


@pytest.mark.parametrize(
    ("options", "gave"),
    [
        ({}, "nan"),
        ({"preselect": 0.5, "preselect_by": "prefix_gain"}, "nan"),
        ({"preselect": 0.5, "preselect_by": "gradient"}, "gradient that is not finite"),
    ],
    ids=str,
)
def test_a_model_that_gives_nan_is_an_error_that_names_the_callers_row(options, gave):
    model, data = make_model("Qwen3"), [[column[b] for b in (2, 5, 4)] for column in batch()]  # the last is fed second
    preselected(model, *data, reasoning_ends=[9, 0, 22], **options)
    data[1][2][2] = 210
    model.get_input_embeddings().weight.data[210] = float("nan")
    with pytest.raises(FloatingPointError, match=f"completions row 2: the model gave a {gave}"):
        preselected(model, *data, reasoning_ends=[9, 0, 22], **options)
