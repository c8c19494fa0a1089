"""The kernel benchmark times only right answers, and its yardsticks do the work that they are said to do."""

import numpy as np
import pytest
import torch

from benchmarks.harness.race import WrongAnswer
from benchmarks.harness.workloads import gsm8k_job
from benchmarks.speed import attention_jobs as benchmark

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def job():
    return benchmark.make_attention_job("qwen3-tiny", torch.float32, gsm8k_job(1), CPU)


def test_a_wrong_row_of_attention_is_refused(job):
    ours, *_ = benchmark.attention_contenders(job)
    out = ours.run()
    ours.check(out)
    for wrong in (out.roll(1, 0), out.roll(1, 1), torch.where(torch.arange(len(out))[:, None, None] == 7, 0, out)):
        with pytest.raises(WrongAnswer, match="result is off by"):
            ours.check(wrong)


def test_gathered_keys_are_those_that_each_segment_sees(job):
    table, queries, keys = job.table, *(ends.tolist() for ends in job.ends)
    for s in range(len(table.length)):
        start, context = table.context_start[s], table.context_length[s]
        own = np.arange(table.row_start[s], table.row_start[s] + table.length[s])
        visible = [*table.context_rows[start : start + context].tolist(), *own.tolist()]
        assert job.gathered[keys[s] : keys[s + 1]].tolist() == visible
        assert queries[s + 1] - queries[s] == table.length[s]
    assert (queries[-1], keys[-1]) == (table.num_rows, len(job.gathered))


def test_the_equal_sequences_have_about_as_many_tokens_and_pairs_as_the_trees(job):
    batch, length = job.flash_shape
    assert batch * length == pytest.approx(job.table.num_rows, rel=0.25)
    assert job.flash_flops == pytest.approx(job.flops, rel=0.25)


def test_gradients_a_segment_at_a_time_are_autograds(job):
    inputs = [x.double() for x in (job.q, job.k, job.v)]
    by_out = torch.randn(job.q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    leaves = [x.requires_grad_() for x in inputs]
    out = benchmark.tree_attention(*leaves, job.table, backend="torch")
    expected = torch.autograd.grad(out, leaves, by_out)
    gradients = benchmark.gradients_along_each_segment(job, by_out, *inputs)
    torch.testing.assert_close(gradients, expected)


def test_right_gradients_pass_again_and_again_and_wrong_ones_are_refused(job):
    contenders = {contender.name: contender for contender in benchmark.backward_contenders(job)}
    for name in (benchmark.OURS, benchmark.FLASH):
        contender = contenders[name]
        first, second = contender.run(), contender.run()
        contender.check(first)
        contender.check(second)
        for i, spoil in ((0, lambda x: x * 1.01), (1, lambda x: x.roll(1, -2)), (2, lambda x: x * torch.nan)):
            wrong = [spoil(x) if i == j else x for j, x in enumerate(first)]
            with pytest.raises(WrongAnswer):
                contender.check(tuple(wrong))
