"""Trees of ragged rows, the queries, keys and values on them, and what attention may be asked for."""

import numpy as np
import torch
from hypothesis import strategies as st

from cfa_kernels.tree.prefix_tree import PrefixTree
from cfa_kernels.tree.segment_table import SegmentTable

spans = st.sampled_from([1, 3, 17, 2**40])
options = st.builds(
    lambda *parts: {key: value for part in parts for key, value in part.items()},
    st.sampled_from([{}, {"scale": 0.3}]),
    st.one_of(
        st.just({}),
        spans.map(lambda span: {"sliding_window": span}),
        spans.map(lambda span: {"attention_chunk_size": span}),
    ),
    st.sampled_from([{}, {"softcap": 2.0}]),
    st.sampled_from([{}, {"sinks": torch.float32}, {"sinks": torch.bfloat16}]),
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


def qkv(rows: int, heads: int, kv_heads: int, dim: int, dtype=torch.float64, value_dim=None, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, heads, dim), (rows, kv_heads, dim), (rows, kv_heads, value_dim or dim)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


def with_sinks(option: dict, heads: int, device="cpu") -> dict:
    """The option, with logits of the sinks where it holds their dtype."""
    if "sinks" not in option:
        return option
    values = torch.randn(heads, generator=torch.Generator().manual_seed(1)) * 2
    return option | {"sinks": values.to(device, option["sinks"])}


def problem(rows, heads=(2, 1), dims=(16, 16), dtype=torch.float32, option=None, device="cpu"):
    """The table of `rows`; queries, keys and values on it; the option, with logits of the sinks."""
    table, _ = build(rows)
    inputs = qkv(table.num_rows, *heads, dims[0], dtype, dims[1], device)
    return table, inputs, with_sinks(option or {}, heads[0], device)
