"""The benchmark of attention's gradients times only right ones."""

import pytest
import torch

from benchmarks.harness.race import Absent, WrongAnswer
from benchmarks.speed import bench_attention_backward as benchmark
from benchmarks.speed import bench_kernels

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def job():
    return bench_kernels.make_attention_job(benchmark.BACKWARD["smoke"]["tiny"], CPU)


@pytest.fixture(scope="module")
def contenders(job):
    return {contender.name: contender for contender in benchmark.backward_contenders(job)}


def test_gradients_a_segment_at_a_time_are_autograds(job):
    inputs = [x.double() for x in (job.q, job.k, job.v)]
    by_out = torch.randn(job.q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    leaves = [x.requires_grad_() for x in inputs]
    out = bench_kernels.tree_attention(*leaves, job.table, backend="torch")
    expected = torch.autograd.grad(out, leaves, by_out)
    found = benchmark.gradients_along_each_segment(job, by_out, *inputs)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right)


def test_right_gradients_pass_again_and_again_and_wrong_ones_are_refused(contenders):
    for name in (bench_kernels.OURS, bench_kernels.FLASH):
        contender = contenders[name]
        first, second = contender.run(), contender.run()
        contender.check(first)
        contender.check(second)
        for i, spoil in ((0, lambda x: x * 1.01), (1, lambda x: x.roll(1, -2)), (2, lambda x: x * torch.nan)):
            wrong = [spoil(x) if i == j else x for j, x in enumerate(first)]
            with pytest.raises(WrongAnswer):
                contender.check(tuple(wrong))
    with pytest.raises(Absent):
        contenders[bench_kernels.GATHERED].run()
