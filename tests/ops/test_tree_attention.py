"""tree_attention equals plain causal attention along every path of the tree, in PyTorch and in Triton."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cfa_kernels.ops.segment_table import SegmentTable
from cfa_kernels.ops.tree_attention import tree_attention
from cfa_kernels.tree import PrefixTree
from tests.ops.budget import assert_within_budget

ragged_trees = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=6)
options = st.fixed_dictionaries(
    {
        "scale": st.sampled_from([None, 0.3]),
        "sliding_window": st.sampled_from([None, 1, 3, 17]),
        "softcap": st.sampled_from([None, 2.0]),
    }
)


def build(rows) -> tuple[SegmentTable, list[torch.Tensor]]:
    tree = PrefixTree()
    paths = [torch.from_numpy(tree.insert(np.array(row, dtype=np.int64)).astype(np.int64)) for row in rows]
    return tree.table(), paths


def realistic_rows(seed=0, completions=3, prompt=37, length=70):
    """Prompt, completions that partly share a prefix, branches that start mid-completion."""
    random = np.random.default_rng(seed)
    start = random.integers(0, 50, prompt).tolist()
    rows = []
    for i in range(completions):
        own = random.integers(0, 50, length - 7 * i).tolist()
        if i == 2:
            own[:21] = rows[0][prompt : prompt + 21]
        rows.append(start + own)
        for first in (5, 31):
            rows.append(start + own[:first] + [99] * 6 + own[first + 6 :])
    return rows


def qkv(rows: int, heads: int, kv_heads: int, dim: int, dtype=torch.float64, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, heads, dim), (rows, kv_heads, dim), (rows, kv_heads, dim)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


def dense_attention(q, k, v, *, scale=None, sliding_window=None, softcap=None):
    """Causal attention of one sequence with a full mask; q (L, H, D), k and v (L, Hkv, D)."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None, :]
    visible = (distance >= 0) & (distance < (sliding_window or len(q) + 1))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


@settings(max_examples=60, deadline=None)
@given(ragged_trees, st.sampled_from([(4, 4), (6, 2), (3, 1)]), options)
def test_the_reference_equals_dense_attention_along_every_path(rows, heads, option):
    table, paths = build(rows)
    q, k, v = qkv(table.num_rows, *heads, 16)
    out = tree_attention(q, k, v, table, **option)
    for path in paths:
        expected = dense_attention(q[path], k[path], v[path], **option)
        torch.testing.assert_close(out[path], expected, rtol=0, atol=1e-12)


def test_the_reference_cuts_long_segments_without_changing_the_result(monkeypatch):
    table, _ = build(realistic_rows())
    q, k, v = qkv(table.num_rows, 4, 2, 16)
    whole = tree_attention(q, k, v, table, sliding_window=40)
    monkeypatch.setattr("cfa_kernels.ops.tree_attention._REFERENCE_BLOCK", 8)
    torch.testing.assert_close(tree_attention(q, k, v, table, sliding_window=40), whole, rtol=0, atol=1e-12)


def test_the_reference_passes_gradcheck():
    table, _ = build([[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 6, 7]])
    inputs = [x.requires_grad_() for x in qkv(table.num_rows, 2, 1, 4)]
    torch.autograd.gradcheck(lambda q, k, v: tree_attention(q, k, v, table, sliding_window=3, softcap=2.0), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("heads", "dim", "option"),
    [
        ((4, 2), 64, {}),
        ((6, 2), 80, {"sliding_window": 19, "softcap": 2.0}),
        ((3, 1), 96, {"sliding_window": 1}),
        ((8, 1), 128, {"softcap": 5.0, "scale": 0.2}),
        ((2, 2), 256, {"sliding_window": 64}),
    ],
)
def test_the_kernel_stays_within_the_error_budget(heads, dim, option, dtype, device):
    table, _ = build(realistic_rows())
    q, k, v = qkv(table.num_rows, *heads, dim, dtype, device=device)
    ours = tree_attention(q, k, v, table, backend="triton", **option)
    low = tree_attention(q, k, v, table, backend="torch", **option)
    reference = tree_attention(q.double().cpu(), k.double().cpu(), v.double().cpu(), table, **option)
    assert_within_budget(ours.cpu(), low.cpu(), reference)


@settings(max_examples=12, deadline=None)
@given(ragged_trees, st.sampled_from([(5, 5), (6, 2)]), options)
def test_the_kernel_agrees_with_the_reference_on_ragged_trees(rows, heads, option):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table, _ = build(rows)
    q, k, v = qkv(table.num_rows, *heads, 16, torch.float32, device=device)
    ours = tree_attention(q, k, v, table, backend="triton", **option).cpu()
    expected = tree_attention(q.double().cpu(), k.double().cpu(), v.double().cpu(), table, **option)
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("option", [{}, {"sliding_window": 23}], ids=["full", "window"])
def test_a_rows_result_is_bitwise_the_same_in_any_pack(option, device):
    """The same sequence alone, and as one of many that share its prompt and parts of its completion."""
    rows = realistic_rows()
    tokens = {
        token: i for i, token in enumerate(sorted({tuple(row[: i + 1]) for row in rows for i in range(len(row))}))
    }
    values = qkv(len(tokens), 4, 2, 64, torch.float32)

    def attend(some_rows):
        table, paths = build(some_rows)
        where = torch.zeros(table.num_rows, dtype=torch.long)
        for row, path in zip(some_rows, paths, strict=True):
            where[path] = torch.tensor([tokens[tuple(row[: i + 1])] for i in range(len(row))])
        q, k, v = (x[where].to(device) for x in values)
        out = tree_attention(q, k, v, table, backend="triton", **option).cpu()
        return [out[path] for path in paths]

    together = attend(rows)
    backwards = attend(rows[::-1])[::-1]
    for row, packed, reversed_ in zip(rows, together, backwards, strict=True):
        (alone,) = attend([row])
        assert torch.equal(alone, packed)
        assert torch.equal(alone, reversed_)


def test_strided_inputs_give_the_same_result(device):
    table, _ = build(realistic_rows(completions=1))
    q, k, v = qkv(table.num_rows, 4, 2, 64, torch.float32, device=device)
    transposed = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    assert not transposed[0].is_contiguous()
    plain = tree_attention(q, k, v, table, backend="triton")
    assert torch.equal(tree_attention(*transposed, table, backend="triton"), plain)


def test_every_output_is_written(monkeypatch, device):
    """An output buffer full of nan leaves no nan behind."""
    table, _ = build(realistic_rows())
    q, k, v = qkv(table.num_rows, 6, 2, 80, torch.float32, device=device)
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: empty_like(*args, **kwargs).fill_(float("nan")))
    assert torch.isfinite(tree_attention(q, k, v, table, backend="triton")).all()


def valid():
    table, _ = build([[1, 2, 3], [1, 4]])
    return dict(zip("qkv", qkv(table.num_rows, 4, 2, 16, torch.float32), strict=True), table=table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(q=a["q"][0]), r"takes q \(N, H, D\)"),
        (lambda a: a.update(q=a["q"][:2], k=a["k"][:2], v=a["v"][:2]), "table has 4 rows, q 2 and k 2"),
        (lambda a: a.update(q=a["q"][:, :3]), "do not fit those of k"),
        (lambda a: a.update(k=a["k"].double()), "must share one dtype"),
        (lambda a: a.update(scale=0.0), "scale must be positive, got 0.0"),
        (lambda a: a.update(sliding_window=0), "sliding_window must be at least 1, got 0"),
        (lambda a: a.update(softcap=0.0), "softcap must be positive, got 0.0"),
        (lambda a: a.update(backend="cuda"), "backend must be one of"),
        (lambda a: a.update({n: a[n][..., :8] for n in "qkv"}, backend="triton"), "head dimension 8 is not one of"),
        (lambda a: a.update({n: a[n].double() for n in "qkv"}, backend="triton"), "dtype torch.float64 is not one of"),
        (
            lambda a: a.update(q=a["q"].transpose(1, 2).contiguous().transpose(1, 2), backend="triton"),
            "q: the head dim",
        ),
    ],
)
def test_unsupported_input_is_refused_by_name(change, message):
    arguments = valid()
    change(arguments)
    with pytest.raises(ValueError, match=message):
        tree_attention(**arguments)


def test_gradients_through_the_kernel_are_refused():
    arguments = valid()
    arguments["q"].requires_grad_()
    with pytest.raises(NotImplementedError, match="no Triton backward"):
        tree_attention(**arguments, backend="triton")
    with torch.no_grad():
        tree_attention(**arguments, backend="triton")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offsets_beyond_two_to_the_31_elements_are_right():
    """Queries of more than 2**31 elements; only the last rows are checked."""
    length, heads, dim = 70_000, 32, 1024 // 4
    rows = length * 4
    table = SegmentTable(
        np.arange(4, dtype=np.int32) * length, np.full(4, length, np.int32), np.zeros(4, np.int32),
        np.zeros(4, np.int32), np.zeros(0, np.int32),
    )  # fmt: skip
    q = torch.randn(rows, heads, dim, device="cuda", dtype=torch.bfloat16)
    assert q.numel() > 2**31
    k, v = torch.randn(2, rows, 1, dim, device="cuda", dtype=torch.bfloat16).unbind()
    out = tree_attention(q, k, v, table, sliding_window=64)
    tail = slice(rows - 200, rows)
    expected = dense_attention(*(x[tail].double().cpu() for x in (q, k, v)), sliding_window=64)
    torch.testing.assert_close(out[tail][100:].double().cpu(), expected[100:], rtol=0, atol=2e-2)
