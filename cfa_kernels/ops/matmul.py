"""Multiply matrices of every dtype and device, in float32 on a CPU by oneDNN.

Torch itself uses MKL there, which takes twice as long on an AMD processor (Zen 5). The library only changes how sums
of products are rounded.

oneDNN makes a kernel for each shape, in a millisecond and half a megabyte, and keeps 1,024, as does torch's layer above
it. Shapes differ from step to step, so a process would grow by hundreds of megabytes: importing this module limits both
caches, which ask for their size at the first kernel, to 64 shapes, unless the environment says otherwise.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "64")

_BLOCK_ELEMENTS = 2**20  # elements of a product that exist twice at a time: as oneDNN gave them, and where they belong


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right`, (n, K), (K, M) of one dtype -> (n, M)."""
    if _has_onednn(left) and left.numel() and right.numel():
        return _onednn(left, right)
    return left @ right


def multiply(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """Compute `out = left @ right`, with `add` `out += ...`, summed and rounded in the dtype of `out` only."""
    if not out.is_cuda:
        left, right = left.to(out.dtype), right.to(out.dtype)
    if _has_onednn(out) and left.numel() and out.numel():
        return _multiply_in_blocks(left, right, out, add)
    if out.dtype == left.dtype:
        return torch.addmm(out, left, right, out=out) if add else torch.mm(left, right, out=out)
    if add:
        return torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    return torch.mm(left, right, out_dtype=out.dtype, out=out)


def wide_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `left @ right`, summed and rounded in `dtype` only; for graphs, which write into no given tensor."""
    if dtype == left.dtype:
        return left @ right
    return torch.mm(left, right, out_dtype=dtype) if left.is_cuda else product(left.to(dtype), right.to(dtype))


def add_product(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Compute `out += left @ right`, all of one dtype; return `out`. cuBLAS rounds the product before it adds it."""
    if is_compiling():
        return sum_of(out, left @ right)
    if out.is_cuda or out.dtype not in (torch.bfloat16, torch.float16) or multiplies_halves(out):
        return out.addmm_(left, right)
    return out.copy_(torch.addmm(out.float(), left.float(), right.float()))


def sum_of(matrix: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two tensors of one dtype, for graphs: joined with what reads it, not a call of cuBLAS."""
    if matrix.dtype not in (torch.bfloat16, torch.float16):
        return matrix + other
    # An addition of a product in its own dtype becomes a call wherever something else than arithmetic reads the sum, a
    # backward say; cuBLAS first copies the other tensor.
    return (matrix.float() + other.float()).to(matrix.dtype)


def multiplies_halves(tensor: Tensor) -> bool:
    """Whether a tensor is bfloat16 on a CPU that multiplies it (AMX, AVX512-BF16), in float32 sums rounded once."""
    if not tensor.is_cpu or tensor.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.backends.mkldnn.enabled) and cpu_multiplies_bfloat16()


@cache
def cpu_multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for products of bfloat16."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _has_onednn(tensor: Tensor) -> bool:
    if not tensor.is_cpu or tensor.dtype != torch.float32 or is_compiling():
        return False
    return bool(torch.backends.mkldnn.enabled) and torch.backends.mkldnn.is_available()


def _onednn(left: Tensor, right: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")


def _multiply_in_blocks(left: Tensor, right: Tensor, out: Tensor, add: bool) -> Tensor:
    # Strips of columns or, where there are more of them, rows: oneDNN allocates its results.
    size = max(_BLOCK_ELEMENTS // min(out.shape), 64)
    if len(out) > out.size(1):
        blocks = [(some, right, place) for some, place in zip(left.split(size), out.split(size), strict=True)]
    else:
        blocks = [(left, some, place) for some, place in zip(right.split(size, 1), out.split(size, 1), strict=True)]
    for one, other, place in blocks:
        result = _onednn(one, other)
        place.add_(result) if add else place.copy_(result)
    return out


def float32_precision() -> tuple[str, str]:
    """Return torch's settings for float32 products by cuBLAS and oneDNN: `"ieee"` or `"none"` is exact."""
    cublas, onednn = _float32_backends()
    return cublas.fp32_precision, onednn.fp32_precision


def _float32_backends() -> tuple[Any, Any]:
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


@contextmanager
def ieee_products() -> Iterator[None]:
    """Multiply float32 matrices exactly inside, in all threads of the process, whatever torch is set to."""
    # torch keeps the setting twice, by `set_float32_matmul_precision` and by `fp32_precision`, and raises when it is
    # read while they disagree.
    backends, before = _float32_backends(), float32_precision()
    for backend in backends:
        backend.fp32_precision = "ieee"
    older = torch.get_float32_matmul_precision()  # readable now
    try:
        if older != "highest":
            torch.set_float32_matmul_precision("highest")
        yield
    finally:
        if older != "highest":
            torch.set_float32_matmul_precision(older)
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = "none"  # then it follows the setting of all backends
            if backend.fp32_precision != precision:
                backend.fp32_precision = precision
