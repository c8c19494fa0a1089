"""The loss of a token: its Triton form has a branch for each kind, and equals the formula."""

import pytest
import torch
import triton
import triton.language as tl

from cfa_kernels.loss.token_loss import (
    KL_ESTIMATORS,
    LOG_RATIO_MAX,
    PolicyOptions,
    Tokens,
    token_terms,
    token_terms_triton,
)
from cfa_kernels.loss.types import LOSS_TYPES

BY_TOKEN = sorted({kind.token_loss for kind in LOSS_TYPES.values() if "token" in kind.levels})
BY_TOKEN = [kind for kind in BY_TOKEN if not PolicyOptions(kind).joins_tokens]  # others have no Triton form


@triton.jit
def one_token_kernel(
    tokens, out, low, high, delta, beta, sapo_pos, sapo_neg, log_ratio_max,
    LOSS_TYPE: tl.constexpr, CORRECT_KL: tl.constexpr, KL: tl.constexpr,
):  # fmt: skip
    row = tokens + tl.program_id(0) * 5
    loss, slope, ratio, kl, clip = token_terms_triton(
        tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4),
        low, high, delta, beta, sapo_pos, sapo_neg, log_ratio_max, LOSS_TYPE, True, CORRECT_KL, KL,
    )  # fmt: skip
    place = out + tl.program_id(0) * 5
    tl.store(place, loss)
    tl.store(place + 1, slope)
    tl.store(place + 2, ratio)
    tl.store(place + 3, kl)
    tl.store(place + 4, clip)


def by_kernel(columns: torch.Tensor, options: PolicyOptions) -> torch.Tensor:
    out = torch.full_like(columns, torch.nan)
    one_token_kernel[(len(columns),)](
        columns, out, *options.bounds, options.delta, options.beta, options.sapo_temperature_pos,
        options.sapo_temperature_neg, LOG_RATIO_MAX, options.loss_type, options.use_bias_correction_kl,
        options.kl_estimator,
    )  # fmt: skip
    return out


@pytest.fixture
def columns(device):
    """Log-probs, old ones, advantages, weights and the reference's, of tokens in and beyond the clips."""
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(12, generator=generator) * 3
    old, reference = (logprobs + 0.8 * torch.randn(12, generator=generator) for _ in range(2))
    advantages, weights = torch.randn(12, generator=generator), 4 * torch.rand(12, generator=generator)
    reference[0] = logprobs[0]  # as of a first step
    return torch.stack([logprobs, old, advantages, weights, reference], 1).to(device)


@pytest.mark.parametrize(
    ("loss_type", "kl"), [(kind, "k3") for kind in BY_TOKEN] + [("dapo", kl) for kl in KL_ESTIMATORS]
)
def test_each_kind_has_its_branch_in_the_triton_form(loss_type, kl, columns):
    options = PolicyOptions(loss_type, beta=0.3, kl_estimator=kl, use_bias_correction_kl=True, delta=1.6)
    logprobs, old, advantages, weights, reference = columns.double().unbind(1)
    terms = token_terms(
        logprobs, logprobs - old, Tokens(old, advantages, weights, reference, None, torch.ones_like(old)), options
    )
    expected = torch.stack([terms.loss, terms.direct + terms.via_ratio, terms.ratio, terms.kl, terms.clip], 1)
    torch.testing.assert_close(by_kernel(columns, options).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [PolicyOptions("vespo"), PolicyOptions(kl_estimator="k4")], ids=["loss", "KL"])
def test_a_kind_without_a_branch_does_not_run_as_another(options, columns):
    with pytest.raises(Exception, match="without a branch"):
        by_kernel(columns, options)
