"""What a GPU would refuse is refused where there is none, so that a suite that is green here is not red there."""

import pytest
import torch
from torch import nn

from cfa_kernels import linear_policy_loss
from cfa_kernels.ops.linear_logprob import linear_logprob
from cfa_kernels.ops.row_logprobs import row_logprobs
from cfa_kernels.ops.row_softmax import LogitRows
from cfa_kernels.tree.attention import tree_attention
from tests.support.as_on_gpu import on_host_only
from tests.support.attention_problem import build, qkv
from tests.support.models import make_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU says so itself")


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, y: x + y, lambda x, y: torch.cat([x, y]), lambda x, y: nn.functional.linear(x, y),
        lambda x, y: x.add_(y), lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: torch.testing.assert_close(x, x.cpu()),
        lambda x, y: linear_logprob(x, y, torch.zeros(4, dtype=torch.int64, device=x.device), backend="torch"),
        lambda x, y: linear_logprob(x, x, torch.zeros(4, dtype=torch.int64), backend="torch"),
    ],
)  # fmt: skip
def test_tensors_of_both_sides_in_one_call_are_refused(mix, device):
    with pytest.raises((RuntimeError, ValueError, AssertionError), match="device"):
        mix(torch.randn(4, 4, device=device), torch.randn(4, 4))


def test_kernels_take_no_tensors_of_the_host(device):
    table, _ = build([[1, 2]])
    with pytest.raises(RuntimeError, match="would be refused on a GPU"):
        tree_attention(*qkv(2, 2, 1, 16, torch.float32), table, backend="triton")
    row, targets = torch.randn(1, 2, 64, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    rows = LogitRows(row, None, targets, backend="triton")
    row_logprobs(rows, torch.ones(2, dtype=torch.bool, device=device), with_entropy=False)
    with pytest.raises(RuntimeError, match="a kernel would refuse a tensor of the host"):
        row_logprobs(rows, torch.ones(2, dtype=torch.bool), with_entropy=False)
    with on_host_only(), pytest.raises(RuntimeError, match="a kernel would refuse a tensor of the host"):
        row_logprobs(rows, torch.ones(2, dtype=torch.bool, device=device), with_entropy=False)


def test_the_default_backend_takes_what_its_kernels_take(device):
    table, _ = build([[1, 2]])
    with pytest.raises(ValueError, match="head dimensions 12 and 12"):
        tree_attention(*qkv(2, 2, 1, 12, torch.float32, device=device), table)
    with pytest.raises(ValueError, match=r"dtype torch\.float64"):
        tree_attention(*qkv(2, 2, 1, 16, device=device), table)
    x, targets = torch.ones(2, 3, dtype=torch.float64, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(TypeError, match="float64"):
        linear_logprob(x, x, targets)
    ones = torch.ones(1, 2, device=device)
    with pytest.raises(TypeError, match="float64"):
        linear_policy_loss(x[None], x, targets[None], None, ones[:, 0], ones)
    assert linear_logprob(x.cpu(), x.cpu(), targets.cpu()).dtype == torch.float64
    tree_attention(*qkv(2, 2, 1, 12), table)


@pytest.mark.parametrize(("changes", "message"), [({"head_dim": 12}, "12 and 12"), ({}, "float64")])
def test_a_model_is_refused_where_its_heads_or_numbers_are_not_the_kernels(changes, message):
    from cfa_kernels.model.check.verify import check_supported

    model = make_model("Qwen3", num_hidden_layers=1, **changes)
    with pytest.raises(NotImplementedError, match=message):
        check_supported(model if changes else model.double())
    check_supported(model.cpu())
