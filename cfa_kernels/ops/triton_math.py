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
    # `1 - 2 / (e^2x + 1)` cancels for small arguments, so those take the odd Taylor polynomial.
    # One more of its terms would cost the widest build of `linear_logprob` its registers.
    x2 = x * x
    terms = 0.13333333333333333 + x2 * (-0.05396825396825397 + x2 * 0.021869488536155203)
    near_zero = x * (1.0 + x2 * (-0.3333333333333333 + x2 * terms))
    far = 1.0 - 2.0 / (tl.exp(minimum(2.0 * x, 60.0)) + 1.0)
    return tl.where(tl.abs(x) < 0.3, near_zero, far)
