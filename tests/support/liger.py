"""Liger's own kernels where tests run: on a GPU, or in Triton's interpreter, which lacks a few things that they use."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.runtime import JITFunction, interpreter

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
def liger_kernels() -> Iterator[list[str]]:
    """Yield the names of Triton's kernels as they run; what Liger exchanges in transformers' files comes back."""
    from liger_kernel.ops import geglu, rms_norm

    ran: list[str] = []
    kernel = interpreter.InterpretedFunction if interpreting() else JITFunction
    convert, run = interpreter._implicit_cvt, kernel.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if interpreting():
            patch.setattr(interpreter, "_implicit_cvt", lambda x: _Number(x) if isinstance(x, float) else convert(x))
            patch.setattr(rms_norm, "rsqrt", rsqrt)
            patch.setattr(geglu, "tanh", tanh)
        files = [module for name, module in sys.modules.items() if ".modeling_" in name]
        before = [dict(vars(file)) for file in files]
        patch.setattr(kernel, "run", noted)
        try:
            yield ran
        finally:
            for file, names in zip(files, before, strict=True):
                vars(file).update(names)
