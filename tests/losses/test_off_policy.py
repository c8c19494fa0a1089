"""Gaps and ratios between the log-probs that tokens were sampled with and those of the policy that learns."""

import math

import pytest
import torch

from cfa_kernels.losses.off_policy import open_choice, sampling_gaps


def test_a_gap_is_the_distance_in_either_direction_and_nan_stays() -> None:
    sampled, found = torch.tensor([-1.0, -1.0, -2.0, -1.0]), torch.tensor([-1.5, -0.25, -2.0, math.nan])
    assert sampling_gaps(sampled, found).tolist()[:3] == [0.5, 0.75, 0.0]
    assert sampling_gaps(sampled, found)[3].isnan()
    assert sampling_gaps(sampled, found, 0.5)[3].isnan()


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9])
def test_what_normalising_over_a_nucleus_explains_is_no_gap_and_nothing_more_is_left_out(top_p) -> None:
    full = torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(0)
    falling = full.sort(descending=True).values
    kept = falling[falling.exp().cumsum(0) - falling.exp() < top_p]
    over_nucleus = kept.log_softmax(0)
    assert (over_nucleus - kept).max() > 0.01
    assert sampling_gaps(over_nucleus, kept, top_p).max() <= 1e-15
    wrong = math.log(1 / top_p) + 0.25
    assert sampling_gaps(over_nucleus, over_nucleus - wrong, top_p).tolist() == pytest.approx([0.25] * len(kept))
    assert sampling_gaps(over_nucleus, over_nucleus + 0.25, top_p).tolist() == pytest.approx([0.25] * len(kept))


def test_a_token_has_the_choice_that_its_probability_leaves() -> None:
    assert open_choice(torch.tensor([0.25, 1.0]).log()).tolist() == pytest.approx([0.751, 0.001])
