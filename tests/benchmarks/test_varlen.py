"""Both contenders that use PyTorch's ragged attention call it as the torch at hand takes it."""

import pytest
import torch

from benchmarks.speed import varlen

pytestmark = pytest.mark.slow

ENDS = torch.tensor([0, 2, 5], dtype=torch.int32)
LENGTHS = (2, 3)


def attend(q, k, v, scale, group):
    """Causal attention within the two sequences of `ENDS`, by explicit softmax."""
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    out = torch.empty_like(q)
    for start, end in ((0, 2), (2, 5)):
        scores = torch.einsum("qhd,khd->hqk", q[start:end], k[start:end]) * scale
        hidden = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, v[start:end])
    return out


def of_torch_2_12(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
                  window_size=(-1, -1), enable_gqa=False):  # fmt: skip
    assert (window_size, max_q, max_k) == ((-1, 0), 3, 3)
    assert enable_gqa
    return attend(query, key, value, scale or query.shape[-1] ** -0.5, query.shape[1] // key.shape[1])


def of_torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
                  window_size=(-1, -1)):  # fmt: skip
    assert window_size == (-1, 0)
    assert query.shape[1] == key.shape[1] == value.shape[1]
    return attend(query, key, value, scale or query.shape[-1] ** -0.5, 1)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]


@pytest.mark.parametrize("scale", [8**-0.5, 0.5])
@pytest.mark.parametrize("signature", [of_torch_2_12, of_torch_2_11])
def test_every_signature_gives_the_same(signature, scale, inputs):
    out = varlen._call(signature, *inputs, (ENDS, ENDS), (3, 3), scale)
    torch.testing.assert_close(out, attend(*inputs, scale, 2))
