"""Compute gradients of `linear_logprob` from recomputed strips of logits, by the row gradient of the policy loss.

`linear_logprob` registers the operator as its gradient.
"""

from typing import Any

import torch
from torch import Tensor

from .head_matmul import HeadGradients, empty_strip, write_logits
from .operator_arguments import arguments_of
from .policy_rows import row_gradients
from .row_softmax import Softmax, compute_dtype

STRIP_BYTES = {"cpu": 2**27, "cuda": 2**30}
"""Size of a backward strip of logits, by device type."""


@torch.library.custom_op("cfa_kernels::linear_logprob_backward", mutates_args=())
def linear_logprob_backward_op(
    by_rows: Tensor,
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float,
    with_entropy: bool,
    wanted: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients by hidden (N, H), lm_head (V, H) and bias (V,); empty where not `wanted`.

    by_rows (2, N): the upstream gradient of what `linear_logprob_op` gave. Strips of logits are multiplied by
    another routine than the forward's, so their probabilities are normalised by their own sums: against the
    forward's, the logits' rounding would be the probabilities' relative error.
    """
    targets, bias = targets.contiguous(), None if bias is None else bias.contiguous()
    dtypes, unit = (hidden.dtype, lm_head.dtype, (bias if bias is not None else lm_head).dtype), None
    if backend == "torch" and hidden.device.type == "cpu":
        # No product of halves with float32 sums there: convert the head once, not for every strip.
        hidden, lm_head = hidden.to(by_rows.dtype), lm_head.to(by_rows.dtype)
    if hidden.dtype == torch.float16 and len(hidden):
        # Gradients of a mean over many rows are below what float16 resolves: take a power of two out of them.
        unit = torch.ldexp(by_rows.new_ones(()), torch.frexp(by_rows.abs().amax())[1])
        by_rows = by_rows / unit
    vocabulary, sums = len(lm_head), compute_dtype(hidden.dtype)
    gradients = HeadGradients(hidden, lm_head, wanted)
    size = STRIP_BYTES.get(hidden.device.type, STRIP_BYTES["cpu"])
    height = max(size // (16 * vocabulary * sums.itemsize), 1) * 16  # every strip's slices are aligned alike
    logits, gradient = empty_strip(min(height, max(len(hidden), 1)), vocabulary, sums, hidden.dtype, hidden.device)
    for start in range(0, len(hidden), height):
        part = slice(start, min(start + height, len(hidden)))
        states = hidden[part]
        strip, by_logits = logits[: len(states)], gradient[: len(states)]
        write_logits(states, lm_head, strip)
        row_gradients(
            strip.unsqueeze(0), bias, by_logits.unsqueeze(0), targets[part],
            by_rows[0, part].contiguous(), by_rows[1, part].contiguous() if with_entropy else None,
            Softmax(temperature, softcap), backend=backend,
        )  # fmt: skip
        gradients.add(part, states, by_logits)
    by_hidden, by_head, by_bias = (
        (found if unit is None else found.mul_(unit)).to(dtype)
        for found, dtype in zip(gradients.finish(), dtypes, strict=True)
    )
    return by_hidden, by_head, by_bias


_Arguments = arguments_of(linear_logprob_backward_op)


@linear_logprob_backward_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = _Arguments(*inputs)
    hidden, lm_head, wanted = given.hidden, given.lm_head, given.wanted
    return (
        hidden.new_empty(hidden.shape if wanted[0] else (0,)),
        lm_head.new_empty(lm_head.shape if wanted[1] else (0,)),
        (lm_head if given.bias is None else given.bias).new_empty(lm_head.shape[:1] if wanted[2] else (0,)),
    )
