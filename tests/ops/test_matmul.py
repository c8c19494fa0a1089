"""Matrix products, whichever library makes them, are those of float64."""

import pytest
import torch

from cfa_kernels.ops import matmul as products
from cfa_kernels.ops.matmul import multiply, product
from tests.support.budget import assert_within_budget

SHAPES = [(1, 5, 3), (7, 33, 65), (70, 16, 9), (40, 131, 40)]


def operand(rows, columns, *, transposed, dtype):
    """Numbers in rows of another length than theirs, behind which lies nan."""
    rows, columns = (columns, rows) if transposed else (rows, columns)
    memory = torch.full((rows, columns + 3), float("nan"), dtype=dtype)
    memory[:, :columns] = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)
    return memory[:, :columns].t() if transposed else memory[:, :columns]


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("add", [False, True])
def test_products_are_within_the_budget_for_any_strides_and_blocks(shape, add, transposed, dtype, onednn, monkeypatch):
    monkeypatch.setattr(products, "_BLOCK_ELEMENTS", 1000)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", onednn)
    rows, inner, columns = shape
    left = operand(rows, inner, transposed=transposed[0], dtype=dtype)
    right = operand(inner, columns, transposed=transposed[1], dtype=dtype)
    out = operand(rows, columns, transposed=False, dtype=torch.float32)
    behind = out._base[:, columns:]
    before = out.double() if add else 0
    plain = (out if add else 0) + left.float() @ right.float()
    assert multiply(left, right, out, add=add) is out
    if dtype == torch.float32:
        assert_within_budget(product(left, right), left @ right, left.double() @ right.double())
    assert behind.isnan().all()
    assert_within_budget(out, plain, before + left.double() @ right.double())


@pytest.mark.parametrize("shape", [(0, 4, 3), (3, 4, 0)])
def test_empty_products_are_empty(shape):
    rows, inner, columns = shape
    out = torch.empty(rows, columns)
    assert multiply(torch.ones(rows, inner), torch.ones(inner, columns), out) is out
    assert product(torch.ones(rows, inner), torch.ones(inner, columns)).shape == out.shape


def test_float32_products_on_a_cpu_are_onednns_alone_where_it_is_there(monkeypatch):
    """MKL takes twice as long on processors of AMD's."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")

    def slow(*_, **__):
        raise AssertionError("a product went to torch's own library")

    monkeypatch.setattr(torch, "mm", slow)
    monkeypatch.setattr(torch, "addmm", slow)
    left, right, out = torch.ones(2, 3), torch.ones(3, 4), torch.zeros(2, 4)
    assert (product(left, right) == 3).all()
    assert (multiply(left, right, out) == 3).all()
    assert (multiply(left, right, out, add=True) == 6).all()
    with pytest.raises(AssertionError, match="torch's own"):
        multiply(left.double(), right.double(), out.double())
