"""Liger's own kernels where tests run: on a GPU, or in Triton's interpreter, which lacks a few things that they use."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.runtime import JITFunction, interpreter

from cfa_kernels.hf import liger
from cfa_kernels.ops.dispatch import interpreting
from cfa_kernels.ops.triton_math import tanh


@triton.jit
def rsqrt(x):
    """In place of a GPU library's."""
    return 1.0 / tl.sqrt(x)


class _Number(float):
    """A scalar argument, which a compiled kernel may cast."""

    def to(self, _: object) -> "_Number":
        """Itself: float32 is all that these kernels run in here."""
        return self


@contextmanager
def liger_runs() -> Iterator[list[str]]:
    """Every model counts as lying on a GPU; yields the names of Triton's kernels as they run."""
    from liger_kernel.ops import geglu, rms_norm

    ran: list[str] = []
    kernel = interpreter.InterpretedFunction if interpreting() else JITFunction
    convert, run = interpreter._implicit_cvt, kernel.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "run", noted)
        if interpreting():
            patch.setattr(interpreter, "_implicit_cvt", lambda x: _Number(x) if isinstance(x, float) else convert(x))
            patch.setattr(rms_norm, "rsqrt", rsqrt)
            patch.setattr(geglu, "tanh", tanh)
        patch.setattr(liger, "_on_gpu", lambda model: True)
        yield ran
