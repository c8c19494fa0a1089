"""Make log-probs and entropies of logits for `logits_policy_loss`, differentiable by the kernels of rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.row_logprobs import row_gradients, row_logprobs
from ..ops.row_softmax import LogitRows, RowLogprobs, Softmax, compute_dtype
from .token_loss import refuse_second_derivative


@torch.library.custom_op("cfa_kernels::logits_logprob", mutates_args=())
def logits_logprob_op(
    logits: Tensor, targets: Tensor, counted: Tensor, softmax: Sequence[float], with_entropy: bool, backend: str
) -> Tensor:
    """Compute the first four `RowLogprobs`, (4, N), of logits (B, T, V); targets and `counted` are (N,), N = B * T."""
    rows = LogitRows(logits, None, targets, Softmax(*softmax), backend)
    with torch.autocast(logits.device.type, enabled=False):
        return torch.stack(row_logprobs(rows, counted, with_entropy=with_entropy)[:4])


@logits_logprob_op.register_fake
def _(logits: Tensor, targets: Tensor, *_: Any) -> Tensor:
    return logits.new_empty((4, targets.numel()), dtype=compute_dtype(logits.dtype))


@torch.library.custom_op("cfa_kernels::logits_gradient", mutates_args=("gradient",))
def logits_gradient_op(
    logits: Tensor | None,
    gradient: Tensor,
    targets: Tensor,
    values: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor | None,
    softmax: Sequence[float],
    backend: str,
) -> None:
    """Write the gradient by logits; without `logits`, `gradient` holds them."""
    rows = LogitRows(gradient if logits is None else logits, None, targets, Softmax(*softmax), backend)
    with torch.autocast(gradient.device.type, enabled=False):
        row_gradients(rows, gradient, by_logprob, by_entropy, RowLogprobs(*values))


class LogitsLogprob(torch.autograd.Function):
    """Log-probs and entropies, (N,) each; in place the gradient goes over the logits, and a backward runs once."""

    @staticmethod
    def forward(
        ctx: Any, inplace: bool, logits: Tensor, targets: Tensor, counted: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor]:
        """Compute both; `options` are the last three arguments of `logits_logprob_op`."""
        values = logits_logprob_op(logits.detach(), targets, counted, *options)
        ctx.save_for_backward(logits, targets, values)
        ctx.set_materialize_grads(False)
        ctx.inplace, ctx.options = inplace, options
        return values[0].clone(), values[1].clone()

    @staticmethod
    def backward(ctx: Any, by_logprob: Tensor | None, by_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the gradient by logits."""
        refuse_second_derivative()
        logits, targets, values = ctx.saved_tensors
        softmax, _, backend = ctx.options
        by_logits = None
        if by_logprob is not None or by_entropy is not None:
            by_logprob = torch.zeros_like(values[0]) if by_logprob is None else by_logprob.contiguous()
            by_entropy = None if by_entropy is None else by_entropy.contiguous()
            logits = logits.detach()
            by_logits = logits if ctx.inplace else torch.empty_like(logits)
            source = None if ctx.inplace else logits
            logits_gradient_op(source, by_logits, targets, values, by_logprob, by_entropy, softmax, backend)
        return None, by_logits, *[None] * (2 + len(ctx.options))
