"""tree_attention equals plain causal attention along every path of the tree, in PyTorch and in Triton."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cfa_kernels.ops.triton_math import LOG2E
from cfa_kernels.tree import attention as module
from cfa_kernels.tree.attention import tree_attention
from cfa_kernels.tree.attention_options import AttentionRule
from cfa_kernels.tree.segment_table import SegmentTable
from tests.support.attention_problem import build, options, problem, qkv, realistic_rows, with_sinks
from tests.support.budget import assert_within_budget
from tests.support.policy_problem import on_gpu

pytestmark = pytest.mark.slow

RULE = AttentionRule(scale=1.0)
ragged_trees = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=6)


def dense_attention(q, k, v, *, scale=None, sliding_window=None, attention_chunk_size=None, softcap=None, sinks=None):
    """Causal attention of one sequence with a full mask; q (L, H, D), k (L, Hkv, D), v (L, Hkv, Dv)."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    row = torch.arange(len(q))
    distance = row[:, None] - row[None, :]
    visible = (distance >= 0) & (distance < (sliding_window or len(q) + 1))
    if attention_chunk_size is not None:
        visible &= (row[:, None] // attention_chunk_size) == (row[None, :] // attention_chunk_size)
    scores = scores.masked_fill(~visible, -torch.inf)
    total = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.to(total)[:, None, None])
    return torch.einsum("hqk,khd->qhd", (scores - total).exp(), v)


@settings(max_examples=60)
@given(ragged_trees, st.sampled_from([(4, 4), (6, 2), (3, 1)]), st.sampled_from([8, 16]), options)
def test_the_reference_equals_dense_attention_along_every_path(rows, heads, value_dim, option):
    table, paths = build(rows)
    q, k, v = qkv(table.num_rows, *heads, 16, value_dim=value_dim)
    option = with_sinks(option, heads[0])
    out = tree_attention(q, k, v, table, **option)
    assert out.shape == (table.num_rows, heads[0], value_dim)
    for path in paths:
        expected = dense_attention(q[path], k[path], v[path], **option)
        torch.testing.assert_close(out[path], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("option", "sunk"),
    [({}, False), ({"attention_chunk_size": 2}, True), ({"sliding_window": 3, "softcap": 2.0}, True)],
    ids=["plain", "chunk and sinks", "window, softcap and sinks"],
)
def test_the_reference_passes_gradcheck(option, sunk):
    table, _ = build([[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 6, 7]])
    inputs = qkv(table.num_rows, 2, 1, 3, value_dim=2)
    inputs += [torch.tensor([0.4, -1.0], dtype=torch.float64)] if sunk else []
    torch.autograd.gradcheck(
        lambda q, k, v, sinks=None: tree_attention(q, k, v, table, sinks=sinks, **option),
        [x.requires_grad_() for x in inputs],
    )


@pytest.mark.parametrize(
    ("heads", "dims", "option", "dtypes"),
    [
        ((4, 2), (64, 64), {}, (torch.float32, torch.bfloat16, torch.float16)),
        ((8, 1), (64, 64), {"sinks": torch.bfloat16, "sliding_window": 33}, (torch.bfloat16,)),
        ((6, 2), (80, 80), {"sliding_window": 19, "softcap": 2.0}, (torch.float16,)),
        ((5, 1), (128, 128), {"attention_chunk_size": 24}, (torch.bfloat16,)),
        ((3, 3), (192, 128), {"scale": 0.05}, (torch.float32,)),
        ((2, 2), (256, 256), {"softcap": 5.0, "scale": 0.2}, (torch.float16,)),
    ],
)
def test_the_kernel_stays_within_the_error_budget(heads, dims, option, dtypes, device):
    for dtype in dtypes:
        table, (q, k, v), rule = problem(realistic_rows(completions=1, length=40), heads, dims, dtype, option, device)
        ours, low = (tree_attention(q, k, v, table, backend=backend, **rule) for backend in ("triton", "torch"))
        exact = [x.double().cpu() for x in (q, k, v)]
        reference = tree_attention(*exact, table, **{n: x.cpu() if n == "sinks" else x for n, x in rule.items()})
        assert_within_budget(ours.cpu(), low.cpu(), reference)


@settings(max_examples=20)
@given(ragged_trees, st.sampled_from([(5, 5), (6, 2)]), options)
def test_the_kernel_agrees_with_the_reference_on_ragged_trees(device, rows, heads, option):
    table, inputs, sunk = problem(rows, heads, option=option, device=device)
    ours = tree_attention(*inputs, table, backend="triton", **sunk).cpu()
    exact = [x.double().cpu() for x in inputs]
    expected = tree_attention(*exact, table, **with_sinks(option, heads[0]))
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("option", [{}, {"sliding_window": 9, "softcap": 2.0}, {"attention_chunk_size": 12}])
def test_queries_from_a_segment_on_get_the_results_they_get_among_all(option, backend, device):
    rows = realistic_rows(completions=1, prompt=9, length=38)
    table, (q, k, v), _ = problem(rows, (4, 2), (16, 24), device=device)
    whole = tree_attention(q, k, v, table, backend=backend, **option)
    for row in table.row_start.tolist():
        last = tree_attention(q[row:], k, v, table, first_query_row=row, backend=backend, **option)
        assert torch.equal(last, whole[row:])


# A logit times this and the kernel's LOG2E is the logit itself, to the last bit of float32.
SCALE_OF_ONE = next(
    float(scale)
    for scale in np.nextafter(np.float32(1 / LOG2E), np.array([0, 1 / LOG2E, 1], dtype=np.float32))
    if scale * np.float32(LOG2E) == 1
)


def attend_in_packs(rows, packs, values, **option):
    """Results (L, H, D) of every sequence of `rows`, computed in packs of some of them each.

    `values` gives q, k, v by token; equal beginnings are equal tokens.
    """
    tokens = {prefix: i for i, prefix in enumerate(sorted({tuple(r[: i + 1]) for r in rows for i in range(len(r))}))}
    q, k, v = values([len(prefix) - 1 for prefix in tokens])
    results = {}
    for pack in packs:
        table, paths = build([rows[i] for i in pack])
        where = torch.zeros(table.num_rows, dtype=torch.long)
        for i, path in zip(pack, paths, strict=True):
            where[path] = torch.tensor([tokens[tuple(rows[i][: j + 1])] for j in range(len(rows[i]))])
        out = tree_attention(q[where], k[where], v[where], table, backend="triton", **option).cpu()
        results |= {i: out[path] for i, path in zip(pack, paths, strict=True)}
    return [results[i] for i in range(len(rows))]


def exact_values(block: int, device):
    """Queries, keys and values with exact sums within a block of keys, whatever their order, but not across blocks.

    A logit is a small integer plus one that belongs to the key's block: the probabilities of a block are powers of
    two that lie close together, those of other blocks lie far away, and the values have many bits.
    """

    def values(positions):
        random = np.random.default_rng(0)
        q, k, v = np.zeros((3, len(positions), 2, 16), dtype=np.float32)
        q[..., 0], k[..., 0] = 1, np.array(positions)[:, None] // block * 13 % 23
        q[..., 1:3], k[..., 1:3] = random.integers(0, 2, (2, len(positions), 2, 2))
        v[:] = random.integers(-4095, 4096, v.shape)
        return torch.from_numpy(q).to(device), *(torch.from_numpy(x[:, :1].copy()).to(device) for x in (k, v))

    return values


def assert_the_same_bits_in_any_pack(values, **option):
    rows = realistic_rows(completions=2, prompt=21, length=43)
    packings = [[i] for i in range(6)], [range(6)], [range(5, -1, -1)]
    for alone, *others in zip(*(attend_in_packs(rows, packs, values, **option) for packs in packings), strict=True):
        assert all(torch.equal(alone, other) for other in others)


@pytest.mark.parametrize(
    "option", [{}, {"sliding_window": 23}, {"attention_chunk_size": 23}], ids=["full", "window", "chunk"]
)
def test_a_rows_result_is_bitwise_the_same_in_any_pack(option, device):
    """The same sequence alone, and as one of many that share its prompt and parts of its completion.

    What is summed within a block of keys is exact here, so the bits show where blocks are cut and in which order
    they come, and nothing of how a matrix product on a CPU rounds.
    """
    block = module.launch_options(module.architecture(device), torch.float32, 16, 16, 2, RULE.kinds)["BLOCK_N"]
    assert_the_same_bits_in_any_pack(exact_values(block, device), scale=SCALE_OF_ONE, **option)


@on_gpu
@pytest.mark.parametrize("option", [{}, {"sliding_window": 23}, {"softcap": 3.0}], ids=["full", "window", "softcap"])
def test_a_rows_result_is_bitwise_the_same_in_any_pack_for_any_values(option):
    def values(positions):
        return qkv(len(positions), 4, 2, 64, torch.bfloat16, device="cuda")

    assert_the_same_bits_in_any_pack(values, **option)


def valid(device):
    table, inputs, _ = problem([[1, 2, 3], [1, 4]], (4, 2), device=device)
    return dict(zip("qkv", inputs, strict=True), table=table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"q": a["q"][0]}, r"takes q \(N, H, D\)"),
        (lambda a: {n: a[n][:2] for n in "qkv"}, "table has 4 rows, q 2 and k 2"),
        (lambda a: {"first_query_row": 3}, "table has 4 rows, q 4 after 3 rows without queries and k 4"),
        (lambda a: {"q": a["q"][2:], "first_query_row": 2}, "first row of a segment, but row 2 is inside segment 0"),
        (lambda a: {"q": a["q"][:0], "first_query_row": 4}, "must be one of the 4 rows of the table, got 4"),
        (lambda a: {"q": a["q"][:, :3]}, "do not fit those of k"),
        (lambda a: {"k": a["k"].double()}, "must share one dtype"),
        (lambda a: {"scale": 0.0}, "scale must be positive, got 0.0"),
        (lambda a: {"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        (lambda a: {"attention_chunk_size": 8, "sliding_window": 4}, "4 and attention_chunk_size 8 exclude each other"),
        (lambda a: {"softcap": 0.0}, "softcap must be positive, got 0.0"),
        (lambda a: {"sinks": torch.zeros(2)}, r"sinks must be floats, one per head of q \(4, 16\), got .* \(2,\)"),
        (lambda a: {"sinks": torch.zeros(4, device="meta")}, "sinks must be on q's device c.*, got meta"),
        (lambda a: {"v": a["v"][..., :12], "backend": "triton"}, "q and v: head dimensions 16 and 12; each"),
        (lambda a: {n: a[n].repeat(1, 1, 17) for n in "qk"} | {"backend": "triton"}, "q and v: .* 272 and 16"),
        (lambda a: {n: a[n].double() for n in "qkv"} | {"backend": "triton"}, "dtype torch.float64 is not one of"),
        (lambda a: {"q": a["q"].mT.contiguous().mT, "backend": "triton"}, "q: the head dim"),
    ],
)
def test_unsupported_input_is_refused_by_name(change, message, device):
    arguments = valid(device)
    with pytest.raises(ValueError, match=message):
        tree_attention(**arguments | change(arguments))


@on_gpu
def test_offsets_beyond_two_to_the_31_elements_are_right():
    """Queries of more than 2**31 elements; only the last rows are checked."""
    length, heads, dim = 70_000, 32, 1024 // 4
    rows = length * 4
    columns = (np.arange(4) * length, np.full(4, length), np.zeros(4), np.zeros(4), np.zeros(0))
    table = SegmentTable(*(column.astype(np.int32) for column in columns))
    q = torch.randn(rows, heads, dim, device="cuda", dtype=torch.bfloat16)
    assert q.numel() > 2**31
    k, v = torch.randn(2, rows, 1, dim, device="cuda", dtype=torch.bfloat16).unbind()
    out = tree_attention(q, k, v, table, sliding_window=64)
    tail = slice(rows - 200, rows)
    expected = dense_attention(*(x[tail].double().cpu() for x in (q, k, v)), sliding_window=64)
    torch.testing.assert_close(out[tail][100:].double().cpu(), expected[100:], rtol=0, atol=2e-2)
