"""Operators of `logits_policy_loss`: `policy_rows` as torch.compile, autograd and autocast see it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .operator_arguments import arguments_of
from .policy_rows import STATS, policy_rows, scale_rows, to_unit_scale
from .row_softmax import Softmax, compute_dtype
from .token_loss import PolicyOptions, Tokens, refuse_second_derivative


def _run(
    logits: Tensor,
    targets: Tensor,
    tokens: Tokens,
    entropy_scale: Tensor | None,
    options: PolicyOptions,
    softmax: Softmax,
    gradient: Tensor | None,
    with_entropy: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    unit = torch.ones((), dtype=tokens.scale.dtype, device=logits.device)
    if logits.dtype == torch.float16:
        tokens, entropy_scale, unit = to_unit_scale(tokens, entropy_scale)
    with torch.autocast(logits.device.type, enabled=False):
        loss, stats, _ = policy_rows(
            logits, None, targets, tokens, entropy_scale, options, softmax, gradient,
            with_entropy=with_entropy, backend=backend,
        )  # fmt: skip
    return loss * unit, stats, unit


def _fake_outputs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(logits.dtype)
    shapes = ((), (len(STATS), targets.numel()), ())
    loss, stats, unit = (torch.empty(shape, dtype=dtype, device=logits.device) for shape in shapes)
    return loss, stats, unit


@torch.library.custom_op("cfa_kernels::scale_rows", mutates_args=())
def scale_rows_op(rows: Tensor, factor: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    """Run `scale_rows` into a new tensor of `dtype`."""
    out = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    scale_rows(rows, factor, out, backend=backend)
    return out


@scale_rows_op.register_fake
def _(rows: Tensor, factor: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    return torch.empty(rows.shape, dtype=dtype, device=rows.device)


@torch.library.custom_op("cfa_kernels::scale_rows_", mutates_args=("rows",))
def scale_rows_inplace_op(rows: Tensor, factor: Tensor, backend: str) -> None:
    """Run `scale_rows` in place."""
    scale_rows(rows, factor, rows, backend=backend)


@torch.library.custom_op("cfa_kernels::logits_policy_loss", mutates_args=())
def logits_policy_loss_op(
    logits: Tensor,
    targets: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor | None,
    ref_logprobs: Tensor | None,
    scale: Tensor,
    entropy_scale: Tensor | None,
    loss_type: str,
    level: str,
    numbers: Sequence[float],
    softmax: Sequence[float],
    with_entropy: bool,
    with_gradient: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the loss (), `STATS` (5, N), the gradient by logits (B, T, V) or an empty tensor, and its factor ().

    targets and the token tensors are (N,), contiguous, N = B * T; `numbers` are the rest of `PolicyOptions`. Only
    the loss is differentiable, and only by the logits.
    """
    gradient = torch.empty(logits.shape if with_gradient else 0, dtype=logits.dtype, device=logits.device)
    loss, stats, unit = _run(
        logits, targets, Tokens(old_logprobs, advantages, weights, ref_logprobs, scale), entropy_scale,
        PolicyOptions.of(loss_type, level, numbers), Softmax(*softmax), gradient if with_gradient else None,
        with_entropy, backend,
    )  # fmt: skip
    return loss, stats, gradient, unit


_Arguments = arguments_of(logits_policy_loss_op)


@logits_policy_loss_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = _Arguments(*inputs)
    logits = given.logits
    gradient = torch.empty(logits.shape if given.with_gradient else 0, dtype=logits.dtype, device=logits.device)
    loss, stats, unit = _fake_outputs(logits, given.targets)
    return loss, stats, gradient, unit


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, stats, gradient, unit = output
    ctx.mark_non_differentiable(stats, gradient, unit)
    ctx.set_materialize_grads(False)  # no zeros of the size of the logits beside the gradient of the loss
    ctx.save_for_backward(gradient, unit)
    ctx.backend = _Arguments(*inputs).backend


def _backward(ctx: Any, by_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    if by_loss is None:
        return tuple(_Arguments())
    gradient, unit = ctx.saved_tensors
    return tuple(_Arguments(logits=scale_rows_op(gradient, by_loss * unit, gradient.dtype, ctx.backend)))


logits_policy_loss_op.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("cfa_kernels::logits_policy_loss_", mutates_args=("logits",))
def logits_policy_loss_inplace_op(
    logits: Tensor,
    targets: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor | None,
    ref_logprobs: Tensor | None,
    scale: Tensor,
    entropy_scale: Tensor | None,
    loss_type: str,
    level: str,
    numbers: Sequence[float],
    softmax: Sequence[float],
    with_entropy: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the loss (), `STATS` (5, N) and the gradient's factor (); the gradient takes the place of the logits."""
    return _run(
        logits, targets, Tokens(old_logprobs, advantages, weights, ref_logprobs, scale), entropy_scale,
        PolicyOptions.of(loss_type, level, numbers), Softmax(*softmax), logits, with_entropy, backend,
    )  # fmt: skip


InPlaceArguments = arguments_of(logits_policy_loss_inplace_op)


@logits_policy_loss_inplace_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = InPlaceArguments(*inputs)
    return _fake_outputs(given.logits, given.targets)


class LogitsPolicyLossInPlace(torch.autograd.Function):
    """`logits_policy_loss_inplace_op` with its gradient, which can be asked for once.

    `apply` takes the fields of `InPlaceArguments`.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Overwrite the logits; return loss and `STATS`."""
        given = InPlaceArguments(*inputs)
        rows = given.logits.detach()
        loss, stats, unit = logits_policy_loss_inplace_op(*given._replace(logits=rows))
        ctx.save_for_backward(rows, unit)
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        ctx.backend = given.backend
        return loss, stats

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the rows that were the logits, times the upstream gradient."""
        refuse_second_derivative()
        if by_loss is None:
            return tuple(InPlaceArguments())
        rows, unit = ctx.saved_tensors
        scale_rows_inplace_op(rows, by_loss * unit, ctx.backend)
        return tuple(InPlaceArguments(logits=rows))
