"""Importances become weights by the formulas of the source papers; `span_weights` follows the CF paper's equations."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cfa_kernels.credit.weights import Bilevel, Identity, TopShare, WeightInputs, span_weights
from cfa_kernels.span import Span

SPANS = [Span(1, 3), Span(4, 6), Span(6, 7)]
ANSWER = Span(8, 10)
DROP = torch.tensor([3.0, 1.0, -1.0])


@pytest.mark.parametrize(
    ("inverted", "expected"),
    [
        (False, [1, 4.0, 4.0, 1, 2.25, 2.25, 0.5, 1, 1.5, 1.5, 1]),
        (True, [1, 0.5, 0.5, 1, 2.25, 2.25, 4.0, 1, 1.5, 1.5, 1]),
    ],
)
def test_importances_map_to_the_weight_range_and_the_rest_weighs_one(inverted, expected):
    weights = span_weights(DROP, SPANS, ANSWER, 11, inverted=inverted)
    torch.testing.assert_close(weights, torch.tensor(expected))
    assert weights.dtype == torch.float32
    assert torch.equal(span_weights(DROP.tolist(), SPANS, ANSWER, 11, inverted=inverted), weights)


@pytest.mark.parametrize("drop", [[], [2.0], [2.0, 2.0 + 1e-7, 2.0]])
def test_one_span_or_equal_importances_weigh_one(drop):
    weights = span_weights(torch.tensor(drop), SPANS[: len(drop)], ANSWER, 11)
    expected = torch.ones(11)
    expected[8:10] = 1.5
    assert torch.equal(weights, expected)


def test_a_token_in_several_spans_takes_the_largest_importance():
    spans = [Span(0, 4), Span(2, 6), Span(7, 8)]
    drop = torch.tensor([2.0, 1.0, 0.0])
    assert span_weights(drop, spans, None, 9).tolist() == [4.0] * 4 + [2.25] * 2 + [1.0, 0.5, 1.0]
    inverted = span_weights(drop, spans, None, 9, inverted=True)
    assert inverted.tolist() == [0.5] * 4 + [2.25] * 2 + [1.0, 4.0, 1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": None}, "drop: expected a number for each of 3 spans, got None"),
        ({"drop": DROP[:2]}, r"drop must hold one value per span: got shape \(2,\) for 3 spans"),
        ({"drop": torch.tensor([0.0, float("nan"), 1.0])}, "drop, span 1: must be finite, got nan"),
        (
            {"spans": [Span(0, 1), Span(3, 3), Span(4, 5)]},
            r"spans, span 1: \(3, 3\) is not a non-empty span inside a completion of 11",
        ),
        ({"answer": Span(9, 12)}, r"answer: \(9, 12\) is not a non-empty span inside"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name_and_value(change, message):
    arguments = {"drop": DROP, "spans": SPANS, "answer": ANSWER, "length": 11, **change}
    with pytest.raises(ValueError, match=message):
        span_weights(**arguments)


def tokens(count: int, start: int = 0) -> list[Span]:
    return [Span(t, t + 1) for t in range(start, start + count)]


def bilevel(importances, units, answer, length, *, inverted=False, **options) -> torch.Tensor:
    (weights,) = Bilevel(**options)([WeightInputs(importances, units, answer, length)], inverted=inverted)
    return weights


def bilevel_by_the_formulas(importances, tau, boost, floor, inverted) -> np.ndarray:
    """OAR paper, eqs. 14 to 17, in float64, token by token."""
    values = np.log(1 + np.maximum(np.array(importances, np.float64), 0))
    if values.max() == values.min():
        return np.ones(len(values))
    share = (values - values.min()) / (values.max() - values.min())
    share = 1 - share if inverted else share
    threshold = float(np.quantile(share, tau))
    omega = []
    for x in share:
        if x < threshold:
            omega.append(max(x / threshold, floor))
        else:
            omega.append(1 + (boost * (x - threshold) / (1 - threshold) if threshold < 1 else 0))
    return np.array(omega) * len(omega) / sum(omega)


importance_lists = st.lists(st.one_of(st.just(0.0), st.floats(-1, 30, width=32)), min_size=1, max_size=12)


@given(importance_lists, st.sampled_from([0, 0.25, 0.4, 1]), st.floats(0, 3), st.sampled_from([0, 0.1]), st.booleans())
def test_bilevel_weights_are_those_of_the_formulas_and_keep_the_mass(importances, tau, boost, floor, inverted):
    values = torch.tensor(importances)
    found = bilevel(
        values, tokens(len(values), 2), Span(15, 17), 18, tau=tau, boost=boost, floor=floor, inverted=inverted
    )
    inside = found[2 : 2 + len(values)]
    spread = np.ptp(np.log1p(np.maximum(values.double().numpy(), 0)))
    if spread == 0 or spread > 1e-3:
        expected = bilevel_by_the_formulas(importances, tau, boost, floor, inverted)
        np.testing.assert_allclose(inside.numpy(), expected, atol=2e-3, rtol=2e-3)
    assert abs(inside.mean().item() - 1) < 1e-5
    assert found[[0, 1, 15, 16, 17]].eq(1).all()


def test_bilevel_weighs_a_span_by_its_tokens():
    """The quantile and the mass are those of tokens, not of spans."""
    spans = [Span(0, 4), Span(4, 5)]
    by_span = bilevel(torch.tensor([1.0, 5.0]), spans, None, 5)
    by_token = bilevel(torch.tensor([1.0, 1, 1, 1, 5]), tokens(5), None, 5)
    assert torch.equal(by_span, by_token)


@pytest.mark.parametrize("fraction", [0, 0.2, 0.5, 1])
def test_top_keeps_the_share_of_the_whole_batch_as_trl_does(fraction):
    values = [torch.tensor([3.0, 1, 2]), torch.tensor([9.0, 8, 7, 6, 5]), torch.zeros(0)]
    units = [tokens(3), tokens(5, 1), []]
    rows = [WeightInputs(*row, None, n) for row, n in zip(zip(values, units), (4, 7, 2), strict=True)]  # noqa: B905
    threshold = torch.quantile(torch.cat(values), 1 - fraction)
    kept = TopShare(fraction)(rows, inverted=False)
    assert kept[0].tolist() == [float(x >= threshold) for x in values[0]] + [1]
    assert kept[1].tolist() == [1] + [float(x >= threshold) for x in values[1]] + [1]
    assert kept[2].tolist() == [1, 1]
    left = TopShare(fraction)(rows, inverted=True)[1]
    assert (left + kept[1])[1:6].eq(1).all()
    assert TopShare(fraction)(rows[2:], inverted=False)[0].tolist() == [1, 1]  # a batch without units


def test_identity_takes_importances_for_weights_and_refuses_negative_ones():
    row = WeightInputs(torch.tensor([0.0, 2.5]), [Span(0, 2), Span(3, 4)], None, 5)
    (weights,) = Identity()([row], inverted=False)
    assert weights.tolist() == [0, 0, 1, 2.5, 1]
    with pytest.raises(ValueError, match=r"importances, unit 1: as a weight it must be >= 0, got -2\.5"):
        Identity()([row._replace(importances=torch.tensor([0.0, -2.5]))], inverted=False)
