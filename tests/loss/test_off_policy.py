"""Gaps and ratios between log-probs that tokens were sampled with and the learning policy's, and the loss's factors."""

import math

import pytest
import torch

from cfa_kernels.loss.off_policy import open_choice, sampling_gaps
from cfa_kernels.loss.options import CORRECTIONS
from tests.support.policy_problem import loss_and_gradient


def test_a_gap_is_the_distance_in_either_direction_and_nan_stays() -> None:
    sampled, found = torch.tensor([-1.0, -1.0, -2.0, -1.0]), torch.tensor([-1.5, -0.25, -2.0, math.nan])
    assert sampling_gaps(sampled, found).tolist()[:3] == [0.5, 0.75, 0.0]
    assert sampling_gaps(sampled, found)[3].isnan()


def test_a_token_has_the_choice_that_its_probability_leaves() -> None:
    assert open_choice(torch.tensor([0.25, 1.0]).log()).tolist() == pytest.approx([0.751, 0.001])


MODES = {
    "token_truncate": lambda ratio, low, high: ratio.clamp(low, high),
    "token_mask": lambda ratio, low, high: ratio.where((ratio >= low) & (ratio <= high), 0),
}


@pytest.mark.parametrize("mode", CORRECTIONS)
@pytest.mark.parametrize("on_policy", [False, True])
def test_rollouts_of_another_policy_are_corrected_as_the_hosts_do(mode, on_policy):
    """By autograd over the clipped loss and factors written out, as TRL and verl compute them before their loss."""
    torch.manual_seed(0)
    logprobs, mask = -torch.rand(4, 6, dtype=torch.float64), torch.ones(4, 6)
    mask[1, 4:] = 0
    shifts = torch.tensor([0.3, -0.3, 0.0, 0.0])[:, None]
    sampling = logprobs + shifts + 0.2 * torch.randn(4, 6).double()
    sampling[2, 1] = math.nan  # as a server gives for a token that it did not score: no correction
    old = None if on_policy else logprobs - 0.3 * torch.rand(4, 6).double()
    advantages, weights, low, high = torch.tensor([1.0, -0.5, 2.0, -1.0]), 2 * torch.rand(4, 6).double(), 0.8, 1.25
    own = logprobs.clone().requires_grad_()
    before = own.detach() if old is None else old
    gap = ((before - sampling) * mask).nan_to_num(nan=0.0)
    if mode == "geometric_mask":
        mean = (gap.sum(1, keepdim=True) / mask.sum(1, keepdim=True)).exp()
        factor = ((mean >= low) & (mean <= high)).double().expand(4, 6)
    else:
        level, _, kind = mode.partition("_")
        ratio = (gap.sum(1, keepdim=True).expand(4, 6) if level == "sequence" else gap).exp()
        factor = MODES[f"token_{kind}"](ratio, low, high)
    assert (factor != 1).any()
    ratio, signed = (own - before).exp(), advantages[:, None] * weights
    terms = -torch.minimum(ratio * signed, ratio.clamp(0.8, 1.28) * signed) * factor
    ref = logprobs + 0.1
    kl = (ref - own).exp() - (ref - own) - 1  # not corrected
    expected = ((terms + 0.1 * kl) * mask).sum() / mask.sum()
    (gradient,) = torch.autograd.grad(expected, own)
    options = {"weights": weights, "beta": 0.1, "ref_logprobs": ref, "sampling_logprobs": sampling}
    options |= {"sampling_mode": mode, "sampling_clip_min": low, "sampling_clip_max": high}
    loss, ours, metrics = loss_and_gradient(logprobs, old, advantages, mask, **options)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(ours, gradient)
    counted = mask.bool()
    judged = factor[counted] if mode.startswith("token") else factor[:, 0]
    torch.testing.assert_close(metrics["sampling/importance_sampling_ratio/mean"], judged.mean())
    torch.testing.assert_close(metrics["sampling/importance_sampling_ratio/max"], judged.max())
    gaps = (logprobs - sampling).abs()[counted]
    torch.testing.assert_close(metrics["sampling/sampling_logp_difference/mean"], gaps[~gaps.isnan()].mean())


def test_sequences_that_drifted_are_dropped_where_their_advantage_is_negative():
    logprobs, mask = torch.full((3, 2), -1.0, dtype=torch.float64), torch.ones(3, 2)
    sampling = logprobs + torch.tensor([[0.5, 0.1], [0.5, 0.1], [0.1, 0.1]])
    advantages = torch.tensor([-1.0, 1.0, -1.0])
    options = {"sampling_logprobs": sampling, "off_policy_mask_threshold": 0.2}
    _, gradient, metrics = loss_and_gradient(logprobs, None, advantages, mask, **options)
    torch.testing.assert_close(gradient, torch.tensor([[0.0] * 2, [-1 / 6] * 2, [1 / 6] * 2]).double())
    ratio = "sampling/importance_sampling_ratio"
    assert not any(name.startswith(ratio) for name in metrics)
    assert metrics["sampling/off_policy_mask/mean"] == pytest.approx(2 / 3)
    corrected = {"sampling_logprobs": sampling, "sampling_mode": "token_truncate", "sampling_clip_max": 9.0}
    for loss_type in ("dapo", "vespo"):  # TRL's figures are of the correction and of its weights, not of the mask
        both = [
            loss_and_gradient(logprobs, None, advantages, mask, loss_type=loss_type, **corrected | more)[2]
            for more in ({}, options)
        ]
        for name in (f"{ratio}/mean", f"{ratio}/min", *["vespo/phi_seq_mean"] * (loss_type == "vespo")):
            assert both[0][name] == both[1][name] > 0, name
