"""Values and gradients of logits_policy_loss and linear_policy_loss against float64, on inputs that break kernels."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cfa_kernels.loss import policy_rows
from cfa_kernels.loss.options import CORRECTIONS, LEVELS, LossOptions
from cfa_kernels.loss.policy import linear_policy_loss, logits_policy_loss
from cfa_kernels.loss.types import LOSS_TYPES
from cfa_kernels.ops import row_logprobs
from cfa_kernels.ops.row_softmax import LogitRows, Softmax
from tests.support.budget import assert_within_budget
from tests.support.policy_problem import (
    FEATURES,
    FORM,
    KIND,
    B,
    H,
    T,
    V,
    assert_same,
    drawn_features,
    leaves_of,
    normal,
    of_hidden,
    of_logits,
    on_gpu,
    others,
    plain,
    problem,
    unchecked,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]


@KIND
def test_every_form_and_backend_agrees_with_policy_loss_on_options_drawn_together(
    loss_type, level, device, small_tiles
):
    """The kernel of whole rows, which knows only the loss of a token, on fewer draws where types share one."""
    alike = [name for name, kind in LOSS_TYPES.items() if kind.formula == LOSS_TYPES[loss_type].formula]
    names = set()
    for seed in range(12, 16):  # in which every option is drawn for every kind
        features = drawn_features(seed, loss_type, level)
        tensors, options = problem(**features)
        names |= options.keys()
        for form in (of_logits, of_hidden):
            ours, expected = (
                form(tensors, compute_entropy=True, **options),
                plain(tensors, form, torch.float64, **options),
            )
            assert_same(ours, expected, rtol=1e-11, atol=1e-13)
            torch.testing.assert_close(ours[2], expected[2], rtol=1e-11, atol=1e-13)
        if seed >= (15 if (loss_type, level) == (alike[0], "token") else 13):
            continue
        tensors, options = problem(torch.float32, device, **features)
        kernel, reference = (of_logits(tensors, backend=backend, **options) for backend in ("triton", "torch"))
        assert_same(kernel, reference, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(kernel[2], reference[2], rtol=1e-5, atol=2e-6)
    assert names >= LossOptions.__annotations__.keys() - {"validate"}


@pytest.mark.parametrize("loss_type", ["dapo", "reinforce"])
def test_the_kernel_of_whole_rows_is_the_formula(loss_type, device, small_tiles, monkeypatch):
    launch, builds = policy_rows.run_softmax, []
    monkeypatch.setattr(policy_rows, "run_softmax", lambda *args, **how: builds.append(how) or launch(*args, **how))
    for seed in range(14):
        features = drawn_features(seed, loss_type, "token")
        features |= {"kl_estimator": "k3", "use_bias_correction_kl": False, "off_policy_mask_threshold": None}
        mode = (None, *CORRECTIONS)[seed % 6]
        features |= {"correction": mode, "sampling_clip_min": mode and 0.9, "sampling_clip_max": mode and 1.1}
        features["old"] |= seed % 6 > 2  # by which a sequence's correction is known beforehand
        tensors, options = problem(torch.float32, device, **features)
        ours = of_logits(tensors, backend="triton", compute_entropy=True, **options)
        exact = plain(tensors, of_logits, torch.float64, **options)
        assert_same(ours, (exact[0].float(), [exact[1][0].float()]), rtol=1e-5, atol=1e-6)
        for name, metric in exact[2].items():
            torch.testing.assert_close(ours[2][name], metric.float(), rtol=1e-5, atol=2e-6, msg=name)
    assert len(builds) == 14
    assert {how["CORRECTION"] for how in builds} == {"", "token_truncate", "token_mask", "token_gate"}
    for flag in ("HAS_OLD", "HAS_WEIGHTS", "HAS_REF", "HAS_ENTROPY_SCALE"):
        assert {how[flag] for how in builds} == {True, False}, flag


@pytest.mark.parametrize("over_the_logits", [False, True])
def test_the_reference_works_in_float32_and_rounds_a_half_gradient_once(over_the_logits, device):
    logits, targets = normal(1, 3, V, seed=4).float().to(device), torch.tensor([3, 0, V - 1], device=device)
    by_logprob = torch.tensor([0.5, -0.3, 0.7], device=device)

    def gradient(logits, out):
        row_logprobs.row_gradients(LogitRows(logits, None, targets, Softmax(0.7)), out, by_logprob, None)
        return out

    exact = gradient(logits, torch.empty_like(logits))
    assert torch.equal(gradient(strip := logits.clone(), strip), exact)
    half = (strip := logits.clone()).view(torch.bfloat16)[..., :V] if over_the_logits else logits.bfloat16()
    assert torch.equal(gradient(strip if over_the_logits else logits, half), exact.bfloat16())


@pytest.mark.parametrize(
    ("form", "dtype", "feature", "loss_type", "level"),
    [
        (of_logits, torch.float32, "low-delta", "dapo", "token"), (of_logits, torch.bfloat16, "all", "dapo", "token"),
        (of_logits, torch.float16, "softcap", "dapo", "sequence"), (of_logits, torch.float16, "k1", "dppo", "token"),
        (of_logits, torch.bfloat16, "entropy", "dr_grpo", "token"),
        (of_hidden, torch.float32, "all", "grpo", "sequence"), (of_hidden, torch.bfloat16, "all", "dapo", "token"),
        (of_hidden, torch.float16, "all", "sapo", "token"), (of_hidden, torch.bfloat16, "band", "vespo", "token"),
    ],
)  # fmt: skip
def test_kernels_stay_within_the_error_budget(form, dtype, feature, loss_type, level, device, small_tiles):
    tensors, options = problem(dtype, device, **FEATURES[feature])
    options |= {"loss_type": loss_type, "importance_sampling_level": level}
    ours = form(tensors, backend="triton", compute_entropy=True, **options)
    exact = plain(tensors, form, torch.float64, **options)
    torch.testing.assert_close(ours[0], exact[0].float(), rtol=1e-5, atol=2e-6)  # float32 maths whatever the dtype
    # Two ways to do the same maths in this precision; the luck of one is not the measure.
    low = [plain(tensors, form, dtype, **options)[1], form(tensors, backend="torch", **options)[1]]
    for gradient, reference, *peers in zip(ours[1], exact[1], *low, strict=True):
        assert gradient.dtype == dtype
        assert_within_budget(gradient, max(peers, key=lambda g, r=reference: (g.double() - r).abs().max()), reference)
    for name, metric in exact[2].items():
        torch.testing.assert_close(ours[2][name], metric.float(), rtol=1e-5, atol=2e-6, msg=name)


def test_a_vocabulary_of_262147_as_shipped(device):
    tensors, options = problem(torch.float32, device, b=1, t=2, v=262_147)
    ours = of_logits(tensors, backend="triton", **options)
    exact = of_logits({**tensors, "logits": tensors["logits"].double()}, backend="torch", **options)
    assert_same(ours, (exact[0].float(), [exact[1][0].float()]), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("form", "backend", "level", "feature"),
    [
        (of_logits, "triton", "token", {"entropy_coef": 0.1}), (of_logits, "triton", "sequence", {"beta": 0.1}),
        (of_hidden, "torch", "sequence_token", {"entropy_coef": 0.1}), (of_hidden, "triton", "token", {"beta": 0.1}),
    ],
)  # fmt: skip
def test_kl_and_entropy_keep_rows_without_advantage(form, backend, level, feature, device):
    tensors, options = problem(torch.float32, device, **feature)
    options["importance_sampling_level"] = level
    tensors["advantages"] = torch.zeros(B, device=device)
    exact = plain(tensors, form, torch.float64, **options)
    assert exact[1][0].abs().max() > 1e-3
    ours = form(tensors, backend=backend, **options)
    assert_same(ours, (exact[0].float(), [gradient.float() for gradient in exact[1]]), rtol=1e-4, atol=1e-6)


@pytest.fixture
def tiles_of_64(monkeypatch):
    """With the vectors that a lane is shipped to load."""
    tiles = {"num_warps": 1, "BLOCK": 64}
    monkeypatch.setattr(row_logprobs, "launch_options", lambda _, size, **__: tiles | {"VECTOR": 16 // size})


@pytest.mark.parametrize(("dtype", "with_row_values"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
@pytest.mark.parametrize("vocabulary", [1, 3, 8, 15, 64, 67, 137])
def test_rows_that_end_within_a_vector_are_read_and_written_to_their_last_logit(
    vocabulary, dtype, with_row_values, device, tiles_of_64
):
    """And no further: behind it lies nan, which stays. Rows have both derivatives, one of them or none."""
    room = torch.full((4, 160), torch.nan, device=device, dtype=dtype)
    room[:, :vocabulary] = 3 * torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = room[:, :vocabulary].double().requires_grad_()
    targets = torch.tensor([0, vocabulary // 2, vocabulary - 1, 0], device=device)
    by_logprob, by_entropy = torch.tensor([[1.0, 0.0, -0.5, 0.0], [0.0, -0.7, 0.3, 0.0]], device=device)
    row = room[None, :, :vocabulary]
    rows = LogitRows(row, None, targets, Softmax(temperature=0.7), "triton")
    ours = row_logprobs.row_logprobs(rows, torch.ones(4, dtype=torch.bool, device=device), with_entropy=True)
    logp = (exact / 0.7).log_softmax(-1)
    chosen, entropy = logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    torch.testing.assert_close(ours.logprobs.double(), chosen, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(ours.entropy.double(), entropy, rtol=1e-5, atol=2e-6)
    (chosen * by_logprob.double() + entropy * by_entropy.double()).sum().backward()
    row_logprobs.row_gradients(rows, row, by_logprob, by_entropy, ours if with_row_values else None)
    assert_within_budget(room[:, :vocabulary], exact.grad.to(dtype), exact.grad)
    policy_rows.scale_rows(row, torch.tensor(2.0, device=device), row, backend="triton")
    assert_within_budget(room[:, :vocabulary], (2 * exact.grad).to(dtype), 2 * exact.grad)
    assert room[:, vocabulary:].isnan().all()


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_few_programs_scale_every_row(factor, device, monkeypatch, tiles_of_64):
    monkeypatch.setattr(policy_rows, "SCALE_PROGRAMS", 3)
    rows = torch.arange(7.0 * 70, device=device).view(7, 1, 70)
    scaled, scale = rows.clone(), torch.tensor(factor, device=device)
    policy_rows.scale_rows(scaled, scale, scaled, backend="triton")
    policy_rows.scale_rows(rows, scale, other := torch.empty_like(rows), backend="triton")
    assert torch.equal(scaled, rows * factor)
    assert torch.equal(other, rows * factor)


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
        "logits": logits.expand(1, 2, V).to(device), "targets": torch.tensor([[target, V - 2]], device=device),
        "old": torch.full((1, 2), -3.0, device=device), "advantages": torch.tensor([0.5], device=device),
        "mask": torch.ones(1, 2, device=device),
    }  # fmt: skip
    options = {"compute_entropy": True, "entropy_coef": 0.1, "loss_type": "sapo"}
    loss, (gradient,), metrics = of_logits(tensors, backend=backend, **options)
    exact = of_logits({**tensors, "logits": tensors["logits"].double()}, backend="torch", **options)
    torch.testing.assert_close(loss, exact[0].float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, exact[1][0].float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(metrics["entropy"], exact[2]["entropy"].float(), rtol=1e-5, atol=1e-5)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("margin", [0.0, 8.0, 12.0])
def test_the_targets_gradient_is_right_when_its_probability_is_about_one(backend, margin, device, small_tiles):
    logits = torch.zeros(1, 1, V, device=device)
    logits[..., 11] = math.log(V - 1) + margin
    tensors = {
        "logits": logits, "targets": torch.tensor([[11]], device=device), "old": None,
        "advantages": torch.ones(1, device=device), "mask": torch.ones(1, 1, device=device),
    }  # fmt: skip
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
    assert all(torch.isnan(metric) for metric in metrics.values())
    one = nothing["mask"].clone()
    one[1, 1] = True
    single = {**tensors, "mask": one}
    exact = plain(single, form, torch.float64, **options)
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
        loss, _ = logits_policy_loss(logits, *others(tensors), backend=backend, inplace=inplace, **options)
        loss.backward()
        assert_same((loss.detach(), [logits.grad.clone()]), expected, rtol=1e-6, atol=1e-7)
    assert torch.isnan(wide[..., V:]).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@FORM
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
    leaves = [strided[name].detach().requires_grad_() for name in leaves_of(form)]
    if form is of_logits:
        loss, _ = logits_policy_loss(*leaves, *others(strided), backend=backend, **options)
    else:
        loss, _ = linear_policy_loss(*leaves[:2], *others(strided), bias=leaves[2], backend=backend, **options)
    loss.backward()
    assert_same((loss.detach(), [leaf.grad for leaf in leaves]), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("on_policy", [False, True])
def test_a_target_outside_the_vocabulary_that_nobody_checks_gives_a_nan_loss(on_policy, level, device):
    tensors, options = problem(torch.float32, device, old=not on_policy)
    tensors["targets"][0, 0] = V + 5
    options |= {"importance_sampling_level": level, "backend": "triton", "validate": False}
    loss, (gradient,), _ = of_logits(tensors, **options)
    assert torch.isnan(loss)
    assert (gradient[0, 0] == 0).all()


@pytest.mark.parametrize(("form", "backend"), [(of_logits, "triton"), (of_hidden, "torch")])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "cispo_two_sided", "dppo", "sapo"])
def test_a_nan_logit_that_nobody_checks_gives_a_nan_loss(form, loss_type, backend, device):
    for old in (True, False):
        tensors, options = problem(torch.float32, device, b=1, t=1, softcap=5.0, old=old)
        tensors["logits"][0, 0, 3] = tensors["head"][3, 0] = math.nan
        loss, _, _ = form(tensors, backend=backend, validate=False, loss_type=loss_type, **options)
        assert torch.isnan(loss)


@pytest.mark.parametrize(
    ("backend", "level", "dtype", "upstream"),
    [
        ("torch", "token", torch.float16, 0.25), ("torch", "sequence", torch.float32, 1.0),
        ("triton", "token", torch.bfloat16, 1.0), ("triton", "token", torch.float32, 0.25),
        ("triton", "sequence", torch.float16, 1.0),
    ],
)  # fmt: skip
def test_in_place_gives_the_same_gradient_in_the_logits_memory(backend, level, dtype, upstream, device, small_tiles):
    tensors, options = problem(dtype, device, **FEATURES["all"])
    options = unchecked(options | {"importance_sampling_level": level, "backend": backend})
    rest = others(tensors)
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


def test_in_place_refuses_logits_that_someone_else_has_saved_and_leaves_them_alone_without_gradients(device):
    tensors, options = problem(torch.float32, device)
    source = tensors["logits"].clone().requires_grad_()
    logits = torch.tanh(source)  # keeps its result for its own backward
    loss, _ = logits_policy_loss(logits, *others(tensors), inplace=True, **options)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    logits = tensors["logits"].clone().requires_grad_()
    with torch.no_grad():
        logits_policy_loss(logits, *others(tensors), inplace=True, **options)
    torch.testing.assert_close(logits.detach(), tensors["logits"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        (of_logits, {"logits": torch.zeros(B, V)}, r"logits must be \(B, T, V\), got shape \(3, 37\)"),
        (of_logits, {"logits": torch.zeros(B, T, 0)}, r"logits must not be empty, got shape \(3, 4, 0\)"),
        (of_logits, {"targets": torch.full((B, T), V)}, r"targets must be in \[0, 37\).*row 0, token 0 is 37"),
        (of_logits, {"targets": torch.zeros(B, T + 1).long()}, r"targets must have shape \(3, 4\), got \(3, 5\)"),
        (of_logits, {"temperature": 0.0}, r"temperature must be in \[1e-38, 1e38\], got 0.0"),
        (of_logits, {"backend": "triton"}, "must be one of .* for backend='triton', got torch.float64"),
        (of_hidden, {"hidden": torch.zeros(B, H)}, r"hidden of shape \(3, 24\) needs rows of shape \(3,\), got None"),
        (of_hidden, {"head": torch.zeros(V, H + 1)}, r"lm_head must have shape \(37, 24\), got \(37, 25\)"),
        (of_hidden, {"head": torch.zeros(V, H).float()}, "must share a dtype, got torch.float64 and torch.f"),
        (of_hidden, {"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        (of_hidden, {"rows": torch.tensor([0, 1])}, "rows must hold each .* row 0, token 2 is there 0 times"),
        (of_hidden, {"rows": torch.tensor([0, 99])}, r"rows must be in \[0, 12\), got 0 to 99"),
        (of_hidden, {"rows": [0]}, "rows must be a tensor, got list"),
        (of_hidden, {"head": torch.nn.Linear(H, V)}, "lm_head must be a tensor, got Linear"),
    ],
)
def test_bad_input_is_refused(form, change, words, device):
    tensors, options = problem(device=device if change.get("backend") == "triton" else "cpu")
    tensors |= {name: value for name, value in change.items() if name in tensors}
    options |= {name: value for name, value in change.items() if name not in tensors}
    with pytest.raises((ValueError, TypeError), match=words):
        form(tensors, **options)


def test_a_nan_logit_in_a_counted_row_is_refused_naming_the_row():
    tensors, options = problem()
    tensors["logits"][1, 1, 3] = math.nan
    with pytest.raises(ValueError, match=r"log-prob from logits must be finite.*row 1, token 1 is nan"):
        of_logits(tensors, **options)
    tensors["hidden"][2, 0, 0] = math.inf
    with pytest.raises(ValueError, match=r"log-prob from hidden and lm_head must be finite.*row 2, token 0 is nan"):
        of_hidden(tensors, **options)


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
