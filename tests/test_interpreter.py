"""What `tests/support/interpreter.py` spares Triton's interpreter changes no result, and a launch leaves no trace."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU that is here")


@triton.jit
def _doubled(b_x):
    return b_x + b_x


@triton.jit
def _doublings_kernel(p_x, TIMES: tl.constexpr):
    b_x = tl.load(p_x + tl.arange(0, 4))
    for _ in tl.static_range(TIMES):
        b_x = _doubled(b_x)
    tl.store(p_x + tl.arange(0, 4), b_x / tl.sum(b_x))  # a jitted function of Triton's own, whose module names others


def patches(times: int, device: torch.device) -> int:
    """How often a launch puts functions into a part of the language, for so many calls of a jitted function."""
    put, parts = interpreter._patch_builtin, []
    x = torch.arange(4.0, device=device) * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", lambda part, *given: parts.append(part) or put(part, *given))
        _doublings_kernel[(1,)](x, times)
    torch.testing.assert_close(x.cpu(), torch.arange(4.0) / 6)
    assert tl.core.is_builtin(tl.load)  # as it was
    with pytest.raises(ValueError, match=r"@triton\.jit"):
        tl.load(x)
    return len(parts)


def test_a_launch_puts_its_functions_in_once_however_many_functions_it_calls(device):
    patches(1, device)  # Triton leaves them in where its own functions are
    assert patches(1, device) == patches(20, device) > 0


@pytest.mark.parametrize(("kind", "numpy"), [(tl.float32, "float32"), (tl.bfloat16, "uint16"), (tl.int1, "bool")])
def test_types_are_looked_up_as_ever(kind, numpy):
    for _ in range(2):
        assert interpreter._get_np_dtype(kind) == numpy
        assert interpreter._get_np_dtype(tl.block_type(kind, [4])) == numpy
        assert interpreter._get_np_dtype(tl.pointer_type(kind)) == "uint64"
        assert interpreter._get_np_dtype(tl.block_type(tl.pointer_type(kind), [4])) == "uint64"
