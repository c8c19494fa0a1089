"""Scalar functions that several Triton kernels need and that its interpreter, CUDA and HIP must all agree on."""

import triton
import triton.language as tl

LOG2E = 1.4426950408889634


@triton.jit
def minimum(x, y):
    """Return the smaller of two, nan if either is: on a GPU tl.minimum gives the other one, in the interpreter nan."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def tanh(x):
    """Compute the hyperbolic tangent in fp32, accurate near zero, saturating without overflow."""
    # `1 - 2 / (e^2x + 1)` cancels below 1; Lambert's continued fraction to x^2 / 13 does not.
    x2 = minimum(x * x, 1.0)
    above = x * (135135.0 + x2 * (17325.0 + x2 * (378.0 + x2)))
    below = 135135.0 + x2 * (62370.0 + x2 * (3150.0 + x2 * 28.0))
    far = 1.0 - 2.0 / (tl.exp(minimum(2.0 * x, 60.0)) + 1.0)
    return tl.where(tl.abs(x) < 1.0, above / below, far)
