"""logits_policy_loss and linear_policy_loss in a training step: chunks, frozen parts, autograd, compilation."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cfa_kernels.loss.linear import linear_policy_loss_op
from cfa_kernels.loss.logits import logits_gradient_op, logits_logprob_op
from cfa_kernels.loss.options import LEVELS, LossOptions
from cfa_kernels.loss.policy import contributing_rows, linear_policy_loss, logits_policy_loss
from cfa_kernels.ops import head_matmul, row_softmax
from cfa_kernels.ops.kept_tokens import KeptTokens
from tests.support.operator_calls import OperatorCalls
from tests.support.policy_problem import (
    COUNTED,
    FORM,
    LENGTHS,
    B,
    H,
    T,
    V,
    assert_same,
    of_hidden,
    of_logits,
    on_gpu,
    others,
    problem,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance", "level"),
    [
        *(("torch", torch.float64, 1e-13, level) for level in LEVELS), ("torch", torch.bfloat16, 1e-2, "token"),
        *(("triton", torch.float32, 2e-6, level) for level in LEVELS[:2]),
    ],
)  # fmt: skip
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
        {"rows": rows, "alone": True, "chunk_size": 3, "drop_inactive": False},
        {"rows": rows.flip(0), "alone": True, "chunk_size": 3, "drop_inactive": True},
    ):
        ours = of_hidden(tensors, **how, **options)
        assert_same(ours, whole, rtol=tolerance, atol=tolerance / 4)
        torch.testing.assert_close(ours[2], whole[2], rtol=1e-5, atol=1e-6)
        if not how.get("alone"):
            inputs = (tensors["hidden"], tensors["head"], *others(tensors))
            _, _, logprobs = linear_policy_loss(
                *inputs, bias=tensors["bias"], return_logprobs=True, validate=False, **how, **options
            )
            looked_at = (
                tensors["mask"].cpu().flatten().nonzero()[:, 0]
                if how == {"drop_inactive": False, "chunk_size": 4}
                else rows.cpu()
            )
            assert torch.equal(logprobs.cpu().isfinite().flatten().nonzero()[:, 0], looked_at)
            truth = tensors["logits"].double().log_softmax(-1).gather(-1, tensors["targets"][..., None])[..., 0]
            seen = logprobs.isfinite()
            torch.testing.assert_close(
                logprobs[seen].double(), truth[seen], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=tolerance
            )


@FORM
@pytest.mark.parametrize("entropy_coef", [0.0, 0.2])
@pytest.mark.parametrize("level", LEVELS)
def test_rows_are_the_same_a_few_at_a_time(monkeypatch, level, entropy_coef, form):
    tensors, options = problem(torch.float64, weights=True, softcap=3.0, temperature=0.7)
    options |= {"importance_sampling_level": level, "entropy_coef": entropy_coef, "compute_entropy": True}
    expected = form(tensors, **options)
    assert expected[2]["entropy"] > 0
    for numbers in (1, 2 * V * len(tensors["mask"])):
        monkeypatch.setattr(row_softmax, "_IN_CACHE", numbers)
        ours = form(tensors, **options)
        assert_same(ours, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(ours[2], expected[2], rtol=1e-12, atol=1e-14)


@pytest.fixture
def rows_through_the_head(monkeypatch):
    """A function that counts the products with the head since it last ran, in units of one row times the head."""
    sizes: list[int] = []
    multiply = head_matmul.multiply

    def counted(left, right, *args, **kwargs):
        sizes.append(left.numel() * right.size(1))
        return multiply(left, right, *args, **kwargs)

    def count() -> float:
        total = sum(sizes) / (V * H)
        sizes.clear()
        return total

    monkeypatch.setattr(head_matmul, "multiply", counted)
    return count


@pytest.mark.parametrize(
    ("level", "correction", "old", "chunk", "again"),
    [
        ("token", None, True, 8, 0), ("token", "sequence_mask", True, 3, 0), ("token", "sequence_mask", False, 8, 0),
        ("token", "geometric_mask", False, 3, 1), ("sequence", None, True, 8, 0), ("sequence", None, True, 3, 1),
    ],
)  # fmt: skip
def test_gemms_are_three_with_a_trained_head_and_two_with_a_frozen_one(
    level, correction, old, chunk, again, rows_through_the_head
):
    """What depends on a sequence makes its logits once, if a chunk holds it, or old log-probs tell its correction."""
    tensors, options = problem(torch.float32, correction=correction, old=False)
    if old:
        logits = tensors["hidden"] @ tensors["head"].T
        tensors["old"] = logits.log_softmax(-1).gather(-1, tensors["targets"][..., None])[..., 0]
    options |= {"chunk_size": chunk, "importance_sampling_level": level}
    tensors["advantages"] = torch.tensor([1.0, 0.0, -0.5])
    learning, long = 4 + 3, 4  # counted tokens of sequences with an advantage, and of those longer than a short chunk

    def gemm_rows(head_trains, **more):
        hidden, head = (tensors[name].clone().requires_grad_() for name in ("hidden", "head"))
        loss, _ = linear_policy_loss(hidden, head.requires_grad_(head_trains), *others(tensors), **options | more)
        during_forward = rows_through_the_head()
        loss.backward()
        assert rows_through_the_head() == 0  # the gradients were ready
        return during_forward

    assert gemm_rows(True) == 3 * learning + again * long
    assert gemm_rows(False) == 2 * learning + again * long
    assert gemm_rows(False, drop_inactive=False) == (2 + again) * B * T
    if old and not correction:
        tensors["old"][0, :2] -= 9  # a ratio of e^9: its gradient is 0
        assert gemm_rows(False) < 2 * learning + again * long


def operator_arguments(tensors: dict[str, Any], level: str) -> tuple[Any, ...]:
    scale = tensors["mask"].to(torch.promote_types(tensors["hidden"].dtype, torch.float32)) / COUNTED
    mode = None if level == "token" else "sequence_mask"
    options = LossOptions(importance_sampling_level=level, beta=0.1, sampling_mode=mode)
    old = tensors["old"].to(scale.dtype)
    token = (tensors["targets"], old, torch.full_like(scale, 0.5), None, old, old + 0.1)
    return token, (scale, scale.new_tensor(0.1)), (options.kinds(), options.numbers(), [0.8, 4.0], True)


@pytest.mark.parametrize(
    ("backend", "dtype", "level"), [("torch", torch.float64, "sequence"), ("triton", torch.float16, "token")]
)
def test_operators_pass_opcheck(backend, dtype, level, device, small_tiles):
    tensors, _ = problem(dtype, device)
    token, scales, options = operator_arguments(tensors, level)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    if backend == "torch":  # the tolerance of this one compares gradients of every output bit by bit
        checks += ("test_aot_dispatch_dynamic",)
    rows, targets, counted = tensors["logits"].clone(), tensors["targets"].flatten(), tensors["mask"].flatten()
    mutating = {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(logits_logprob_op, (rows, targets, counted, *options[2:], backend), **mutating)
    values = logits_logprob_op(rows, targets, counted, *options[2:], backend)
    for source in (rows.clone(), None):
        arguments = (source, rows, targets, values, values[0].clone(), None, options[2], backend)
        torch.library.opcheck(logits_gradient_op, arguments, **mutating)
    leaves = [tensors[name].clone().requires_grad_() for name in ("hidden", "head", "bias")]
    kept = KeptTokens.of([range(V)] * B * T) if level == "token" else (None, None, None)
    torch.library.opcheck(
        linear_policy_loss_op,
        (
            leaves[0].view(-1, H), *leaves[1:], *token, *kept, *scales, None, False, *options, [True] * 3, True, 4,
            backend,
        ),
        test_utils=checks,
    )  # fmt: skip


@pytest.mark.parametrize(("level", "expected"), [("token", [1, 8]), ("sequence", [0, 1, 2, 3, 8, 9, 10])])
def test_contributing_rows_look_at_counted_tokens_with_weight_only(level, expected):
    """Padding of the second sequence has an advantage, as have the last tokens of the others."""
    mask = torch.arange(T) < LENGTHS[:, None]
    advantages = torch.tensor([[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 3.0, math.nan], [1.0, 0.0, 0.0, 1.0]])
    weights = torch.ones(B, T).index_put_((torch.tensor([0]), torch.tensor([3])), torch.tensor(0.0))
    rows = contributing_rows(mask, advantages, weights=weights, importance_sampling_level=level)
    assert rows.tolist() == expected
    assert contributing_rows(mask, advantages, all_counted=True).tolist() == mask.flatten().nonzero()[:, 0].tolist()


@pytest.mark.parametrize("vocabulary", [131, 700])
@pytest.mark.parametrize("level", LEVELS)
def test_a_vocabulary_that_ends_within_a_tile_has_finite_gradients_in_bfloat16(level, vocabulary):
    """A CPU's matrix unit (AMX) multiplies what lies behind such rows: here memory that nobody wrote."""
    tensors, options = problem(torch.bfloat16, b=40, v=vocabulary)
    gradients = of_hidden(tensors, importance_sampling_level=level, **options)[1]
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_half_precision_gradients_do_not_underflow_however_many_tokens_there_are(device):
    tensors, options = problem(torch.float16, device)
    options["num_items_in_batch"] = 3_000_000  # gradients near 1e-7: below what float16 resolves
    scale = 2.0**20  # what a gradient scaler multiplies the loss with
    for form, start in ((logits_policy_loss, ("logits",)), (linear_policy_loss, ("hidden", "head"))):
        leaves = [tensors[name].clone().requires_grad_() for name in start]
        rest = others(tensors)
        (scale * form(*leaves, *rest, backend="triton", **options)[0]).backward()
        exact = [tensors[name].double().requires_grad_() for name in start]
        (scale * form(*exact, *rest, backend="torch", **options)[0]).backward()
        for leaf, reference in zip(leaves, exact, strict=True):
            error = (leaf.grad.double() - reference.grad).abs().max() / reference.grad.abs().max()
            assert error < 4e-3


def loss_of_leaves(form: str) -> tuple[Tensor, list[Tensor]]:
    tensors, options = problem()
    rest = others(tensors)
    leaves = [tensors[name].clone().requires_grad_() for name in ("hidden", "head")]
    if form == "linear":
        return linear_policy_loss(*leaves, *rest, **options)[0], leaves
    return logits_policy_loss(leaves[0] @ leaves[1].T, *rest, inplace=form == "in place", **options)[0], leaves


@pytest.mark.parametrize("form", ["logits", "in place", "linear"])
def test_backward_makes_no_zeros_that_nobody_reads_and_refuses_second_derivatives(form):
    loss, leaves = loss_of_leaves(form)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(loss, leaves, create_graph=True, retain_graph=True)
    torch._C._functions.UndefinedGrad()(loss).backward(retain_graph=True)
    assert [leaf.grad for leaf in leaves] == [None, None]
    with OperatorCalls() as operators:
        loss.backward()
    assert not any("zeros" in function.__name__ and size > B * T for function, size in operators.calls)
    assert all(leaf.grad is not None for leaf in leaves)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_autocast_runs_the_head_in_its_dtype_and_the_loss_in_float32(backend, device):
    tensors, options = problem(torch.float32, device)
    halves = {**tensors, "hidden": tensors["hidden"].bfloat16(), "head": tensors["head"].bfloat16()}
    expected = of_hidden(halves, with_bias=False, backend=backend, **options)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        ours = of_hidden(tensors, with_bias=False, backend=backend, **options)
        double = {name: tensors[name].double() for name in ("hidden", "head", "old", "advantages")}
        exact = of_hidden(tensors | double, with_bias=False, backend="torch", **options)
    assert ours[0].dtype == torch.float32
    assert ours[1][0].dtype == torch.float32
    assert_same(ours, (expected[0], [gradient.float() for gradient in expected[1]]), rtol=1e-5, atol=1e-6)
    assert exact[1][0].dtype == torch.float64
    halves = {**tensors, "logits": tensors["logits"].half()}
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        inside = of_logits(halves, backend=backend, **options)
    assert_same(inside, of_logits(halves, backend=backend, **options), rtol=1e-5, atol=1e-6)


@pytest.mark.traced
def test_every_form_compiles_into_one_graph_with_a_model_around_them(device, small_tiles):
    tensors, options = problem(torch.float32, device, entropy_coef=0.1)
    rest = others(tensors)

    def step(hidden, head, *rest):
        hidden = torch.tanh(hidden)
        linear, _ = linear_policy_loss(hidden, head, *rest, chunk_size=4, backend="triton", **options)
        logits = [
            logits_policy_loss(hidden @ head.T, *rest, inplace=there, backend="triton", **options)[0]
            for there in (False, True)
        ]
        return linear + 0.5 * logits[0] + 0.3 * logits[1]

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    results = []
    for function in (step, compiled):
        leaves = [tensors[name].clone().requires_grad_() for name in ("hidden", "head")]
        with torch._dynamo.config.patch(specialize_float=True):  # only lengths change
            loss = function(*leaves, *rest)
        (0.5 * loss).backward()
        results.append((loss.detach(), [leaf.grad for leaf in leaves]))
    assert_same(results[1], results[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("level", LEVELS)
def test_a_selective_checkpoint_around_a_loss_keeps_its_gradients(level):
    tensors, options = problem(importance_sampling_level=level, loss_type="sapo")
    leaves = [tensors[name].requires_grad_() for name in ("hidden", "head")]

    def loss(hidden, head):
        return linear_policy_loss(hidden.sin(), head, *others(tensors), **options)[0]

    policy = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)
    ours = checkpoint(loss, *leaves, use_reentrant=False, context_fn=policy)
    torch.testing.assert_close(torch.autograd.grad(ours, leaves), torch.autograd.grad(loss(*leaves), leaves))


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
def test_extra_memory_is_one_strip_and_the_outputs():
    n, h, v, chunk = 4096, 512, 65_536, 1024
    hidden = torch.randn(1, n, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(v, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(v, (1, n), device="cuda")
    _ = hidden[0, :8] @ head[:8].T  # cuBLAS keeps a workspace from its first product on
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
