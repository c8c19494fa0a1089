"""The kernel benchmark times only right answers, and its yardsticks do the work that they are said to do."""

import numpy as np
import pytest
import torch

from benchmarks.harness.race import WrongAnswer
from benchmarks.speed import bench_kernels as benchmark

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def job():
    return benchmark.make_attention_job(benchmark.ATTENTION["smoke"]["tiny"], CPU)


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
        seen = [*table.context_rows[start : start + context].tolist(), *own.tolist()]
        assert job.gathered[keys[s] : keys[s + 1]].tolist() == seen
        assert queries[s + 1] - queries[s] == table.length[s]
    assert (queries[-1], keys[-1]) == (table.num_rows, len(job.gathered))


def test_the_equal_sequences_have_about_as_many_tokens_and_pairs_as_the_trees(job):
    batch, length = job.flash_shape
    assert batch * length == pytest.approx(job.table.num_rows, rel=0.25)
    assert job.flash_flops == pytest.approx(job.flops, rel=0.25)


def test_wrong_logprobs_are_refused():
    shape = benchmark.LOGPROB["smoke"]["tiny, 5 rows"]
    for contender in benchmark.logprob_contenders(shape, CPU):
        right = contender.run()
        contender.check(right)
        for spoil in (lambda x: x + 1e-3, lambda x: x.roll(1), lambda x: x[:-1], lambda x: x * torch.nan):
            if isinstance(right, torch.Tensor):
                wrongs = [spoil(right)]
            else:
                wrongs = [(spoil(right[0]), right[1]), (right[0], spoil(right[1]))]
            for wrong in wrongs:
                with pytest.raises(WrongAnswer):
                    contender.check(wrong)


def test_the_bound_is_the_slower_of_reading_the_head_and_multiplying_by_it():
    ceilings = {"copy_gb_per_s": 4300.0, "gemm_tflop_per_s": 790.0}
    rows = {m: benchmark.Rows(m, 2048, 151_936, torch.bfloat16) for m in (16, 6000)}
    assert rows[16].bound(ceilings) == pytest.approx(2 * 2048 * (151_936 + 16) / 4.3e12)
    assert rows[6000].bound(ceilings) == pytest.approx(2 * 6000 * 2048 * 151_936 / 790e12)
