"""Matrix products, whichever library makes them, are those of float64."""

import importlib
import os
from pathlib import Path

import pytest
import torch

from cfa_kernels.ops import matmul as products
from cfa_kernels.ops.matmul import multiply, product
from tests.support.budget import assert_within_budget
from tests.support.runs import child

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


def grown_by_shapes() -> float:
    """Multiply in 500 shapes after 100 others; gives by how many MiB the process's own memory grew."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.pop(name, None)
    importlib.reload(products)
    used = []
    for shapes in (range(1, 101), range(101, 601)):
        for rows in shapes:
            products.product(torch.ones(rows, 32), torch.ones(32, 20))
        resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
        used.append((resident - shared) * os.sysconf("SC_PAGE_SIZE") / 2**20)
    return used[1] - used[0]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from Linux")
def test_a_process_does_not_keep_a_kernel_for_every_shape() -> None:
    code, grown = child(grown_by_shapes)
    assert code == 0
    assert grown < 64  # 270 with a kernel for each
