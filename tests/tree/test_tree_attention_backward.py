"""Gradients of tree_attention by its kernels equal those of the reference, which pass gradcheck."""

from contextlib import contextmanager
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cfa_kernels.tree import attention_backward as module
from cfa_kernels.tree.attention import tree_attention, tree_attention_backward_op, tree_attention_op
from cfa_kernels.tree.segment_table import SegmentTable
from tests.support.attention_problem import options, problem, qkv, realistic_rows
from tests.support.budget import assert_within_budget
from tests.support.policy_problem import on_gpu

pytestmark = pytest.mark.slow

NAMES = ("out", "q", "k", "v", "sinks")

# Float32 tiles have 16 keys: cuts before, at and behind the edge of one, one-row segments, branches of branches.
TREES = {
    "one row": [[1]],
    "edges": [[*range(35)], *([*range(cut), 99, 98] for cut in (1, 15, 16, 17, 32))],
    "one-row segments": [[1, 2], [1, 3], [1, 2, 4], [1, 2, 4, 5], [1, 2, 4, 6], [7]],
    "deep": [[*range(9)], [*range(6), 50, *range(6)], [*range(6), 50, *range(3), 60, 61], [*range(6), 50, 0, 70]],
    "a prompt under many": [[*range(18), 50 + i, *range(i % 4)] for i in range(8)],
}


def by_out(out: Tensor) -> Tensor:
    """An upstream gradient of N(0, 1), the same for every dtype and device."""
    values = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return values.to(out.device, out.dtype)


def gradients(inputs, table: SegmentTable, backend: str, **option) -> dict[str, Tensor]:
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    if "sinks" in option:
        option["sinks"] = option["sinks"].detach().clone().requires_grad_()
    out = tree_attention(*inputs, table, backend=backend, **option)
    wanted = inputs + [option[name] for name in ("sinks",) if name in option]
    tensors = (out, *torch.autograd.grad(out, wanted, by_out(out)))
    return {name: x.detach().cpu() for name, x in zip(NAMES, tensors, strict=False)}


def exact_gradients(inputs, table: SegmentTable, **option) -> dict[str, Tensor]:
    exact = {name: x.double().cpu() if name == "sinks" else x for name, x in option.items()}
    return gradients([x.double().cpu() for x in inputs], table, "torch", **exact)


def assert_exact(ours: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 5e-6) -> None:
    assert ours.keys() == expected.keys()
    for name, x in ours.items():
        largest = max(1.0, expected[name].abs().max().item())
        error = (x.double() - expected[name].double()).abs().max().item()
        assert error <= max(tolerance, torch.finfo(x.dtype).eps) * largest, (
            f"{name}: error {error:.3g} beside values up to {largest:.3g}"
        )


def trained(*shape, **options) -> tuple[SegmentTable, list[Tensor]]:
    table, inputs, _ = problem(*shape, **options)
    return table, [x.requires_grad_() for x in inputs]


def rows_per_program(rows: int):
    return mock.patch.object(module, "QUERY_ROWS_PER_PROGRAM", rows)


small_trees = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=3)
HEADS = [(1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (6, 2)]


@settings(max_examples=10)
@given(small_trees, st.sampled_from(HEADS), options, st.sampled_from([1, 32, 4096]))
def test_the_kernels_agree_with_the_reference_on_ragged_trees(device, rows, heads, option, per_program):
    table, inputs, option = problem(rows, heads, (16, 8), option=option, device=device)
    with rows_per_program(per_program):
        assert_exact(gradients(inputs, table, "triton", **option), exact_gradients(inputs, table, **option), 2e-5)


CUT = {"plain": {}, "window": {"sliding_window": 7, "softcap": 1.5},
       "chunk": {"attention_chunk_size": 11, "sinks": torch.float32}}  # fmt: skip


@pytest.mark.parametrize(
    ("tree", "option"),
    [
        *((tree, option) for tree in ("edges", "a prompt under many") for option in CUT),
        ("one row", "chunk"), ("one-row segments", "window"), ("deep", "plain"), ("deep", "chunk"),
    ],
)  # fmt: skip
def test_edges_of_tiles_and_of_segments_lose_no_gradient(tree, option, device, poisoned_memory):
    table, inputs, option = problem(TREES[tree], option=CUT[option], device=device)
    with rows_per_program(48):
        ours = gradients(inputs, table, "triton", **option)
    assert_exact(ours, exact_gradients(inputs, table, **option))
    assert torch.equal(ours["out"], tree_attention(*inputs, table, backend="triton", **option).cpu())


@pytest.mark.parametrize("dims", [(8, 8), (24, 16), (16, 40), (80, 72), (192, 128), (112, 256), (256, 200)])
def test_results_and_gradients_of_any_width_agree_with_the_reference(dims, device, poisoned_memory):
    table, inputs, _ = problem([[*range(19), 1], [*range(11), 99, *range(5)]], (3, 1), dims, device=device)
    assert_exact(gradients(inputs, table, "triton"), exact_gradients(inputs, table))


@pytest.mark.parametrize(
    ("heads", "dims", "option", "dtype"),
    [
        ((4, 2), (64, 64), {}, torch.bfloat16),
        ((8, 1), (32, 32), {"sinks": torch.bfloat16, "sliding_window": 13}, torch.float16),
        ((3, 1), (48, 80), {"softcap": 2.0, "attention_chunk_size": 24}, torch.bfloat16),
        ((2, 2), (256, 128), {"softcap": 5.0, "scale": 0.2}, torch.float16),
    ],
)
def test_gradients_stay_within_the_error_budget(heads, dims, option, dtype, device):
    rows = realistic_rows(completions=1, prompt=19, length=38)
    table, inputs, option = problem(rows, heads, dims, dtype, option, device)
    ours, low = (gradients(inputs, table, backend, **option) for backend in ("triton", "torch"))
    expected = exact_gradients(inputs, table, **option)
    for name in expected:
        assert ours[name].dtype == low[name].dtype
        assert_within_budget(ours[name], low[name], expected[name])


@contextmanager
def reversed_work():
    """Programs run from the last entry of their work lists to the first."""
    on_device, key_work = SegmentTable.on_device, SegmentTable.key_work_on_device

    def turned(self, *arguments):
        work, *rest = on_device(self, *arguments)
        return work.flip(0).contiguous(), *rest

    def turned_keys(self, *arguments):
        work, splits, *rest = key_work(self, *arguments)
        return work.flip(0).contiguous(), splits.flip(0).contiguous(), *rest

    with mock.patch.multiple(SegmentTable, on_device=turned, key_work_on_device=turned_keys):
        yield


@pytest.mark.parametrize(
    "option", [{}, {"sliding_window": 5, "sinks": torch.float32}], ids=["plain", "window and sinks"]
)
def test_gradients_have_the_same_bits_in_whatever_order_programs_run(option, device):
    table, inputs, option = problem(TREES["a prompt under many"], option=option, device=device)
    with rows_per_program(32):
        first, again = (gradients(inputs, table, "triton", **option) for _ in range(2))
        with reversed_work():
            turned = gradients(inputs, table, "triton", **option)
    for name, bits in first.items():
        assert torch.equal(bits, again[name]), name
        assert torch.equal(bits, turned[name]), name


@on_gpu
@pytest.mark.parametrize("option", [{}, {"sliding_window": 33, "softcap": 3.0}], ids=["plain", "window and softcap"])
def test_gradients_of_many_rows_are_the_same_bits_every_time(option):
    rows = realistic_rows(completions=24, prompt=300, length=400)
    table, inputs, _ = problem(rows, (8, 2), (128, 128), torch.bfloat16, device="cuda")
    first = gradients(inputs, table, "triton", **option)
    low, expected = gradients(inputs, table, "torch", **option), exact_gradients(inputs, table, **option)
    for name in first:
        assert_within_budget(first[name], low[name], expected[name])
    for _ in range(10):
        again = gradients(inputs, table, "triton", **option)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_what_is_not_finite_in_a_row_stays_out_of_the_tiles_that_do_not_see_it(device):
    """Tiles that few rows see are filled up with a row, whose probabilities of 0 times infinity would be nan."""
    table, inputs = trained([[*range(20)], [*range(16), 50, 51]], device=device)
    out = tree_attention(*inputs, table, backend="triton")
    upstream = by_out(out).index_fill(0, torch.tensor([0], device=device), 0.0)
    expected = torch.autograd.grad(out, inputs, upstream, retain_graph=True)
    upstream[0] = torch.inf
    for ours, finite in zip(torch.autograd.grad(out, inputs, upstream), expected, strict=True):
        assert torch.equal(ours[16:], finite[16:])  # segments that the first row does not see


def test_partial_sums_stay_within_their_bound_and_the_gradients_are_the_same(monkeypatch, device):
    table, inputs, _ = problem(TREES["a prompt under many"], device=device)
    counts, key_work = [], SegmentTable.key_work_on_device

    def counted(self, *arguments):
        *work, n_parts = key_work(self, *arguments)
        counts.append(n_parts)
        return *work, n_parts

    monkeypatch.setattr(SegmentTable, "key_work_on_device", counted)
    part = 4 * 16 * (16 + 16)  # bytes of a tile's sums
    with rows_per_program(8):
        for most in (2**30, 9 * part, 0):
            monkeypatch.setattr(module, "PARTIAL_SUM_BYTES", most)
            assert_exact(gradients(inputs, table, "triton"), exact_gradients(inputs, table))
    assert counts[0] > 9 >= counts[1] > counts[2] == 0


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2", "ignore:invalid value encountered")
def test_sinks_far_from_the_logits_have_finite_gradients(device):
    table, inputs, _ = problem([[1, 2, 3, 4], [1, 2, 5]], (4, 2), device=device)
    sinks = torch.tensor([-torch.inf, -1e4, 30.0, 1e4], device=device)
    assert_exact(gradients(inputs, table, "triton", sinks=sinks), exact_gradients(inputs, table, sinks=sinks))


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ((1, 0), "segment 1: its context holds row 1 at position 0; gradients need"),
        ((0, 2), "segment 1: its context holds row 2 at position 1"),
    ],
)
def test_a_context_that_is_no_beginning_of_a_path_has_no_gradient(context, message, device):
    table = SegmentTable(*(np.array(column, dtype=np.int32) for column in ([0, 3], [3, 1], [0, 0], [0, 2], context)))
    q, k, v = qkv(4, 2, 1, 16, torch.float32, device=device)
    assert torch.isfinite(tree_attention(q, k, v, table, backend="triton")).all()
    with pytest.raises(ValueError, match=message):
        tree_attention(q.requires_grad_(), k, v, table, backend="triton")


@pytest.mark.parametrize("sinks", [True, False], ids=["sinks", "none"])
def test_the_operators_pass_opcheck(sinks, device):
    table, (q, k, v) = trained([[1, 2], [1, 4]], (4, 2), (16, 24), device=device)
    drain = torch.ones(4, device=device).requires_grad_() if sinks else None
    arguments = (q, k, v, drain, table.handle, table.segments, table.contexts, 0.25, None, 2, None)
    torch.library.opcheck(tree_attention_op, (*arguments, 0, True))
    detached = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    torch.library.opcheck(tree_attention_op, (*detached, 0, False))
    out, lse = tree_attention_op(*detached, 0, True)
    backward = (by_out(out), *detached[:4], out, lse, *detached[4:])
    torch.library.opcheck(tree_attention_backward_op, backward, test_utils=["test_schema", "test_faketensor"])


@pytest.mark.traced
def test_one_compiled_function_serves_every_table(device):
    def attend(q, k, v, table):
        return tree_attention(q * 2.0, k, v, table, sliding_window=9, backend="triton").sin()

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for tree in ("deep", "one-row segments", "a prompt under many"):
            table, inputs = trained(TREES[tree], device=device)
            outputs = [run(*inputs, table) for run in (attend, compiled)]
            plain, traced = (torch.autograd.grad(out, inputs, by_out(out)) for out in outputs)
            assert torch.equal(*outputs)
            torch.testing.assert_close(plain, traced, rtol=0, atol=0)


@pytest.mark.traced
@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "selective"])
def test_a_checkpoint_keeps_the_gradients(kind, device):
    table, inputs = trained(TREES["deep"], device=device)

    def attend(q, k, v):
        return tree_attention(q.sin(), k.sin(), v.sin(), table, backend="triton").sin()

    def keep(_, operator, *args, **kwargs):
        is_attention = operator == torch.ops.cfa_kernels.tree_attention.default
        return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE

    expected = torch.autograd.grad(attend(*inputs).sum(), inputs)
    extra = {"context_fn": partial(create_selective_checkpoint_contexts, keep)} if kind == "selective" else {}
    out = checkpoint(attend, *inputs, use_reentrant=kind == "reentrant", **extra)
    out.sum().backward()
    for x, gradient in zip(inputs, expected, strict=True):
        assert torch.equal(x.grad, gradient)
