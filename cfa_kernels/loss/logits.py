"""Operator of `logits_policy_loss`: `policy_rows` as torch.compile, autograd and autocast see it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.operator_arguments import arguments_of
from ..ops.row_softmax import LogitRows, Softmax, compute_dtype
from .options import LossOptions
from .policy_rows import STATS, policy_rows, scale_rows, to_unit_scale
from .token_loss import Tokens, refuse_second_derivative


@torch.library.custom_op("cfa_kernels::scale_rows", mutates_args=("out",))
def scale_rows_op(rows: Tensor | None, factor: Tensor, out: Tensor, backend: str) -> None:
    """Run `scale_rows`, without `rows` in place."""
    scale_rows(out if rows is None else rows, factor, out, backend=backend)


def scaled_rows(rows: Tensor, factor: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    """Return `rows * factor` in `dtype`."""
    out = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    scale_rows_op(rows, factor, out, backend)
    return out


@torch.library.custom_op("cfa_kernels::logits_policy_loss", mutates_args=("gradient",))
def logits_policy_loss_op(
    logits: Tensor | None,
    gradient: Tensor | None,
    targets: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor | None,
    ref_logprobs: Tensor | None,
    sampling_logprobs: Tensor | None,
    scale: Tensor,
    entropy_scale: Tensor | None,
    kinds: str,
    numbers: Sequence[float],
    softmax: Sequence[float],
    with_entropy: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the loss (), `STATS` (5, N) and the factor () of `gradient`.

    `gradient`, like the logits (B, T, V), takes their gradient; None makes none, and without `logits` it holds them.
    targets and the token tensors are (N,), contiguous, N = B * T; `kinds` and `numbers` are `LossOptions`.
    """
    source = gradient if logits is None else logits
    assert source is not None
    rows = LogitRows(source, None, targets, Softmax(*softmax), backend)
    options = LossOptions.of(kinds, numbers)
    tokens = Tokens(old_logprobs, advantages, weights, ref_logprobs, sampling_logprobs, scale)
    unit = torch.ones((), dtype=scale.dtype, device=source.device)
    if source.dtype == torch.float16:
        tokens, entropy_scale, unit = to_unit_scale(tokens, entropy_scale)
    with torch.autocast(source.device.type, enabled=False):
        loss, stats, _ = policy_rows(rows, tokens, entropy_scale, options, gradient, with_entropy=with_entropy)
    return loss * unit, stats, unit


LogitsArguments = arguments_of(logits_policy_loss_op)


@logits_policy_loss_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    logits, gradient, targets, *_ = inputs
    rows = gradient if logits is None else logits
    shapes = ((), (len(STATS), targets.numel()), ())
    return tuple(torch.empty(shape, dtype=compute_dtype(rows.dtype), device=rows.device) for shape in shapes)


class LogitsPolicyLoss(torch.autograd.Function):
    """The loss and `STATS`, with the gradient by logits made at once; `apply` takes `inplace` and `LogitsArguments`.

    In place it goes over the logits, and a backward runs once.
    """

    @staticmethod
    def forward(ctx: Any, inplace: bool, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Compute the loss and the gradient."""
        arguments = LogitsArguments(*inputs)
        logits = arguments.logits.detach()
        gradient = logits if inplace else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        loss, stats, unit = logits_policy_loss_op(
            *arguments._replace(logits=None if inplace else logits, gradient=gradient)
        )
        ctx.save_for_backward(gradient, unit)
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)  # no zeros of the size of the logits next to the gradient of the loss
        ctx.inplace, ctx.backend = inplace, arguments.backend
        return loss, stats

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        """Multiply by the gradient upstream."""
        refuse_second_derivative()
        if by_loss is None:
            return None, *LogitsArguments()
        gradient, unit = ctx.saved_tensors
        if ctx.inplace:
            scale_rows_op(None, by_loss * unit, gradient, ctx.backend)
        else:
            gradient = scaled_rows(gradient, by_loss * unit, gradient.dtype, ctx.backend)
        return None, *LogitsArguments(logits=gradient)
