"""Choice of the implementation that an op runs: Triton for GPU tensors, the PyTorch reference for CPU tensors."""

import os
from functools import cache

import torch
import triton

BACKENDS = ("triton", "torch")

TRITON_BEFORE_3_7 = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7)
"""Whether some kernels need the builds for Triton 3.6."""


def interpreting() -> bool:
    """Say whether Triton kernels run in its interpreter, which accepts CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def resolve_backend(backend: str | None, tensor: torch.Tensor) -> str:
    """Choose which of `BACKENDS` an op runs for `tensor`: by default Triton on CUDA / HIP, PyTorch on a CPU.

    Raises `ValueError` for a backend that is unknown or that the device does not have.
    """
    if backend not in (None, *BACKENDS):
        raise ValueError(f"backend must be one of {BACKENDS} or None, got {backend!r}")
    device = tensor.device.type
    if backend is None:
        if device == "cuda":
            return "triton"
        if device == "cpu":
            return "torch"
        raise ValueError(f"backend=None knows cuda and cpu tensors, got device {tensor.device}; pass backend='torch'")
    if backend == "triton" and device != "cuda" and not interpreting():
        raise ValueError(
            f"backend='triton' needs a CUDA or HIP tensor, got device {tensor.device} "
            "(TRITON_INTERPRET=1, set before triton is imported, runs the kernels on CPU tensors)"
        )
    return backend


@cache
def architecture(device: torch.device) -> str:
    """Name what kernels on `device` are tuned for: `"hip"`, `"sm_80"`, `"sm_90"`, ...; `"cpu"` in the interpreter."""
    if device.type != "cuda":
        return "cpu"
    if torch.version.hip is not None:
        return "hip"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
