"""Bytes and kernels of what torch dispatches."""

import torch

from benchmarks.harness.traffic import Traffic


def test_traffic_counts_operands_and_results_once_and_views_not_at_all():
    x = torch.zeros(4, 8)
    with Traffic() as traffic:
        y = (x.t()[:2] + x[0, 0].expand(2, 4)).to(torch.bfloat16)
        y.copy_(x[:2, :4])
        torch.empty(100)
    assert traffic.kernels == ["add", "_to_copy", "copy_"]
    assert traffic.bytes == (32 + 4 + 32) + (32 + 16) + (32 + 16)


def test_a_result_that_an_operator_was_told_to_write_is_not_read():
    x, y, out = torch.zeros(4, 8), torch.zeros(8, 2), torch.zeros(4, 2)
    with Traffic() as traffic:
        torch.mm(x, y, out=out)
    assert traffic.bytes == 4 * (32 + 16 + 8)
    with Traffic() as traffic:
        torch.addmm(out, x, y, out=out)
    assert traffic.bytes == 4 * (8 + 32 + 16 + 8)
