"""policy_loss on log-probs: derivatives, corner cases, denominators, clear errors."""

import math

import numpy as np
import pytest
import torch

from cfa_kernels.loss.options import LossOptions
from cfa_kernels.loss.policy import policy_loss
from cfa_kernels.loss.ragged import LossBatch
from cfa_kernels.rows import Rows
from tests.support.policy_problem import KINDS, loss_and_gradient

B, T = 4, 6
KIND = pytest.mark.parametrize(("loss_type", "importance_sampling_level"), KINDS)


def make(dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(B, T, generator=g, dtype=torch.float64) - 0.1
    return {
        "logprobs": logprobs.to(dtype),
        "old_logprobs": (logprobs + 0.4 * torch.randn(B, T, generator=g, dtype=torch.float64)).to(dtype),
        "advantages": torch.tensor([1.5, -0.5, 0.8, -1.1], dtype=dtype),
        "mask": torch.arange(T) < torch.tensor([6, 3, 1, 5])[:, None],
    }


def options_for(loss_type, **more):
    return {"loss_type": loss_type, "max_completion_length": 8, **more}


FACTORS = ("cispo", "cispo_two_sided", "dppo", "vespo")  # types with the ratio in a factor of log-probs


@pytest.mark.parametrize(
    ("loss_type", "importance_sampling_level", "corrected"),
    [
        (*kind, corrected)
        for kind in KINDS
        for corrected in ((False,) if kind[0] in FACTORS else (False, True))
        if kind[1] != "sequence_token"
    ],
)
def test_gradient_passes_gradcheck(loss_type, importance_sampling_level, corrected):
    data = {name: tensor[:2] for name, tensor in make().items()}  # an advantage of each sign, and padding
    weights = torch.rand(2, T, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    entropies = torch.rand(2, T, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ref = data["logprobs"] + 0.2
    current = data["logprobs"].detach()
    by_factor = loss_type in FACTORS

    def loss_of(logprobs, entropies):
        # the ratio in a factor of log-probs carries no gradient, so finite differences must not move it
        old = data["old_logprobs"] + (logprobs - current).detach() if by_factor else data["old_logprobs"]
        return policy_loss(  # weights differ at the sequence level too
            logprobs, old, data["advantages"], data["mask"], weights=weights, ref_logprobs=ref, beta=0.1, delta=1.5,
            use_bias_correction_kl=corrected, entropies=entropies, entropy_coef=0.3, validate=False,
            **options_for(loss_type, importance_sampling_level=importance_sampling_level),
        )[0]  # fmt: skip

    assert torch.autograd.gradcheck(
        loss_of, (current.clone().requires_grad_(), entropies.requires_grad_()), atol=1e-7, rtol=1e-6
    )


@KIND
def test_padding_never_leaks_into_loss_or_gradient(loss_type, importance_sampling_level):
    data = make()
    extras = {"weights": torch.full((B, T), 2.0), "ref_logprobs": data["logprobs"] - 0.1, "beta": 0.1}
    extras["entropies"] = torch.ones(B, T, dtype=torch.float64)
    options = options_for(loss_type, importance_sampling_level=importance_sampling_level, delta=2.0)
    extras["entropy_coef"] = 0.1
    mask = data["mask"].clone()
    mask[2] = False  # a whole row of padding, whose advantage is garbage too
    clean = loss_and_gradient(data["logprobs"], data["old_logprobs"], data["advantages"], mask, **extras, **options)
    for garbage in (math.nan, math.inf, -math.inf, 1e30):
        advantages = data["advantages"].clone()
        advantages[2] = garbage
        dirty = {
            name: torch.where(mask, tensor, garbage) if isinstance(tensor, torch.Tensor) else tensor
            for name, tensor in extras.items()
        }
        logprobs = torch.where(mask, data["logprobs"], garbage)
        old = torch.where(mask, data["old_logprobs"], garbage)
        loss, gradient, metrics = loss_and_gradient(logprobs, old, advantages, mask, **dirty, **options)
        torch.testing.assert_close(loss, clean[0], rtol=0, atol=0)
        torch.testing.assert_close(gradient, clean[1], rtol=0, atol=0)
        torch.testing.assert_close(metrics, clean[2], rtol=0, atol=0)
    assert torch.isfinite(clean[1]).all()
    assert (clean[1][~mask] == 0).all()
    nothing = torch.full((B, T), math.nan)
    loss, gradient, metrics = loss_and_gradient(nothing, None, nothing[:, 0], torch.zeros(B, T), **options)
    assert loss == 0
    assert not gradient.any()
    assert all(torch.isnan(value) for value in metrics.values())


@KIND
@pytest.mark.parametrize("shift", [100.0, -100.0])
def test_log_ratios_of_100_stay_finite(loss_type, importance_sampling_level, shift):
    data = make(torch.float16)
    loss, gradient, metrics = loss_and_gradient(
        data["logprobs"], data["logprobs"] - shift, data["advantages"], data["mask"],
        ref_logprobs=data["logprobs"] + shift, beta=0.1, use_bias_correction_kl=True,
        **options_for(loss_type, importance_sampling_level=importance_sampling_level),
    )  # fmt: skip
    assert torch.isfinite(loss)
    assert loss.dtype == torch.float32
    assert torch.isfinite(gradient).all()
    assert all(torch.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("loss_type", ["dapo", "sapo"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_nothing_beyond_the_cut_off_has_a_gradient(loss_type, beta):
    logprobs = torch.full((1, 3), -1.0, dtype=torch.float64)
    ref = logprobs + torch.tensor([[100.0, 0.0, 0.0]])  # the first token's KL, and every token's ratio, is cut off
    options = {"beta": beta, "use_bias_correction_kl": True} if beta else {}
    sure = torch.tensor([[0.0, -1.0, 0.0]], dtype=torch.float64)
    loss, gradient, _ = loss_and_gradient(
        logprobs, logprobs - 100, sure, torch.ones(1, 3), ref_logprobs=ref, loss_type=loss_type, **options
    )
    assert torch.isfinite(loss)
    assert (gradient == 0).all()


@pytest.mark.parametrize(("loss_type", "importance_sampling_level"), [kind for kind in KINDS if kind[0] != "bnpo"])
def test_micro_batches_given_the_steps_totals_add_up_to_the_step(loss_type, importance_sampling_level):
    data = make()
    options = options_for(
        loss_type, importance_sampling_level=importance_sampling_level, num_items_in_batch=data["mask"].sum(),
        num_sequences_in_batch=B, entropy_coef=0.2,
    )  # fmt: skip
    entropies = torch.rand(B, T, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    tensors = [data[name] for name in ("logprobs", "old_logprobs", "advantages", "mask")]
    whole = loss_and_gradient(*tensors, entropies=entropies, **options)
    parts = [
        loss_and_gradient(*chunk[:-1], entropies=chunk[-1], **options)
        for chunk in zip(*(tensor.split((1, 3)) for tensor in [*tensors, entropies]), strict=True)
    ]
    torch.testing.assert_close(sum(part[0] for part in parts), whole[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), whole[1], rtol=1e-12, atol=1e-14)


def bad(name, row, token, value):
    def spoil(data):
        data[name] = data[name].clone()
        data[name][row, token] = value

    return spoil


def set_to(name, value):
    return lambda data: data.update({name: value})


def correct(mode, **options):
    return lambda data: data.update({"sampling_mode": mode, "sampling_logprobs": -torch.ones(B, T), **options})


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (bad("logprobs", 1, 2, math.nan), ValueError, "logprobs must be finite.*row 1, token 2 is nan"),
        (bad("old_logprobs", 3, 0, -math.inf), ValueError, "old_logprobs must be finite.*row 3, token 0 is -inf"),
        (bad("weights", 0, 1, -0.5), ValueError, "weights must be >= 0.*row 0, token 1 is -0.5"),
        (bad("mask", 0, 1, 0.5), ValueError, "mask must be 0 or 1; row 0, token 1 is 0.5"),
        (set_to("advantages", torch.tensor([0.0, math.nan, 0, 0])), ValueError,
         "advantages must be finite.*row 1, token 0 is nan"),
        (bad("entropies", 3, 1, math.inf), ValueError, "entropies must be finite.*row 3, token 1 is inf"),
        (set_to("advantages", torch.zeros(3)), ValueError,
         r"advantages must have shape \(4,\) or \(4, 6\), got \(3,\)"),
        (set_to("logprobs", torch.zeros(6)), ValueError, r"logprobs must be \(B, T\), got shape \(6,\)"),
        (set_to("logprobs", torch.zeros(4, 6).long()), TypeError, "logprobs must be floating point, got torch.int64"),
        (set_to("weights", [1.0]), TypeError, "weights must be a tensor, got list"),
        (set_to("loss_type", "gspo"), ValueError, "loss_type must be one of .*'sapo'.*got 'gspo'"),
        (set_to("loss_type", "gmpo"), ValueError, "level must be 'sequence' or 'sequence_token' with loss_type='gmpo'"),
        (set_to("importance_sampling_level", "word"), ValueError, "importance_sampling_level must be .* got 'word'"),
        (set_to("loss_type", "dr_grpo"), ValueError, "dr_grpo' needs max_completion_length > 0, got None"),
        (set_to("ref_logprobs", None), ValueError, "beta=0.1 needs ref_logprobs"),
        (set_to("entropies", None), ValueError, "entropy_coef=0.1 needs entropies"),
        (set_to("epsilon", "0.2"), ValueError, "epsilon must be finite and at least 0, got '0.2'"),
        *((set_to(name, None), ValueError, f"{name} must be finite and at least 0, got None")
          for name in ("epsilon", "epsilon_high", "beta")),
        *((set_to(name, torch.ones(2)), ValueError, rf"{name} must be .*, got a tensor of shape \(2,\)")
          for name in ("num_items_in_batch", "num_sequences_in_batch", "entropy_coef", "epsilon")),
        (set_to("max_completion_length", "5"), ValueError, "max_completion_length must be .* at least 0, got '5'"),
        (set_to("advantages", None), TypeError, "advantages must be a tensor, got NoneType"),
        (set_to("entropy_coef", math.nan), ValueError, "entropy_coef must be a finite number, got nan"),
        (set_to("epsilon_high", 1e300), ValueError, r"epsilon_high must be finite and at least 0, got 1e\+300"),
        (set_to("delta", 0.0), ValueError, r"delta must be in \[1e-38, 1e38\], got 0.0"),
        *((set_to("num_sequences_in_batch", kind(value)), ValueError, rf"num_sequences_in_batch must be .*got {value}")
          for kind in (float, np.float32, torch.tensor) for value in (0.0, math.nan)),
        (set_to("num_items_in_batch", torch.tensor(-2.0)), ValueError, "num_items_in_batch must be .* got -2"),
        (set_to("num_sequences_in_batch", "5"), ValueError, "num_sequences_in_batch must be in .*, got '5'"),
        (set_to("epsilom", 0.1), TypeError, "a policy loss has no option 'epsilom'"),
        (set_to("loss_options", LossOptions()), TypeError, "loss_options or single options, not both, got"),
        (set_to("off_policy_mask_threshold", 0.5), ValueError, "threshold=0.5 needs sampling_logprobs"),
        (set_to("sampling_clip_max", 2.0), ValueError, "sampling_clip_max are not read without a sampling_mode"),
        (set_to("sampling_mode", "token_mask"), ValueError, "sampling_mode='token_mask' needs sampling_logprobs"),
        (correct("mask"), ValueError, "sampling_mode must be one of .*, got 'mask'"),
        (correct("token_mask", sampling_clip_min=2.0, sampling_clip_max=1.0), ValueError,
         "sampling_clip_min must not exceed sampling_clip_max, got 2.0 and 1.0"),
        (correct("token_mask", sampling_clip_max="2"), ValueError, r"sampling_clip_max must be in \[.*\], got '2'"),
        (correct("token_truncate", importance_sampling_level="sequence"), ValueError, "differs from token to token"),
        (correct("sequence_mask", loss_type="vespo"), ValueError, "sampling_mode='sequence_mask' corrects a row"),
        (set_to("logprobs", torch.zeros(4, 0)), ValueError, r"at least one row and one token, got \(B, T\) = \(4, 0\)"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_naming_argument_row_and_value(spoil, error, words):
    data = make()
    data |= {"mask": data["mask"].double(), "weights": torch.ones(B, T), "ref_logprobs": data["logprobs"] - 0.1}
    data |= {"entropies": torch.ones(B, T), "entropy_coef": 0.1, "beta": 0.1}
    policy_loss(**data)
    spoil(data)
    with pytest.raises(error, match=words):
        policy_loss(**data)


def test_a_second_derivative_is_that_of_the_formula():
    data = make()
    data["logprobs"].requires_grad_()
    options = {"beta": 0.1, "ref_logprobs": data["logprobs"].detach() + 0.2, "loss_type": "sapo"}
    loss_of = lambda logprobs: policy_loss(**data | {"logprobs": logprobs}, **options)[0]  # noqa: E731
    assert torch.autograd.gradgradcheck(loss_of, (data["logprobs"],))


@pytest.mark.parametrize("function", [policy_loss, LossBatch.of])
def test_weights_that_differ_within_a_row_are_refused_where_the_row_has_one_ratio(function):
    mask, weights = make()["mask"], torch.tensor([0.5, 1.0, 2.0, 0.0])[:, None].repeat(1, T)
    weights[~mask] = 7.0  # tokens that are not counted do not decide

    def loss(**options):
        if function is policy_loss:
            return policy_loss(torch.zeros(B, T), None, torch.ones(B), mask, weights=weights, **options)
        rows = Rows([torch.zeros(1).long()] * B, [torch.zeros(T).long()] * B)
        return LossBatch.of(rows, advantages=torch.ones(B), weights=list(weights), mask=list(mask), **options)

    loss(importance_sampling_level="sequence")
    weights[3, 4] = 1.5  # the weight of an answer at the end
    with pytest.raises(ValueError, match=r"weights must be equal within a row .*row 3 holds 0.0 to 1.5"):
        loss(importance_sampling_level="sequence")
    loss(importance_sampling_level="sequence_token")
    loss(importance_sampling_level="sequence", loss_type="cispo")


KLS = {"k1": lambda gap: -gap, "k2": lambda gap: gap**2 / 2, "k3": lambda gap: gap.exp() - gap - 1, "abs": torch.abs}


@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("loss_type", ["dppo", "ipo", "reinforce", "cispo_two_sided", "GSPO-token"])
def test_losses_are_those_that_their_users_write(loss_type, kl):
    torch.manual_seed(0)
    logprobs, old = -2 * torch.rand(4, 6, dtype=torch.float64), -2 * torch.rand(4, 6, dtype=torch.float64)
    advantages, weights = torch.tensor([-1.0, 0.5, 2.0, -1.0])[:, None].double(), 2 * torch.rand(4, 6).double()
    own, ref = logprobs.clone().requires_grad_(), logprobs + 0.3 * torch.randn(4, 6).double()
    ratio, signed = (logprobs - old).exp(), advantages * weights
    if loss_type == "dppo":  # the mask of verl's dppo_tv and prime-rl: only what moves further the same way is cut
        moved = logprobs.exp() - old.exp()
        keep = ~torch.where(advantages > 0, moved > 0.15, moved < -0.1)
        assert 0 < keep.double().mean() < 1
        terms = -ratio.clamp(max=1.3) * own * keep * signed
    elif loss_type == "ipo":  # prime-rl's, but for its one bound on both sides
        keep = ((logprobs.exp() - old.exp()) <= 0.15) & ((logprobs.exp() - old.exp()) >= -0.1)
        assert (~keep & (advantages * (logprobs - old) < 0)).any()  # which dppo keeps
        terms = -(own - old).exp() * keep * signed
    elif loss_type == "cispo_two_sided":  # verl's `cispo`
        keep = ~((ratio < 0.9) & (advantages < 0) | (ratio > 1.15) & (advantages > 0))
        terms = -ratio.clamp(0.9, 1.15) * own * signed
    elif loss_type == "GSPO-token":  # the paper's form, `sg[s] * pi / sg[pi]` in place of the ratio
        ratio = (logprobs - old).mean(1, keepdim=True).exp() * (own - own.detach()).exp()
        terms = -torch.minimum(ratio * signed, ratio.clamp(0.9, 1.15) * signed)
        keep = ~((ratio < 0.9) & (advantages < 0) | (ratio > 1.15) & (advantages > 0))
        assert 0 < keep.double().mean() < 1
    else:
        terms = -own * signed
    expected = (terms + 0.1 * KLS[kl](ref - own)).mean()
    (gradient,) = torch.autograd.grad(expected, own)
    options = {"weights": weights, "loss_type": loss_type, "epsilon": 0.1, "epsilon_high": 0.15, "delta": 1.3}
    if loss_type == "GSPO-token":
        options |= {"loss_type": "dapo", "importance_sampling_level": "sequence_token", "delta": None}
    options |= {"beta": 0.1, "ref_logprobs": ref, "kl_estimator": kl}
    loss, ours, metrics = loss_and_gradient(logprobs, old, advantages[:, 0], torch.ones(4, 6), **options)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(ours, gradient)
    if loss_type != "reinforce":
        torch.testing.assert_close(metrics["clip_ratio/region_mean"], (~keep).float().mean())
