"""logits_policy_loss and linear_policy_loss against float64, in every precision, on the inputs that break kernels."""

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cfa_kernels.losses import (
    LEVELS,
    LOSS_TYPES,
    contributing_rows,
    linear_policy_loss,
    logits_policy_loss,
    policy_loss,
)
from cfa_kernels.ops import policy_rows
from cfa_kernels.ops.linear_policy_loss import linear_policy_loss_op
from cfa_kernels.ops.logits_policy_loss import (
    logits_policy_loss_inplace_op,
    logits_policy_loss_op,
    scale_rows_inplace_op,
    scale_rows_op,
)
from cfa_kernels.ops.policy_loss import PolicyOptions
from cfa_kernels.ops.row_softmax import Softmax
from tests.ops.budget import assert_within_budget

B, T, V, H = 3, 4, 37, 24
LENGTHS = torch.tensor([4, 2, 3])
COUNTED = 9
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": {"weights": True},
    "on-policy": {"old": False, "weights": True},
    "delta": {"delta": 1.4, "token_advantages": True},
    "low-delta": {"delta": 1.02, "token_advantages": True},
    "kl": {"beta": 0.1, "weights": True},
    "corrected-kl": {"beta": 0.1, "use_bias_correction_kl": True},
    "entropy": {"entropy_coef": 0.2, "temperature": 0.7},
    "softcap": {"softcap": 4.0, "temperature": 1.5, "logit_scale": 0.7, "weights": True},
    "all": {
        "weights": True, "delta": 1.4, "beta": 0.1, "use_bias_correction_kl": True, "entropy_coef": 0.2,
        "temperature": 0.8, "softcap": 6.0, "token_advantages": True,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """torch.empty gives nan, so that an output nobody wrote shows."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def tiles_of_32(vocabulary: int, element_size: int, *, hip: bool = False) -> dict[str, int]:
    """Launch options with which rows of a few dozen logits take several tiles and end in a ragged one."""
    return {"BLOCK": 32, "VECTOR": 16 // element_size, "num_warps": 1}


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(policy_rows, "launch_options", tiles_of_32)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(
    dtype: torch.dtype = torch.float64, device: Any = "cpu", *, b: int = B, t: int = T, v: int = V, **features: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors, all exact in `dtype`, and keyword options. Ratios keep clear of the clips' edges.

    `hidden @ head.T + bias` has logits of standard deviation about 2.
    """
    hidden, head = normal(b, t, H, seed=0), 2 * normal(v, H, seed=1) / math.sqrt(H)
    tensors: dict[str, Any] = {"hidden": hidden, "head": head, "bias": normal(v, seed=2)}
    tensors = {name: tensor.to(dtype).to(device) for name, tensor in tensors.items()}
    exact = [tensors[name].double() for name in ("hidden", "head", "bias")]
    logits = (exact[0] @ exact[1].T + exact[2]).to(dtype)
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(v, (b, t), generator=generator)
    targets[0, 0], targets[-1, 0] = 0, v - 1
    z = exact[0] @ exact[1].T + exact[2]
    cap, temperature = features.get("softcap"), features.get("temperature", 1.0)
    z = z * features.get("logit_scale", 1.0)
    z = (z if cap is None else cap * torch.tanh(z / cap)) / temperature
    logprobs = z.log_softmax(-1).gather(-1, targets.to(device)[..., None])[..., 0]
    shifts = torch.tensor([-0.6, 0.6, 0.05, -0.05], dtype=torch.float64).repeat(b, t)[:, :t]
    shifts[1::2] *= -1  # both signs of the advantage meet ratios below, inside and above the clip
    shift = shifts.to(device)
    advantages = torch.tensor([1.0, -0.8, 0.5, -1.2, 0.0] * b, dtype=torch.float64)[:b]
    lengths = LENGTHS.repeat(b)[:b].clamp(max=t)
    tensors |= {
        "logits": logits,
        "targets": targets.to(device),
        "old": logprobs - shift if features.get("old", True) else None,
        "advantages": (normal(b, t, seed=8) if features.get("token_advantages") else advantages).to(device),
        "mask": (torch.arange(t) < lengths[:, None]).to(device),
    }
    keys = ("delta", "beta", "use_bias_correction_kl", "entropy_coef", "temperature", "softcap", "logit_scale")
    options = {key: features[key] for key in keys if key in features}
    options["max_completion_length"] = 7
    if features.get("weights"):
        kept = torch.rand(b, t, generator=generator) > 0.2
        options["weights"] = (3 * torch.rand(b, t, generator=generator) * kept).to(device)
    if features.get("beta"):
        options["ref_logprobs"] = logprobs + 0.3 * normal(b, t, seed=6).to(device)
    return tensors, options


def of_logits(tensors: dict[str, Any], **options: Any) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    logits = tensors["logits"].detach().clone()
    if logits.is_floating_point():
        logits.requires_grad_()
    loss, metrics = logits_policy_loss(
        logits, tensors["targets"], tensors["old"], tensors["advantages"], tensors["mask"], **options
    )
    loss.backward()
    return loss.detach(), [logits.grad], metrics


def of_hidden(
    tensors: dict[str, Any], *, with_bias: bool = True, **options: Any
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    names = ("hidden", "head", "bias") if with_bias else ("hidden", "head")
    leaves = {name: tensors[name].detach().clone().requires_grad_() for name in names}
    loss, metrics = linear_policy_loss(
        leaves["hidden"], leaves["head"], tensors["targets"], tensors["old"], tensors["advantages"], tensors["mask"],
        bias=leaves.get("bias"), **options,
    )  # fmt: skip
    loss.backward()
    return loss.detach(), [leaf.grad for leaf in leaves.values()], metrics


def plain(
    tensors: dict[str, Any],
    start: str,
    dtype: torch.dtype,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    entropy_coef: float = 0.0,
    **options: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """The same maths as a user would write it: logits in `dtype`, log_softmax in float32 or better, autograd."""
    names = start_of_names(of_logits if start == "logits" else of_hidden)
    leaves = [tensors[name].detach().to(dtype).requires_grad_() for name in names]
    logits = leaves[0] if start == "logits" else leaves[0] @ leaves[1].T + leaves[2]
    logits = logit_scale * logits.to(torch.promote_types(dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = (logits / temperature).log_softmax(-1)
    mask = tensors["mask"]
    chosen = logp.gather(-1, torch.where(mask, tensors["targets"], 0)[..., None])[..., 0]
    entropies = -(logp.exp() * logp).sum(-1)
    loss, metrics = policy_loss(
        chosen, tensors["old"], tensors["advantages"], mask, entropies=entropies, entropy_coef=entropy_coef, **options
    )
    loss.backward()
    return loss.detach(), [leaf.grad for leaf in leaves], metrics


def on_gpu(test):
    """Run the test on a GPU alone."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test))


FORM = pytest.mark.parametrize("form", [of_logits, of_hidden])


def start_of(form: Callable[..., Any]) -> str:
    return "logits" if form is of_logits else "hidden"


def start_of_names(form: Callable[..., Any]) -> tuple[str, ...]:
    return ("logits",) if form is of_logits else ("hidden", "head", "bias")


def assert_same(ours, expected, **tolerance):
    torch.testing.assert_close(ours[0], expected[0], **tolerance)
    for gradient, other in zip(ours[1], expected[1], strict=True):
        torch.testing.assert_close(gradient, other, **tolerance)


# The PyTorch form is the truth


@FORM
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("feature", FEATURES)
def test_forms_agree_with_policy_loss_on_log_probs(form, loss_type, level, feature):
    tensors, options = problem(**FEATURES[feature])
    options |= {"loss_type": loss_type, "importance_sampling_level": level, "num_sequences_in_batch": 5}
    ours = form(tensors, compute_entropy=True, **options)
    expected = plain(tensors, start_of(form), torch.float64, **options)
    assert_same(ours, expected, rtol=1e-11, atol=1e-13)
    assert set(ours[2]) == set(expected[2])
    for name, metric in expected[2].items():
        torch.testing.assert_close(ours[2][name], metric, rtol=1e-11, atol=1e-13, msg=name)


@pytest.mark.parametrize("level", LEVELS)
def test_reference_gradients_pass_gradcheck(level):
    tensors, options = problem(b=2, t=2, v=5, **FEATURES["all"])
    options["importance_sampling_level"] = level
    rest = (tensors["targets"], tensors["old"], tensors["advantages"], tensors["mask"])
    logits, *leaves = (tensors[name].clone().requires_grad_() for name in ("logits", "hidden", "head", "bias"))
    tolerance = {"rtol": 1e-6, "atol": 1e-8}
    assert torch.autograd.gradcheck(lambda z: logits_policy_loss(z, *rest, **options)[0], (logits,), **tolerance)
    assert torch.autograd.gradcheck(
        lambda hidden, head, bias: linear_policy_loss(hidden, head, *rest, bias=bias, **options)[0], leaves, **tolerance
    )


# The kernels against the truth, in every precision


@pytest.mark.parametrize(
    ("form", "dtype", "feature", "loss_type", "level"),
    [
        (of_logits, torch.float32, "on-policy", "grpo", "token"),
        (of_logits, torch.float32, "delta", "bnpo", "token"),
        (of_logits, torch.float32, "low-delta", "dapo", "token"),
        (of_logits, torch.float32, "weights", "cispo", "token"),
        (of_logits, torch.float32, "corrected-kl", "sapo", "token"),
        (of_logits, torch.float32, "all", "dapo", "token"),
        (of_logits, torch.float32, "all", "grpo", "sequence"),
        (of_logits, torch.bfloat16, "entropy", "dr_grpo", "token"),
        (of_logits, torch.bfloat16, "all", "dapo", "token"),
        (of_logits, torch.float16, "softcap", "dapo", "sequence"),
        (of_hidden, torch.float32, "on-policy", "grpo", "token"),
        (of_hidden, torch.float32, "all", "grpo", "sequence"),
        (of_hidden, torch.bfloat16, "kl", "luspo", "sequence"),
        (of_hidden, torch.bfloat16, "all", "dapo", "token"),
        (of_hidden, torch.float16, "all", "grpo", "token"),
    ],
)
def test_kernels_stay_within_the_error_budget(form, dtype, feature, loss_type, level, device, small_tiles):
    tensors, options = problem(dtype, device, **FEATURES[feature])
    options |= {"loss_type": loss_type, "importance_sampling_level": level}
    if loss_type == "cispo":
        options["epsilon_high"] = 1.4
    ours = form(tensors, backend="triton", compute_entropy=True, **options)
    exact = plain(tensors, start_of(form), torch.float64, **options)
    torch.testing.assert_close(ours[0], exact[0].float(), rtol=1e-5, atol=2e-6)  # float32 maths whatever the dtype
    # Two ways to do the same maths in this precision; the luck of one is not the measure.
    low = [plain(tensors, start_of(form), dtype, **options)[1], form(tensors, backend="torch", **options)[1]]
    for gradient, reference, *others in zip(ours[1], exact[1], *low, strict=True):
        assert gradient.dtype == dtype
        assert_within_budget(gradient, max(others, key=lambda g, r=reference: (g.double() - r).abs().max()), reference)
    for name, metric in exact[2].items():
        torch.testing.assert_close(ours[2][name], metric.float(), rtol=1e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize(
    ("v", "dtype"),
    [(2, torch.float32), (3, torch.bfloat16), (31, torch.bfloat16), (32, torch.float32), (33, torch.bfloat16),
     (65, torch.float32)],
)  # fmt: skip
def test_vocabularies_that_do_not_fill_their_last_tile(v, dtype, device, small_tiles):
    tensors, options = problem(dtype, device, v=v, entropy_coef=0.1)
    ours = of_logits(tensors, backend="triton", **options)
    assert_within_budget(
        ours[1][0],
        plain(tensors, "logits", dtype, **options)[1][0],
        plain(tensors, "logits", torch.float64, **options)[1][0],
    )


def test_a_vocabulary_of_262147_as_shipped(device):
    tensors, options = problem(torch.float32, device, b=1, t=2, v=262_147)
    ours = of_logits(tensors, backend="triton", **options)
    exact = of_logits({**tensors, "logits": tensors["logits"].double()}, backend="torch", **options)
    assert_same(ours, (exact[0].float(), [exact[1][0].float()]), rtol=1e-5, atol=1e-8)


# Inputs that break kernels of this kind


EXTREME = [
    pytest.param(torch.full((V,), -50.0), id="all negative"),
    pytest.param(torch.linspace(-1e4, 1e4, V), id="up to 1e4"),
    pytest.param(torch.full((V,), -1e4).index_fill(0, torch.tensor([V - 1]), 1e4), id="peak at the end"),
    pytest.param(torch.linspace(0, 1, V) + 8192, id="far from zero"),
    pytest.param(torch.zeros(V).index_fill(0, torch.arange(9), -math.inf), id="forbidden tokens"),
]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("logits", EXTREME)
@pytest.mark.parametrize("target", [V - 1, 20, 9])
def test_extreme_logits_give_finite_and_exact_results(logits, target, backend, device, small_tiles):
    tensors = {
        "logits": logits.expand(1, 2, V).to(device),
        "targets": torch.tensor([[target, V - 2]], device=device),
        "old": torch.full((1, 2), -3.0, device=device),
        "advantages": torch.tensor([0.5], device=device),
        "mask": torch.ones(1, 2, device=device),
    }
    options = {"compute_entropy": True, "entropy_coef": 0.1, "loss_type": "sapo"}
    loss, (gradient,), metrics = of_logits(tensors, backend=backend, **options)
    exact = of_logits({**tensors, "logits": tensors["logits"].double()}, backend="torch", **options)
    torch.testing.assert_close(loss, exact[0].float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, exact[1][0].float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(metrics["entropy"], exact[2]["entropy"].float(), rtol=1e-5, atol=1e-5)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(("backend", "shift"), [("torch", -4096.0), ("torch", 1024.0), ("triton", 4096.0)])
def test_a_common_shift_of_the_logits_changes_nothing(backend, shift, device, small_tiles):
    tensors, options = problem(torch.float32, device, entropy_coef=0.1)
    tensors["logits"] = tensors["logits"].mul(64).round() / 64  # so that the shifted logits are exact too
    shifted = {**tensors, "logits": tensors["logits"] + shift}
    ours = of_logits(shifted, backend=backend, **options)
    assert_same(ours, of_logits(tensors, backend=backend, **options), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("margin", [0.0, 8.0, 12.0])
def test_the_targets_gradient_is_right_when_its_probability_is_about_one(backend, margin, device, small_tiles):
    logits = torch.zeros(1, 1, V, device=device)
    logits[..., 11] = math.log(V - 1) + margin
    tensors = {
        "logits": logits,
        "targets": torch.tensor([[11]], device=device),
        "old": None,
        "advantages": torch.ones(1, device=device),
        "mask": torch.ones(1, 1, device=device),
    }
    _, (gradient,), _ = of_logits(tensors, backend=backend)
    rest = 1 / (1 + math.exp(margin))  # probability of all other tokens together
    torch.testing.assert_close(gradient[0, 0, 11].item(), -rest, rtol=0, atol=2e-7)
    torch.testing.assert_close(gradient[0, 0, 0].item(), rest / (V - 1), rtol=1e-5, atol=0)
    assert abs(gradient.sum().item()) < 4e-7


@FORM
@pytest.mark.parametrize(("backend", "level"), [("torch", "token"), ("torch", "sequence"), ("triton", "token")])
def test_padding_may_hold_anything(form, backend, level, device, small_tiles):
    tensors, options = problem(torch.float32, device, **FEATURES["all"])
    options["importance_sampling_level"] = level
    clean = form(tensors, backend=backend, **options)
    padding = ~tensors["mask"]
    dirty = {**tensors, "targets": torch.where(padding, -100, tensors["targets"])}
    for name in ("logits", "hidden"):
        dirty[name] = tensors[name].masked_fill(padding[..., None], math.nan)
    for name in ("old", "advantages"):
        dirty[name] = tensors[name].masked_fill(padding, math.nan)
    spoiled = {
        name: value.masked_fill(padding, math.nan) if isinstance(value, Tensor) else value
        for name, value in options.items()
    }
    if form is of_hidden:
        spoiled["drop_inactive"] = False
    ours = form(dirty, backend=backend, **spoiled)
    assert_same(ours, clean, rtol=1e-6, atol=1e-7)
    assert (ours[1][0][padding] == 0).all()


@FORM
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("level", LEVELS)
def test_all_rows_masked_and_one_valid_row(form, backend, level, device):
    tensors, options = problem(torch.float32, device, weights=True)
    options["importance_sampling_level"] = level
    nothing = {**tensors, "mask": torch.zeros_like(tensors["mask"])}
    loss, gradients, metrics = form(nothing, backend=backend, **options)
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients)
    assert all(torch.isfinite(metric) for metric in metrics.values())
    one = nothing["mask"].clone()
    one[1, 1] = True
    single = {**tensors, "mask": one}
    exact = plain(single, start_of(form), torch.float64, **options)
    assert_same(form(single, backend=backend, **options), (exact[0].float(), [g.float() for g in exact[1]]))


@FORM
@pytest.mark.parametrize("shift", [100.0, -100.0, math.inf])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo"])
def test_log_ratios_far_out_stay_finite_and_equal_the_reference(form, shift, loss_type, device):
    tensors, options = problem(torch.float32, device, beta=0.1, use_bias_correction_kl=True)
    tensors["old"] = tensors["old"] - shift
    options["ref_logprobs"] = options["ref_logprobs"] + (shift if math.isfinite(shift) else 1)
    options |= {"validate": False, "loss_type": loss_type}
    reference = form(tensors, backend="torch", **options)
    for value in (reference[0], *reference[1]):
        assert torch.isfinite(value).all()
    if form is of_logits:
        assert_same(form(tensors, backend="triton", **options), reference, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_clipped_or_weightless_row_gets_exact_zeros(backend, device, small_tiles):
    tensors, options = problem(torch.bfloat16, device)
    tensors["old"] = torch.full_like(tensors["old"], -60.0)  # ratios far above the clip
    tensors["advantages"] = torch.tensor([1.0, 0.0, 1.0], device=device)
    _, (gradient,), metrics = of_logits(tensors, backend=backend, **options)
    assert (gradient == 0).all()
    assert metrics["clip_ratio/high_mean"] == (COUNTED - 2) / COUNTED


@pytest.mark.parametrize(("backend", "inplace"), [("torch", False), ("torch", True), ("triton", True)])
def test_logits_of_any_strides(backend, inplace, device, small_tiles):
    tensors, options = problem(torch.float32, device, entropy_coef=0.1)
    expected = of_logits(tensors, backend=backend, **options)
    z = tensors["logits"]
    wide = torch.full((B, T + 1, V + 11), math.nan, device=device)  # columns beyond V that nobody may read
    wide[:, :-1, :V] = z
    for view in (
        wide[:, :-1, :V],
        z.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        z.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        assert view.stride() != z.stride()
        logits = view.detach().requires_grad_()
        loss, _ = logits_policy_loss(
            logits, tensors["targets"].t().contiguous().t(), tensors["old"].t().contiguous().t(),
            tensors["advantages"].repeat_interleave(2)[::2], tensors["mask"].t().contiguous().t(),
            backend=backend, inplace=inplace, **options,
        )  # fmt: skip
        loss.backward()
        assert_same((loss.detach(), [logits.grad.clone()]), expected, rtol=1e-6, atol=1e-7)
    assert torch.isnan(wide[..., V:]).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("form", [of_logits, of_hidden])
def test_every_other_input_of_any_strides(form, backend, device):
    """One row: flattening a strided row keeps its stride, which a kernel that counts on 1 would not notice."""
    tensors, options = problem(torch.float32, device, b=1, **FEATURES["all"])
    options["weights"] += 0.5
    expected = form(tensors, backend=backend, **options)

    def every_second(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        spread = torch.full((*value.shape, 2), 1, dtype=value.dtype, device=device)
        spread[..., 0] = value
        return spread[..., 0]

    strided = {name: every_second(value) for name, value in tensors.items()}
    assert strided["targets"].stride() == (2 * T, 2)
    options = {name: every_second(value) for name, value in options.items()}
    leaves = [strided[name].detach().requires_grad_() for name in start_of_names(form)]
    rest = (strided["targets"], strided["old"], strided["advantages"], strided["mask"])
    if form is of_logits:
        loss, _ = logits_policy_loss(*leaves, *rest, backend=backend, **options)
    else:
        loss, _ = linear_policy_loss(*leaves[:2], *rest, bias=leaves[2], backend=backend, **options)
    loss.backward()
    assert_same((loss.detach(), [leaf.grad for leaf in leaves]), expected, rtol=1e-5, atol=1e-6)


# In place


@pytest.mark.parametrize(
    ("backend", "level", "dtype", "upstream"),
    [
        ("torch", "token", torch.float16, 0.25),
        ("torch", "sequence", torch.float32, 1.0),
        ("triton", "token", torch.bfloat16, 1.0),
        ("triton", "token", torch.float32, 0.25),
        ("triton", "sequence", torch.float16, 1.0),
    ],
)
def test_in_place_gives_the_same_gradient_in_the_logits_memory(backend, level, dtype, upstream, device, small_tiles):
    tensors, options = problem(dtype, device, **FEATURES["all"])
    options |= {"importance_sampling_level": level, "backend": backend}
    rest = (tensors["targets"], tensors["old"], tensors["advantages"], tensors["mask"])
    logits = tensors["logits"].clone().requires_grad_()
    (upstream * logits_policy_loss(logits, *rest, **options)[0]).backward()
    source = tensors["logits"].clone().requires_grad_()
    working = source * 1
    loss, _ = logits_policy_loss(working, *rest, inplace=True, **options)
    (gradient,) = torch.autograd.grad(upstream * loss, working, retain_graph=True)
    assert gradient.data_ptr() == working.data_ptr()
    torch.testing.assert_close(gradient, logits.grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, working)


def test_in_place_refuses_logits_that_someone_else_has_saved(device):
    tensors, options = problem(torch.float32, device)
    source = tensors["logits"].clone().requires_grad_()
    logits = torch.tanh(source)  # keeps its result for its own backward
    loss, _ = logits_policy_loss(
        logits, tensors["targets"], None, tensors["advantages"], tensors["mask"], inplace=True, **options
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_place_leaves_the_logits_alone_without_gradients(device):
    tensors, options = problem(torch.float32, device)
    logits = tensors["logits"].clone().requires_grad_()
    with torch.no_grad():
        logits_policy_loss(
            logits, tensors["targets"], None, tensors["advantages"], tensors["mask"], inplace=True, **options
        )
    torch.testing.assert_close(logits.detach(), tensors["logits"], rtol=0, atol=0)


# Chunks, dropped rows, frozen parts


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [("torch", torch.float64, 1e-13), ("torch", torch.bfloat16, 1e-2), ("triton", torch.float32, 2e-6)],
)
def test_chunks_and_dropped_rows_change_nothing(backend, level, dtype, tolerance, device):
    tensors, options = problem(dtype, device, weights=True)
    tensors["advantages"] = torch.tensor([1.0, 0.0, -0.5], device=device)  # a group that learns nothing
    options |= {"importance_sampling_level": level, "backend": backend}
    whole = of_hidden(tensors, drop_inactive=False, chunk_size=100, **options)
    rows = contributing_rows(
        tensors["mask"], tensors["advantages"], weights=options["weights"], importance_sampling_level=level
    )
    assert 0 < len(rows) < tensors["mask"].sum()
    for how in (
        {"drop_inactive": False, "chunk_size": 4},
        {"drop_inactive": True, "chunk_size": 4},
        {"rows": rows, "chunk_size": 3, "drop_inactive": False},
    ):
        ours = of_hidden(tensors, **how, **options)
        assert_same(ours, whole, rtol=tolerance, atol=tolerance / 4)
        torch.testing.assert_close(ours[2], whole[2], rtol=1e-5, atol=1e-6)


class Products:
    """Multiply-adds of every matrix product that runs."""

    def __init__(self, monkeypatch) -> None:
        self.shapes: list[tuple[int, int, int]] = []
        for name, first in (("mm", 0), ("addmm", 1)):
            monkeypatch.setattr(torch, name, self._counted(getattr(torch, name), first))
        method = Tensor.addmm_
        monkeypatch.setattr(Tensor, "addmm_", self._counted(method, 1))

    def _counted(self, function, first):
        def run(*args, **kwargs):
            left, right = args[first : first + 2]
            self.shapes.append((left.size(0), left.size(1), right.size(1)))
            return function(*args, **kwargs)

        return run

    def rows_through_the_head(self) -> float:
        """Products in units of one row times the head."""
        return sum(n * k * m for n, k, m in self.shapes) / (V * H)


@pytest.mark.parametrize(("level", "backend"), [("token", "torch"), ("sequence", "torch"), ("token", "triton")])
def test_gemms_are_three_with_a_trained_head_and_two_with_a_frozen_one(monkeypatch, level, backend, device):
    tensors, options = problem(torch.float32, device)
    options |= {"backend": backend, "chunk_size": 4, "importance_sampling_level": level}
    tensors["advantages"] = torch.tensor([1.0, 0.0, -0.5], device=device)
    rest = (tensors["targets"], None, tensors["advantages"], tensors["mask"])
    prepass = 1 if level == "sequence" else 0
    learning = 4 + 3  # counted tokens of sequences with an advantage
    products = Products(monkeypatch)

    def gemm_rows(hidden_trains, head_trains, drop):
        products.shapes.clear()
        hidden = tensors["hidden"].clone().requires_grad_(hidden_trains)
        head = tensors["head"].clone().requires_grad_(head_trains)
        loss, _ = linear_policy_loss(hidden, head, *rest, drop_inactive=drop, **options)
        during_forward = len(products.shapes)
        if loss.requires_grad:
            loss.backward()
        assert len(products.shapes) == during_forward  # the gradients were ready
        return products.rows_through_the_head()

    assert gemm_rows(True, True, False) == (3 + prepass) * B * T
    assert gemm_rows(True, False, False) == (2 + prepass) * B * T
    assert gemm_rows(True, True, True) == (3 + prepass) * learning
    assert gemm_rows(True, False, True) == (2 + prepass) * learning
    assert gemm_rows(False, False, True) == learning


CLIPPED = [
    # in chunks of 11 rows, of which the last has 4: all, one in the middle, the ends, two inside, the last one
    ("token", [*range(11), 16, 22, 32, 38, 39, 47], 11 + 9 + 9 + 3),
    # sequences of 12 rows, 0 and 2 of them: a chunk and the first row of the next, then parts of two chunks
    ("sequence", [*range(12), *range(24, 36)], 11 + 2 + 8 + 4),
]


@pytest.mark.parametrize("given", [False, True], ids=["rows found", "rows given"])
@pytest.mark.parametrize("head_trains", [False, True], ids=["frozen head", "trained head"])
@pytest.mark.parametrize(("level", "clipped", "kept"), CLIPPED)
def test_clipped_rows_are_cut_out_of_a_chunk_if_they_are_a_tenth_of_it(
    level, clipped, kept, head_trains, given, monkeypatch, device
):
    tensors, options = problem(torch.float32, device, b=4, t=12)
    tensors["mask"] = torch.ones(4, 12, dtype=torch.bool, device=device)
    tensors["advantages"] = torch.ones(4, device=device)
    old = tensors["logits"].log_softmax(-1).gather(-1, tensors["targets"][..., None])[..., 0]
    old.view(-1)[clipped] -= 5  # a ratio of e^5: its gradient is 0
    options |= {"importance_sampling_level": level, "chunk_size": 11}
    options["rows"] = torch.arange(48, device=device) if given else None
    products = Products(monkeypatch)

    def run(drop):
        products.shapes.clear()
        hidden = tensors["hidden"].clone().requires_grad_()
        head = tensors["head"].clone().requires_grad_(head_trains)
        rest = (tensors["targets"], old, tensors["advantages"], tensors["mask"])
        loss, _ = linear_policy_loss(hidden, head, *rest, bias=tensors["bias"], drop_inactive=drop, **options)
        loss.backward()
        return loss.detach(), [leaf.grad for leaf in (hidden, head) if leaf.requires_grad]

    ours = run(drop=True)
    forward, gradients = 48 * (2 if level == "sequence" else 1), 2 if head_trains else 1
    assert products.rows_through_the_head() == forward + gradients * kept
    assert_same(ours, run(drop=False), rtol=1e-5, atol=1e-7)
    assert products.rows_through_the_head() == forward + gradients * 48
    assert (ours[1][0].view(48, -1)[clipped] == 0).all()


def test_tokens_without_weight_or_advantage_are_never_multiplied(monkeypatch, device):
    tensors, options = problem(torch.float32, device, token_advantages=True)
    tensors["advantages"][0, 1] = 0
    weights = torch.ones(B, T, device=device)
    weights[0, 0] = weights[2, 2] = 0
    products = Products(monkeypatch)
    with torch.no_grad():
        of = (tensors["targets"], tensors["old"], tensors["advantages"], tensors["mask"])
        linear_policy_loss(tensors["hidden"], tensors["head"], *of, weights=weights, drop_inactive=True, **options)
    assert products.rows_through_the_head() == COUNTED - 3


CONTRIBUTING = [("token", [1, 3, 8]), ("sequence", [0, 1, 2, 3, 8, 9, 10])]


@pytest.mark.parametrize(("level", "expected"), CONTRIBUTING)
def test_contributing_rows_look_at_counted_tokens_alone(level, expected):
    """Padding of the second sequence has an advantage, as have the last tokens of the others."""
    mask = torch.arange(T) < LENGTHS[:, None]
    advantages = torch.tensor([[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 3.0, math.nan], [1.0, 0.0, 0.0, 1.0]])
    rows = contributing_rows(mask, advantages, importance_sampling_level=level)
    assert rows.tolist() == expected
    assert contributing_rows(mask, advantages, all_counted=True).tolist() == mask.flatten().nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"mask": torch.ones(B)}, ValueError, r"mask must be \(B, T\), got shape \(3,\)"),
        ({"advantages": torch.ones(T)}, ValueError, r"advantages must have shape \(3,\) or \(3, 4\), got \(4,\)"),
        ({"weights": torch.ones(B, 1)}, ValueError, r"weights must have shape \(3, 4\), got \(3, 1\)"),
        ({"weights": torch.ones(B, T).long()}, TypeError, "weights must be floating point, got torch.int64"),
        ({"importance_sampling_level": "word"}, ValueError, "importance_sampling_level must be one of .* got 'word'"),
    ],
)
def test_bad_input_of_contributing_rows_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        contributing_rows(**({"mask": torch.ones(B, T), "advantages": torch.ones(B)} | change))


@pytest.mark.parametrize("fp32_logits", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_an_odd_vocabulary_in_bfloat16_has_finite_gradients(fp32_logits, level):
    """A CPU's matrix unit (AMX) multiplies what lies behind rows of odd length: here memory that nobody wrote."""
    tensors, options = problem(torch.bfloat16, b=40, v=131)
    options |= {"importance_sampling_level": level, "fp32_logits": fp32_logits}
    assert all(torch.isfinite(gradient).all() for gradient in of_hidden(tensors, **options)[1])


def test_a_bias_may_train_alone(device):
    tensors, options = problem(torch.float32, device)
    everything = of_hidden(tensors, **options)
    bias = tensors["bias"].clone().requires_grad_()
    rest = (tensors["targets"], tensors["old"], tensors["advantages"], tensors["mask"])
    linear_policy_loss(tensors["hidden"], tensors["head"], *rest, bias=bias, **options)[0].backward()
    torch.testing.assert_close(bias.grad, everything[1][2])


@FORM
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("feature", [{"beta": 0.1}, {"entropy_coef": 0.1}], ids=str)
def test_kl_and_entropy_keep_rows_without_advantage(form, backend, level, feature, device):
    tensors, options = problem(torch.float32, device, **feature)
    options["importance_sampling_level"] = level
    tensors["advantages"] = torch.zeros(B, device=device)
    exact = plain(tensors, start_of(form), torch.float64, **options)
    assert exact[1][0].abs().max() > 1e-3
    ours = form(tensors, backend=backend, **options)
    assert_same(ours, (exact[0].float(), [gradient.float() for gradient in exact[1]]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("backend", "known"), [("torch", False), ("triton", False), ("triton", True)])
def test_row_gradients_serve_rows_with_only_one_of_the_two_derivatives(backend, known, device, small_tiles):
    logits = normal(1, 3, V, seed=4).float().to(device)
    targets = torch.tensor([3, 0, V - 1], device=device)
    by_logprob, by_entropy = torch.tensor([[0.5, 0.0, 0.0], [0.0, -0.7, 0.0]], device=device)
    everything, softmax = torch.ones(3, dtype=torch.bool, device=device), Softmax()
    rows = None
    if known:
        rows = policy_rows.row_logprobs(logits, None, targets, everything, softmax, with_entropy=True, backend=backend)
    ours = torch.full_like(logits, math.nan)
    policy_rows.row_gradients(logits, None, ours, targets, by_logprob, by_entropy, softmax, rows=rows, backend=backend)
    leaf = logits.double().requires_grad_()
    logp = leaf.log_softmax(-1)
    chosen, entropy = logp.gather(-1, targets[None, :, None])[0, :, 0], -(logp.exp() * logp).sum(-1)[0]
    (by_logprob.double() * chosen + by_entropy.double() * entropy).sum().backward()
    torch.testing.assert_close(ours, leaf.grad.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("over_the_logits", [False, True])
def test_the_reference_works_in_float32_and_rounds_a_half_gradient_once(over_the_logits, device):
    logits, targets = normal(1, 3, V, seed=4).float().to(device), torch.tensor([3, 0, V - 1], device=device)
    by_logprob, softmax = torch.tensor([0.5, -0.3, 0.7], device=device), Softmax(0.7)

    def gradient(logits, out):
        policy_rows.row_gradients(logits, None, out, targets, by_logprob, None, softmax, backend="torch")
        return out

    exact = gradient(logits, torch.empty_like(logits))
    assert torch.equal(gradient(strip := logits.clone(), strip), exact)
    half = (strip := logits.clone()).view(torch.bfloat16)[..., :V] if over_the_logits else logits.bfloat16()
    assert torch.equal(gradient(strip if over_the_logits else logits, half), exact.bfloat16())


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_bf16_logits_kept_in_float32_are_closer_than_rounded_ones(backend, device):
    tensors, options = problem(torch.bfloat16, device, v=60)
    tensors["head"] = tensors["head"] * 3
    exact = plain(tensors, "hidden", torch.float64, **options)

    def error(fp32_logits):
        ours = of_hidden(tensors, backend=backend, fp32_logits=fp32_logits, **options)
        return (ours[0].double() - exact[0]).abs(), (ours[1][0].double() - exact[1][0]).norm()

    kept, rounded = error(True), error(False)
    assert kept[0] < rounded[0] / 3
    assert kept[1] < rounded[1] / 1.2


def test_a_tied_head_sums_both_gradients(device):
    tensors, options = problem(torch.float64, device)
    ids = torch.arange(B * T, device=device).view(B, T) % V
    rest = (tensors["targets"], tensors["old"], tensors["advantages"], tensors["mask"])
    tied = tensors["head"].clone().requires_grad_()
    linear_policy_loss(tied[ids], tied, *rest, backend="torch", **options)[0].backward()
    apart = [tensors["head"].clone().requires_grad_() for _ in range(2)]
    linear_policy_loss(apart[0][ids], apart[1], *rest, backend="torch", **options)[0].backward()
    torch.testing.assert_close(tied.grad, apart[0].grad + apart[1].grad, rtol=1e-12, atol=1e-14)


# Inside training loops


def test_half_precision_gradients_do_not_underflow_however_many_tokens_there_are(device):
    tensors, options = problem(torch.float16, device)
    options["num_items_in_batch"] = 3_000_000  # gradients near 1e-7: below what float16 resolves
    scale = 2.0**20  # what a gradient scaler multiplies the loss with
    for form, start in ((logits_policy_loss, ("logits",)), (linear_policy_loss, ("hidden", "head"))):
        leaves = [tensors[name].clone().requires_grad_() for name in start]
        rest = (tensors["targets"], tensors["old"], tensors["advantages"], tensors["mask"])
        (scale * form(*leaves, *rest, backend="triton", **options)[0]).backward()
        exact = [tensors[name].double().requires_grad_() for name in start]
        (scale * form(*exact, *rest, backend="torch", **options)[0]).backward()
        for leaf, reference in zip(leaves, exact, strict=True):
            error = (leaf.grad.double() - reference.grad).abs().max() / reference.grad.abs().max()
            assert error < 4e-3


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_grad_and_frozen_inputs_record_nothing(backend, device):
    tensors, options = problem(torch.float32, device)
    rest = (tensors["targets"], tensors["old"], tensors["advantages"], tensors["mask"])
    with_gradient = of_hidden(tensors, backend=backend, **options)
    hidden, head = tensors["hidden"].clone().requires_grad_(), tensors["head"]
    with torch.no_grad():
        loss, _ = linear_policy_loss(hidden, head, *rest, bias=tensors["bias"], backend=backend, **options)
        assert not logits_policy_loss(tensors["logits"], *rest, backend=backend, **options)[0].requires_grad
    assert not loss.requires_grad
    torch.testing.assert_close(loss, with_gradient[0])
    linear_policy_loss(hidden, head, *rest, bias=tensors["bias"], backend=backend, **options)[0].backward()
    assert head.grad is None
    torch.testing.assert_close(hidden.grad, with_gradient[1][0])


@FORM
@pytest.mark.parametrize("level", LEVELS)
def test_gradient_accumulation_is_independent_of_the_split(form, level):
    tensors, options = problem(weights=True, entropy_coef=0.1)
    options |= {"importance_sampling_level": level, "num_items_in_batch": COUNTED, "num_sequences_in_batch": B}
    per_row = ("logits", "hidden", "targets", "old", "advantages", "mask")
    for loss_type in (name for name in LOSS_TYPES if name != "bnpo"):
        options["loss_type"] = loss_type
        whole = form(tensors, **options)
        parts = []
        for row in range(B):
            own = {name: tensors[name][row : row + 1] if name in per_row else tensors[name] for name in tensors}
            parts.append(form(own, **{**options, "weights": options["weights"][row : row + 1]}))
        torch.testing.assert_close(sum(part[0] for part in parts), whole[0])
        torch.testing.assert_close(torch.cat([part[1][0] for part in parts]), whole[1][0])
        for i in range(1, len(whole[1])):
            torch.testing.assert_close(sum(part[1][i] for part in parts), whole[1][i])


@pytest.mark.parametrize("form", ["logits", "in place", "linear"])
def test_a_second_derivative_is_refused(form):
    tensors, options = problem()
    rest = (tensors["targets"], tensors["old"], tensors["advantages"], tensors["mask"])
    leaf = tensors["hidden" if form == "linear" else "logits"].clone().requires_grad_()
    if form == "linear":
        loss, _ = linear_policy_loss(leaf, tensors["head"], *rest, **options)
    else:
        loss, _ = logits_policy_loss(leaf * 1, *rest, inplace=form == "in place", **options)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(loss, leaf, create_graph=True)


class Zeros(TorchDispatchMode):
    """Shapes of the tensors of zeros that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "zeros" in func.__name__:
            self.shapes.append(tuple(out.shape))
        return out


def loss_of_leaves(form: str) -> tuple[Tensor, list[Tensor]]:
    tensors, options = problem()
    rest = (tensors["targets"], tensors["old"], tensors["advantages"], tensors["mask"])
    leaves = [tensors[name].clone().requires_grad_() for name in ("hidden", "head")]
    if form == "linear":
        return linear_policy_loss(*leaves, *rest, **options)[0], leaves
    return logits_policy_loss(leaves[0] @ leaves[1].T, *rest, inplace=form == "in place", **options)[0], leaves


@pytest.mark.parametrize("form", ["logits", "in place", "linear"])
def test_backward_makes_no_zeros_for_gradients_that_nobody_reads(form):
    loss, leaves = loss_of_leaves(form)
    with Zeros() as zeros:
        loss.backward()
    assert zeros.shapes == []
    assert all(leaf.grad is not None for leaf in leaves)


@pytest.mark.parametrize("form", ["logits", "in place", "linear"])
def test_a_loss_without_an_upstream_gradient_gives_its_inputs_none(form):
    loss, leaves = loss_of_leaves(form)
    torch._C._functions.UndefinedGrad()(loss).backward()
    assert [leaf.grad for leaf in leaves] == [None, None]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(use_reentrant):
    tensors, options = problem()
    rest = (tensors["targets"], tensors["old"], tensors["advantages"], tensors["mask"])

    def loss_of(hidden, head):
        return linear_policy_loss(hidden, head, *rest, **options)[0]

    gradients = []
    for checkpointed in (False, True):
        leaves = [tensors[name].clone().requires_grad_() for name in ("hidden", "head")]
        if checkpointed:
            loss = torch.utils.checkpoint.checkpoint(loss_of, *leaves, use_reentrant=use_reentrant)
        else:
            loss = loss_of(*leaves)
        loss.backward()
        gradients.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_autocast_runs_the_head_in_its_dtype_and_the_loss_in_float32(backend, device):
    tensors, options = problem(torch.float32, device)
    halves = {**tensors, "hidden": tensors["hidden"].bfloat16(), "head": tensors["head"].bfloat16()}
    expected = of_hidden(halves, with_bias=False, backend=backend, **options)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        ours = of_hidden(tensors, with_bias=False, backend=backend, **options)
        double = {
            name: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in tensors.items()
        }
        exact = of_hidden(double, with_bias=False, backend="torch", **options)
    assert ours[0].dtype == torch.float32
    assert ours[1][0].dtype == torch.float32
    assert_same(ours, (expected[0], [gradient.float() for gradient in expected[1]]), rtol=1e-5, atol=1e-6)
    assert exact[1][0].dtype == torch.float64
    tensors_fp16 = {**tensors, "logits": tensors["logits"].half()}
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        inside = of_logits(tensors_fp16, backend=backend, **options)
    assert_same(inside, of_logits(tensors_fp16, backend=backend, **options), rtol=1e-5, atol=1e-6)


def test_averaged_gradients_of_two_data_parallel_processes_are_those_of_the_whole_batch():
    """Each half goes through DistributedDataParallel alone; to average is all that it adds between processes."""
    tensors, options = problem(torch.float64, weights=True)
    head = torch.nn.Linear(H, V, bias=True, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(tensors["head"])
        head.bias.copy_(tensors["bias"])

    class LossOfHead(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, own: slice) -> Tensor:
            return linear_policy_loss(
                tensors["hidden"][own], self.head.weight, tensors["targets"][own], tensors["old"][own],
                tensors["advantages"][own], tensors["mask"][own], bias=self.head.bias,
                weights=options["weights"][own], num_items_in_batch=COUNTED / 2,
            )[0]  # fmt: skip

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(LossOfHead())
        for own in (slice(0, 1), slice(1, 3)):
            parallel(own).backward()
    finally:
        # First, for what outlives the group ends its threads without releasing Python's lock, which they may wait for.
        parallel = None
        gc.collect()
        torch.distributed.destroy_process_group()
    _, (_, *expected), _ = of_hidden(tensors, weights=options["weights"])
    ours = [head.weight.grad / 2, head.bias.grad / 2]
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


# On a GPU


@on_gpu
@pytest.mark.parametrize("level", LEVELS)
def test_a_step_never_waits_for_the_gpu(level):
    tensors, options = problem(torch.bfloat16, "cuda", entropy_coef=0.1)
    options |= {"importance_sampling_level": level, "num_items_in_batch": COUNTED}
    of_hidden(tensors, **options)
    of_logits(tensors, inplace=True, **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        of_hidden(tensors, **options)
        of_logits(tensors, inplace=True, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_gpu
def test_lengths_do_not_recompile_the_kernels():
    def compiled() -> int:
        return sum(len(cache[0]) for cache in policy_rows.policy_rows_kernel.device_caches.values())

    tensors, options = problem(torch.bfloat16, "cuda", b=2, t=16, v=64)
    of_hidden(tensors, **options)
    before = compiled()
    for b, t in ((2, 17), (1, 1), (3, 48)):
        tensors, options = problem(torch.bfloat16, "cuda", b=b, t=t, v=64)
        of_hidden(tensors, **options)
    assert compiled() == before


@on_gpu
def test_extra_memory_is_one_strip_and_the_outputs():
    n, h, v, chunk = 4096, 512, 65_536, 1024
    hidden = torch.randn(1, n, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(v, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(v, (1, n), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss, _ = linear_policy_loss(
        hidden, head, targets, None, torch.ones(1, device="cuda"), torch.ones(1, n, device="cuda"), chunk_size=chunk
    )
    extra = torch.cuda.max_memory_allocated() - before
    strip, outputs = 4 * chunk * v, 2 * n * h + 4 * v * h
    assert extra < 1.05 * (strip + outputs) + 2**22
    loss.backward()


@on_gpu
def test_more_than_two_to_the_31_logits():
    n, v = 2**31 // 151_936 + 3, 151_936
    if torch.cuda.mem_get_info()[0] < 4 * n * v:
        pytest.skip("needs 9 GB of free GPU memory")
    logits = torch.zeros(1, n, v, device="cuda", dtype=torch.bfloat16)
    logits[0, -1] = torch.randn(v, device="cuda")
    targets = torch.full((1, n), v - 1, device="cuda")
    mask = torch.zeros(1, n, device="cuda")
    mask[0, -1] = 1
    last = logits[:, -1:].clone().requires_grad_()
    expected, _ = logits_policy_loss(last, targets[:, -1:], None, torch.ones(1, device="cuda"), mask[:, -1:])
    expected.backward()
    working = logits.requires_grad_() * 1
    loss, _ = logits_policy_loss(working, targets, None, torch.ones(1, device="cuda"), mask, inplace=True)
    (gradient,) = torch.autograd.grad(loss, working)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient[:, -1:], last.grad)
    assert (gradient[0, :-1:997] == 0).all()


# Clear errors


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"logits": torch.zeros(B, V)}, ValueError, r"logits must be \(B, T, V\), got shape \(3, 37\)"),
        ({"logits": torch.zeros(B, T, 0)}, ValueError, r"logits must not be empty, got shape \(3, 4, 0\)"),
        ({"logits": torch.zeros(B, T, V).long()}, TypeError, "logits must be floating point"),
        ({"targets": torch.full((B, T), V)}, ValueError, r"targets must be in \[0, 37\).*row 0, token 0 is 37"),
        ({"targets": torch.zeros(B, T)}, TypeError, "targets must be int64, got torch.float32"),
        ({"targets": torch.zeros(B, T + 1).long()}, ValueError, r"targets must have shape \(3, 4\), got \(3, 5\)"),
        ({"temperature": 0.0}, ValueError, "temperature must be > 0 and finite, got 0.0"),
        ({"softcap": -1.0}, ValueError, "softcap must be > 0 and finite, got -1.0"),
        ({"backend": "cutlass"}, ValueError, "backend must be one of"),
        ({"backend": "triton"}, TypeError, "must be one of .* for backend 'triton', got torch.float64"),
        ({"lossy": 1}, TypeError, "unexpected keyword argument 'lossy'"),
    ],
)
def test_bad_logits_are_refused(change, error, words):
    tensors, options = problem()
    tensors |= {name: value for name, value in change.items() if name in tensors}
    options |= {name: value for name, value in change.items() if name not in tensors}
    with pytest.raises(error, match=words):
        of_logits(tensors, **options)


def test_a_nan_logit_in_a_counted_row_is_refused_naming_the_row():
    tensors, options = problem()
    tensors["logits"][1, 1, 3] = math.nan
    with pytest.raises(ValueError, match=r"log-prob from logits must be finite.*row 1, token 1 is nan"):
        of_logits(tensors, **options)
    tensors["hidden"][2, 0, 0] = math.inf
    with pytest.raises(ValueError, match=r"log-prob from hidden and lm_head must be finite.*row 2, token 0 is nan"):
        of_hidden(tensors, **options)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("on_policy", [False, True])
def test_a_target_outside_the_vocabulary_that_nobody_checks_gives_a_nan_loss(on_policy, level, device):
    tensors, options = problem(torch.float32, device, old=not on_policy)
    tensors["targets"][0, 0] = V + 5
    options |= {"importance_sampling_level": level, "backend": "triton", "validate": False}
    loss, (gradient,), _ = of_logits(tensors, **options)
    assert torch.isnan(loss)
    assert (gradient[0, 0] == 0).all()


@FORM
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo"])
def test_a_nan_logit_that_nobody_checks_gives_a_nan_loss(form, loss_type, backend, device):
    for old in (True, False):
        tensors, options = problem(torch.float32, device, b=1, t=1, softcap=5.0, old=old)
        tensors["logits"][0, 0, 3] = tensors["head"][3, 0] = math.nan
        loss, _, _ = form(tensors, backend=backend, validate=False, loss_type=loss_type, **options)
        assert torch.isnan(loss)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"hidden": torch.zeros(B, H)}, ValueError, r"hidden must be \(B, T, H\), got shape \(3, 24\)"),
        ({"head": torch.zeros(V, H + 1)}, ValueError, "hidden has H=24, lm_head has H=25"),
        (
            {"head": torch.zeros(V, H, dtype=torch.float32)},
            TypeError,
            "must share a dtype, got torch.float64 and torch.f",
        ),
        ({"bias": torch.zeros(V + 1)}, ValueError, r"bias must have shape \(37,\), got \(38,\)"),
        ({"head": torch.zeros(0, H)}, ValueError, r"lm_head must not be empty, got shape \(0, 24\)"),
        ({"hidden": torch.zeros(B, T, 0)}, ValueError, r"hidden must not be empty, got shape \(3, 4, 0\)"),
        ({"chunk_size": -3}, ValueError, "chunk_size must be at least 1, got -3"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        ({"rows": torch.tensor([0, 1])}, ValueError, "rows leaves out row 0, token 2, which contributes"),
        ({"rows": torch.tensor([0, 99])}, ValueError, r"rows must be in \[0, 12\), got 0 to 99"),
        ({"rows": torch.tensor([0, 0])}, ValueError, "rows must not repeat"),
        ({"rows": torch.tensor([0.0])}, ValueError, "rows must be 1-D int64, got torch.float32"),
    ],
)
def test_bad_hidden_states_are_refused(change, error, words):
    tensors, options = problem()
    tensors |= {name: value for name, value in change.items() if name in tensors}
    options |= {name: value for name, value in change.items() if name not in tensors}
    with pytest.raises(error, match=words):
        of_hidden(tensors, **options)


# Operators


def operator_arguments(tensors: dict[str, Any], dtype: torch.dtype, level: str) -> tuple[Any, ...]:
    flat = {name: tensors[name].reshape(-1) for name in ("targets", "old")}
    scale = tensors["mask"].to(dtype).reshape(-1) / COUNTED
    options = PolicyOptions(level=level, beta=0.1)
    token = (
        flat["old"].to(dtype),
        torch.full_like(scale, 0.5),
        None,
        flat["old"].to(dtype),
        scale,
        scale.new_tensor(0.1),
    )
    return (flat["targets"], *token), (options.surrogate, options.level, options.numbers(), [0.8, 4.0], True)


@pytest.mark.parametrize(
    ("backend", "dtype", "level"), [("torch", torch.float64, "token"), ("triton", torch.float16, "sequence")]
)
def test_operators_pass_opcheck(backend, dtype, level, device, small_tiles):
    tensors, _ = problem(dtype, device)
    exact = torch.promote_types(dtype, torch.float32)
    token, options = operator_arguments(tensors, exact, level)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    if backend == "torch":  # the tolerance of this one compares gradients of every output bit by bit
        checks += ("test_aot_dispatch_dynamic",)
    logits = tensors["logits"].clone().requires_grad_()
    torch.library.opcheck(logits_policy_loss_op, (logits, *token, *options, True, backend), test_utils=checks)
    detached = tensors["logits"].clone()
    torch.library.opcheck(
        logits_policy_loss_inplace_op,
        (detached, *token, *options, backend),
        test_utils=("test_schema", "test_faketensor"),
    )
    leaves = [tensors[name].clone().requires_grad_() for name in ("hidden", "head", "bias")]
    grid = [tensor.view(B, T) if isinstance(tensor, Tensor) and tensor.numel() == B * T else tensor for tensor in token]
    torch.library.opcheck(
        linear_policy_loss_op,
        (leaves[0].view(-1, H), *leaves[1:], *grid, None, *options, [True] * 3, True, 4, True, backend),
        test_utils=checks,
    )
    rows = tensors["logits"].clone()
    factor = torch.tensor(0.5, device=device, dtype=exact)
    torch.library.opcheck(scale_rows_op, (rows, factor, torch.float32, backend), test_utils=checks)
    torch.library.opcheck(scale_rows_inplace_op, (rows, factor, backend), test_utils=("test_schema", "test_faketensor"))


def test_linear_and_in_place_forms_compile_into_one_graph_with_a_model_around_them(device, small_tiles):
    tensors, options = problem(torch.float32, device, entropy_coef=0.1)
    rest = [tensors[name] for name in ("targets", "old", "advantages", "mask")]

    def step(hidden, head, *rest):
        hidden = torch.tanh(hidden)
        linear, _ = linear_policy_loss(hidden, head, *rest, chunk_size=4, backend="triton", **options)
        inplace, _ = logits_policy_loss(hidden @ head.T, *rest, inplace=True, backend="triton", **options)
        return linear + 0.5 * inplace

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    results = []
    for function in (step, compiled):
        leaves = [tensors[name].clone().requires_grad_() for name in ("hidden", "head")]
        loss = function(*leaves, *rest)
        (0.5 * loss).backward()
        results.append((loss.detach(), [leaf.grad for leaf in leaves]))
    assert_same(results[1], results[0], rtol=1e-6, atol=1e-7)
