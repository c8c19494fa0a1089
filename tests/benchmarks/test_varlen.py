"""Both contenders that use PyTorch's ragged attention call it as the torch at hand takes it."""

import pytest
import torch

from benchmarks.harness.race import Absent
from benchmarks.harness.workloads import gsm8k_job
from benchmarks.speed import attention_jobs as benchmark
from benchmarks.speed import step_peers, varlen

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


def of_torch_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    assert is_causal
    assert query.shape[1] == key.shape[1]
    return attend(query, key, value, query.shape[-1] ** -0.5, 1)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]


@pytest.mark.parametrize("signature", [of_torch_2_12, of_torch_2_11, of_torch_2_10])
def test_every_signature_gives_the_same(signature, inputs):
    found = varlen._call(signature, *inputs, (ENDS, ENDS), (3, 3), 8**-0.5)
    torch.testing.assert_close(found, attend(*inputs, 8**-0.5, 2))


@pytest.mark.parametrize("signature", [of_torch_2_12, of_torch_2_11])
def test_a_scale_is_passed_on(signature, inputs):
    found = varlen._call(signature, *inputs, (ENDS, ENDS), (3, 3), 0.5)
    torch.testing.assert_close(found, attend(*inputs, 0.5, 2))


def test_a_scale_that_this_torch_does_not_take_is_refused(inputs):
    with pytest.raises(Absent, match="scale"):
        varlen._call(of_torch_2_10, *inputs, (ENDS, ENDS), (3, 3), 0.5)


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def test_the_step_and_the_kernel_benchmark_call_the_one_function(monkeypatch, inputs):
    calls = []

    def record(q, k, v, ends, longest, *, scale=None):
        calls.append((tuple(q.shape), tuple(k.shape), longest, scale))
        return torch.zeros(q.shape)

    monkeypatch.setattr(step_peers, "causal_varlen_attention", record)
    monkeypatch.setattr(benchmark, "causal_varlen_attention", record)
    q, k, v = (x.transpose(0, 1)[None].as_subclass(OnGpu) for x in inputs)
    out, _ = step_peers._per_sequence_attention(
        torch.nn.Module(), q, k, v, None, scaling=0.5, cu_seq_lens_q=ENDS, lengths=list(LENGTHS)
    )
    assert out.shape == (1, 5, 4, 8)
    job = benchmark.make_attention_job("qwen3-tiny", torch.float32, gsm8k_job(1), torch.device("cpu"))
    object.__setattr__(job, "q", job.q.as_subclass(OnGpu))
    benchmark.gathered_varlen(job)
    assert calls[0] == ((5, 4, 8), (5, 2, 8), (3, 3), 0.5)
    assert calls[1][1] == (len(job.gathered), *job.k.shape[1:])
