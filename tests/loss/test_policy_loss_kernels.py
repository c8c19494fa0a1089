"""Values and gradients of logits_policy_loss and linear_policy_loss against float64, on inputs that break kernels."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cfa_kernels.loss import policy_rows
from cfa_kernels.loss.options import CORRECTIONS, LEVELS, LossOptions
from cfa_kernels.loss.policy import linear_policy_loss, logits_policy_loss
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
        if seed > 12:
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
    for seed in range(21):
        features = drawn_features(seed, loss_type, "token")
        features |= {"kl_estimator": "k3", "use_bias_correction_kl": False, "off_policy_mask_threshold": None}
        mode = (None, None, *CORRECTIONS)[seed % 7]
        features |= {"correction": mode, "sampling_clip_min": mode and 0.9, "sampling_clip_max": mode and 1.1}
        features["old"] |= mode is not None  # by which a correction is known beforehand
        tensors, options = problem(torch.float32, device, **features)
        for inputs in (tensors, far_out(tensors, options)):
            ours = of_hidden(inputs, backend="triton", compute_entropy=True, validate=False, **options)
            exact = plain(inputs, of_hidden, torch.float64, validate=False, **options)
            assert_same(ours, (exact[0].float(), [g.float() for g in exact[1]]), rtol=1e-4, atol=2e-5)
            for name, metric in exact[2].items():
                torch.testing.assert_close(ours[2][name], metric.float(), rtol=2e-5, atol=5e-6, msg=name)
    assert builds
    for flag in ("HAS_OLD", "HAS_WEIGHTS", "HAS_REF", "HAS_ENTROPY_SCALE"):
        assert {how[flag] for how in builds} == {True, False}, flag


def far_out(tensors: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Ratios beyond the cut-off, if there are any that no correction has folded into the weights."""
    old = tensors["old"]
    if old is None or options.get("sampling_mode"):
        return tensors
    return tensors | {"old": old + torch.tensor([0.0, 100.0, -100.0, 0.1], device=old.device)}


@pytest.mark.parametrize("form", [of_logits, of_hidden])
@pytest.mark.parametrize("wrong", ["target", "logit"])
def test_what_nobody_checks_gives_a_nan_loss(wrong, form, device):
    for level in LEVELS:
        for old in (True, False):
            tensors, options = problem(torch.float32, device, old=old, softcap=5.0, importance_sampling_level=level)
            if wrong == "target":
                tensors["targets"][0, 0] = V + 5
            else:
                tensors["logits"][0, 0, 3] = tensors["hidden"][0, 0, 3] = math.nan
            assert form(tensors, backend="triton", validate=False, **options)[0].isnan()


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
    assert room[:, vocabulary:].isnan().all()


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


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        (of_logits, {"logits": torch.zeros(B, V)}, r"logits must be \(B, T, V\) and not empty, got shape \(3, 37\)"),
        (of_logits, {"logits": torch.zeros(B, T, 0)}, r"and not empty, got shape \(3, 4, 0\)"),
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
