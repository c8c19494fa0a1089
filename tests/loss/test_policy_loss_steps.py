"""logits_policy_loss and linear_policy_loss in a training step: chunks, frozen parts, autograd, compilation."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cfa_kernels.loss.linear import linear_policy_loss_op
from cfa_kernels.loss.logits import logits_policy_loss_op, scale_rows_op
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


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("level", LEVELS)
def test_logprobs_are_handed_out_where_the_loss_looked(backend, level, device):
    tensors, options = problem(torch.float32, device)
    tensors["advantages"] = torch.tensor([1.0, 0.0, -0.5], device=device)
    rest = others(tensors)
    options |= {"importance_sampling_level": level, "backend": backend, "return_logprobs": True}
    truth = tensors["logits"].double().log_softmax(-1).gather(-1, tensors["targets"][..., None])[..., 0].float()
    counted = tensors["mask"].bool()
    needed = counted & (tensors["advantages"] != 0)[:, None]
    rows = contributing_rows(tensors["mask"], tensors["advantages"], importance_sampling_level=level)
    for how, seen in (
        ({"drop_inactive": False}, counted),
        ({"drop_inactive": True}, needed),
        ({"rows": rows, "drop_inactive": False}, needed),
    ):
        inputs = (tensors["hidden"], tensors["head"], *rest)
        _, _, logprobs = linear_policy_loss(*inputs, bias=tensors["bias"], **how, **options)
        assert not logprobs.requires_grad
        assert torch.equal(logprobs.isfinite(), seen)
        torch.testing.assert_close(logprobs[seen], truth[seen], rtol=1e-5, atol=1e-5)


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
    ("where", "level", "backend", "correction"),
    [
        *((where, level, "torch", mode)
          for where in ("short sequences", "long", "long with old log-probs", "device's rows", "host's rows")
          for level in LEVELS[:2] for mode in (None, "sequence_mask")),
        ("short sequences", "token", "torch", "geometric_mask"), ("long", "token", "torch", "geometric_mask"),
        ("short sequences", "token", "triton", "sequence_mask"), ("device's rows", "token", "triton", "sequence_mask"),
    ],
)  # fmt: skip
def test_gemms_are_three_with_a_trained_head_and_two_with_a_frozen_one(
    rows_through_the_head, level, backend, correction, where, device
):
    """What depends on a sequence makes its logits once, if a chunk holds it and the host knows where it ends.

    Old log-probs tell a sequence's correction beforehand.
    """
    tensors, options = problem(torch.float32, device, old=False, correction=correction)
    if where == "long with old log-probs":
        logits = tensors["hidden"] @ tensors["head"].T
        tensors["old"] = logits.log_softmax(-1).gather(-1, tensors["targets"][..., None])[..., 0]
    chunk = 3 if where.startswith("long") else 8 if where == "short sequences" else 4
    options |= {"backend": backend, "chunk_size": chunk, "importance_sampling_level": level}
    tensors["advantages"] = torch.tensor([1.0, 0.0, -0.5], device=device)
    learning = 4 + 3  # counted tokens of sequences with an advantage
    by_sequence = level == "sequence" or (correction is not None and tensors["old"] is None)
    if where.endswith("rows"):
        counted, advantages = tensors["mask"].cpu(), tensors["advantages"].cpu()
        rows = contributing_rows(counted, advantages, whole_rows=by_sequence)
        # rows that are not in order are what the host sees of those on a device
        options["rows"] = rows if where == "host's rows" else rows.flip(0).to(device)
    of_long = B * T, 4 if device.type == "cpu" else learning  # rows that are found on a GPU stay there
    again = {"long": of_long, "long with old log-probs": of_long, "device's rows": (learning, learning)}
    all_again, some_again = again.get(where, (0, 0)) if by_sequence else (0, 0)
    every = learning if where.endswith("rows") else B * T

    def gemm_rows(hidden_trains, head_trains, drop):
        hidden = tensors["hidden"].clone().requires_grad_(hidden_trains)
        head = tensors["head"].clone().requires_grad_(head_trains)
        loss, _ = linear_policy_loss(hidden, head, *others(tensors), drop_inactive=drop, **options)
        during_forward = rows_through_the_head()
        if loss.requires_grad:
            loss.backward()
        assert rows_through_the_head() == 0  # the gradients were ready
        return during_forward

    assert gemm_rows(True, True, False) == 3 * every + all_again
    assert gemm_rows(True, False, False) == 2 * every + all_again
    assert gemm_rows(True, True, True) == 3 * learning + some_again
    assert gemm_rows(True, False, True) == 2 * learning + some_again
    assert gemm_rows(False, False, True) == learning


CLIPPED = [
    # in chunks of 11 rows, of which the last has 4: all, one in the middle, the ends, two inside, the last one
    ("token", [*range(11), 16, 22, 32, 38, 39, 47], 11 + 9 + 9 + 3),
    # sequences of 12 rows, each a chunk and a row of its own, 0 and 2 of them
    ("sequence", [*range(12), *range(24, 36)], 2 * 12),
]


@pytest.mark.parametrize("source", ["no rows", "rows", "rows alone"])
@pytest.mark.parametrize("head_trains", [False, True], ids=["frozen head", "trained head"])
@pytest.mark.parametrize(("level", "clipped", "remaining"), CLIPPED)
def test_clipped_rows_are_cut_out_of_a_chunk_if_they_are_a_tenth_of_it(
    level, clipped, remaining, head_trains, source, rows_through_the_head, device
):
    tensors, options = problem(torch.float32, device, b=4, t=12)
    tensors["mask"] = torch.ones(4, 12, dtype=torch.bool, device=device)
    tensors["advantages"] = torch.ones(4, device=device)
    old = tensors["logits"].log_softmax(-1).gather(-1, tensors["targets"][..., None])[..., 0]
    old.view(-1)[clipped] -= 5  # a ratio of e^5: its gradient is 0
    tensors["old"] = old
    options |= {"importance_sampling_level": level, "chunk_size": 11}
    options["rows"] = None if source == "no rows" else torch.arange(48, device=device)

    def run(drop):
        hidden = tensors["hidden"].clone().requires_grad_()
        head = tensors["head"].clone().requires_grad_(head_trains)
        states = hidden.flatten(0, 1) if source == "rows alone" else hidden
        loss, _ = linear_policy_loss(
            states, head, *others(tensors), bias=tensors["bias"], drop_inactive=drop, **options
        )
        loss.backward()
        return loss.detach(), [leaf.grad for leaf in (hidden, head) if leaf.requires_grad]

    ours = run(drop=True)
    if level == "sequence" and device.type == "cuda":
        remaining += 1  # in strips of 11 whatever sequences are, one of which has a single clipped row
    forward, gradients = 48 * (2 if level == "sequence" else 1), 2 if head_trains else 1
    assert rows_through_the_head() == forward + gradients * remaining
    assert_same(ours, run(drop=False), rtol=1e-5, atol=1e-7)
    assert rows_through_the_head() == forward + gradients * 48
    assert (ours[1][0].view(48, -1)[clipped] == 0).all()


@pytest.mark.parametrize("validate", [None, False])
@pytest.mark.parametrize("alone", [False, True])
def test_rows_of_a_mask_laid_out_by_columns(alone, validate, device):
    tensors, options = problem(torch.float64, device)
    rows = contributing_rows(tensors["mask"], tensors["advantages"])
    options |= {"rows": rows, "alone": alone, "validate": validate, "backend": "torch"}
    expected = of_hidden(tensors, **options)
    tensors["mask"] = tensors["mask"].t().contiguous().t()
    assert_same(of_hidden(tensors, **options), expected, rtol=1e-13, atol=1e-15)
    inputs = (tensors["hidden"], tensors["head"], *others(tensors))
    _, _, logprobs = linear_policy_loss(*inputs, rows=rows, return_logprobs=True, validate=validate, backend="torch")
    assert logprobs.isfinite().flatten().nonzero().squeeze(1).tolist() == rows.tolist()


@pytest.mark.parametrize(("level", "expected"), [("token", [1, 8]), ("sequence", [0, 1, 2, 3, 8, 9, 10])])
def test_contributing_rows_look_at_counted_tokens_with_weight_only(level, expected):
    """Padding of the second sequence has an advantage, as have the last tokens of the others."""
    mask = torch.arange(T) < LENGTHS[:, None]
    advantages = torch.tensor([[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 3.0, math.nan], [1.0, 0.0, 0.0, 1.0]])
    weights = torch.ones(B, T).index_put_((torch.tensor([0]), torch.tensor([3])), torch.tensor(0.0))
    rows = contributing_rows(mask, advantages, weights=weights, importance_sampling_level=level)
    assert rows.tolist() == expected
    assert contributing_rows(mask, advantages, all_counted=True).tolist() == mask.flatten().nonzero()[:, 0].tolist()


@pytest.mark.parametrize("level", LEVELS)
def test_an_odd_vocabulary_in_bfloat16_has_finite_gradients(level):
    """A CPU's matrix unit (AMX) multiplies what lies behind rows of odd length: here memory that nobody wrote."""
    tensors, options = problem(torch.bfloat16, b=40, v=131)
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


@FORM
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_loss_is_the_same_without_gradients_and_records_nothing(backend, form, device):
    tensors, options = problem(torch.float32, device)
    expected, *_ = form(tensors, backend=backend, **options)
    with torch.no_grad():
        if form is of_hidden:
            inputs = (tensors["hidden"].requires_grad_(), tensors["head"], *others(tensors))
            loss, _ = linear_policy_loss(*inputs, bias=tensors["bias"], backend=backend, **options)
        else:
            loss, _ = logits_policy_loss(
                tensors["logits"].requires_grad_(), *others(tensors), backend=backend, **options
            )
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected)


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
    assert not any("zeros" in function.__name__ for function, _ in operators.calls)
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
    tensors_fp16 = {**tensors, "logits": tensors["logits"].half()}
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        inside = of_logits(tensors_fp16, backend=backend, **options)
    assert_same(inside, of_logits(tensors_fp16, backend=backend, **options), rtol=1e-5, atol=1e-6)


def operator_arguments(tensors: dict[str, Any], dtype: torch.dtype, level: str) -> tuple[Any, ...]:
    flat = {name: tensors[name].reshape(-1) for name in ("targets", "old")}
    scale = tensors["mask"].to(dtype).reshape(-1) / COUNTED
    options = LossOptions(importance_sampling_level=level, beta=0.1, sampling_mode=f"{level}_mask")
    token = (
        flat["old"].to(dtype), torch.full_like(scale, 0.5), None, flat["old"].to(dtype), flat["old"].to(dtype) + 0.1,
        scale, scale.new_tensor(0.1),
    )  # fmt: skip
    return (flat["targets"], *token), (options.kinds(), options.numbers(), [0.8, 4.0], True)


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
    rows, factor = tensors["logits"].clone(), torch.tensor(0.5, device=device, dtype=exact)
    for source in (rows.clone(), None):
        mutating = {"test_utils": ("test_schema", "test_faketensor")}
        torch.library.opcheck(logits_policy_loss_op, (source, rows, *token, *options, backend), **mutating)
        torch.library.opcheck(scale_rows_op, (source, factor, rows, backend), **mutating)
    leaves = [tensors[name].clone().requires_grad_() for name in ("hidden", "head", "bias")]
    kept = KeptTokens.of([range(V)] * B * T) if level == "token" else (None, None, None)
    grid = [tensor.view(B, T) if isinstance(tensor, Tensor) and tensor.numel() == B * T else tensor for tensor in token]
    torch.library.opcheck(
        linear_policy_loss_op,
        (
            leaves[0].view(-1, H), *leaves[1:], *grid[:6], *kept, *grid[6:], None, False, *options, [True] * 3, True, 4,
            backend,
        ),
        test_utils=checks,
    )  # fmt: skip


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
