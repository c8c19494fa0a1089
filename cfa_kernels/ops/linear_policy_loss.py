"""Compute the policy loss from hidden states and the head, strip by strip of logits, with gradients in the forward.

For each strip: logits by GEMM, one row kernel that turns them into their gradient, then the GEMMs of the gradients by
hidden and head. Where a token's loss depends on its sequence a pass without gradients comes first and finds the ratios.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from .head_matmul import HeadGradients, Index, empty_strip, write_logits
from .logits_policy_loss import scaled_rows
from .operator_arguments import arguments_of
from .policy_rows import STATS, policy_of_logprobs, policy_rows, row_gradients, row_logprobs, to_unit_scale
from .row_softmax import LogitRows, RowLogprobs, Softmax, compute_dtype
from .token_loss import PolicyOptions, Tokens, refuse_second_derivative

DEAD_SHARE = 0.1  # rows without gradient are cut out of a strip before its GEMMs if they are at least this share of it


def contributing(tokens: Tokens, options: PolicyOptions, *, with_entropy: bool) -> Tensor:
    """Find those of `tokens` (B, T) whose log-prob the loss or a gradient needs, (B, T) bool."""
    # A token with zero weighted advantage adds nothing; where losses join a sequence's tokens its log-prob is
    # needed if any of them has one. The KL term and the entropy want every counted token.
    counted = tokens.scale > 0
    if with_entropy or tokens.ref_logprobs is not None:
        return counted
    moved = tokens.moved()
    if options.joins_tokens:
        moved = (moved & counted).any(1, keepdim=True)
    return counted & moved


def _strips(
    hidden: Tensor, head: Tensor, counted: Tensor, rows: Tensor | None, rows_alone: bool, strip: tuple[Tensor, Tensor]
) -> Iterator[tuple[Index, Index, Tensor, Tensor, Tensor]]:
    """Yield the indices of n tokens, and of their states, those (n, H), logits and their gradient (1, n, V) in `strip`.

    `hidden` is (N, H), or with `rows_alone` (M, H): the states of the M `rows`, in their order.
    """
    count, size = len(hidden if rows is None else rows), len(strip[0])
    for start in range(0, count, size):
        part = slice(start, min(start + size, count))
        tokens = part if rows is None else rows[part]
        places = part if rows_alone else tokens
        # Padding may hold nan; rows that do not count are 0, so that they add 0 to the head's gradient.
        states = torch.where(counted[tokens].unsqueeze(1), hidden[places], 0)
        logits, gradient = (memory[: len(states)] for memory in strip)
        write_logits(states, head, logits)
        yield tokens, places, states, logits.unsqueeze(0), gradient.unsqueeze(0)


def _without_dead_rows(
    index: Index, hidden: Tensor, gradient: Tensor, by_logprob: Tensor
) -> tuple[Index, Tensor, Tensor]:
    live = by_logprob.nonzero().squeeze(1)
    if len(live) > (1 - DEAD_SHARE) * len(hidden):
        return index, hidden, gradient
    return live + index.start if isinstance(index, slice) else index[live], hidden[live], gradient[live]


@torch.library.custom_op("cfa_kernels::linear_policy_loss", mutates_args=())
def linear_policy_loss_op(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor | None,
    ref_logprobs: Tensor | None,
    sampling_logprobs: Tensor | None,
    scale: Tensor,
    entropy_scale: Tensor | None,
    rows: Tensor | None,
    rows_alone: bool,
    kinds: str,
    numbers: Sequence[float],
    softmax: Sequence[float],
    with_entropy: bool,
    needs_gradient: Sequence[bool],
    drop_rows: bool,
    chunk_size: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the loss (), `STATS` (5, N), gradients by hidden, head (V, H) and bias (V,), and their factor ().

    hidden is (N, H), or with `rows_alone` (M, H), the states of `rows`; targets and token tensors are (B, T),
    contiguous, N = B * T. Gradients that are not needed are empty. `rows` are the flattened tokens to look at; None
    with `drop_rows` waits for the device and takes those that `contributing` finds.
    """
    options, cap = PolicyOptions.of(kinds, numbers), Softmax(*softmax)
    shape = scale.shape
    grid, entropy_scale, unit = to_unit_scale(
        Tokens(old_logprobs, advantages, weights, ref_logprobs, sampling_logprobs, scale), entropy_scale
    )
    if rows is None and drop_rows:
        rows = contributing(grid, options, with_entropy=with_entropy).flatten().nonzero().squeeze(1)
    tokens, targets = grid.map(torch.flatten), targets.flatten()
    counted = tokens.scale > 0
    size = min(chunk_size, max(len(hidden if rows is None else rows), 1))
    strip = empty_strip(size, len(head), hidden.dtype, hidden.device)
    strips = partial(_strips, hidden, head, counted, rows, rows_alone, strip)
    gradients = HeadGradients(hidden, head, needs_gradient)

    def add_gradients(index: Index, states: Tensor, gradient: Tensor, by_logprob: Tensor) -> None:
        if drop_rows and entropy_scale is None and rows is not None:
            index, states, gradient = _without_dead_rows(index, states, gradient, by_logprob)
        gradients.add(index, states, gradient)

    with torch.autocast(hidden.device.type, enabled=False):
        if options.joins_tokens:
            row_values = RowLogprobs(*scale.new_zeros(4, targets.numel()))
            for index, _, _, logits, _ in strips():
                part = LogitRows(logits, bias, targets[index], cap, backend)
                logprobs = row_logprobs(part, counted[index], with_entropy=with_entropy)
                for whole, some in zip(row_values, logprobs, strict=True):
                    whole[index] = some
            loss, stats, by_logprob, by_entropy = policy_of_logprobs(
                row_values.logprobs, row_values.entropy, tokens, entropy_scale, options, shape
            )
            for index, place, states, logits, gradient in strips() if any(needs_gradient) else ():
                part = LogitRows(logits, bias, targets[index], cap, backend)
                entropies = None if by_entropy is None else by_entropy[index]
                values = RowLogprobs(*(x[index] for x in row_values))
                row_gradients(part, gradient, by_logprob[index], entropies, values)
                add_gradients(place, states, gradient[0], by_logprob[index])
        else:
            loss, stats = scale.new_zeros(()), scale.new_zeros(len(STATS), targets.numel())
            for index, place, states, logits, gradient in strips():
                part_loss, stats[:, index], by_logprob = policy_rows(
                    LogitRows(logits, bias, targets[index], cap, backend), tokens.map(itemgetter(index)),
                    entropy_scale, options, gradient if any(needs_gradient) else None, with_entropy=with_entropy,
                )  # fmt: skip
                loss += part_loss
                if any(needs_gradient):
                    add_gradients(place, states, gradient[0], by_logprob)
    return loss * unit, stats, *gradients.finish(), unit


_Arguments = arguments_of(linear_policy_loss_op)


@linear_policy_loss_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    hidden, head, _, targets, *_ = inputs
    needs_gradient, exact = _Arguments(*inputs).needs_gradient, compute_dtype(hidden.dtype)
    return (
        hidden.new_empty((), dtype=exact),
        hidden.new_empty((len(STATS), targets.numel()), dtype=exact),
        hidden.new_empty(hidden.shape if needs_gradient[0] else (0,)),
        head.new_empty(head.shape if needs_gradient[1] else (0,), dtype=exact),
        head.new_empty(head.shape[:1] if needs_gradient[2] else (0,), dtype=exact),
        hidden.new_empty((), dtype=exact),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, stats, by_hidden, by_head, by_bias, unit = output
    ctx.mark_non_differentiable(stats, by_hidden, by_head, by_bias, unit)
    ctx.set_materialize_grads(False)  # no zeros of the size of hidden and head beside the gradient of the loss
    ctx.save_for_backward(by_hidden, by_head, by_bias, unit)
    arguments = _Arguments(*inputs)
    hidden, head, bias = arguments.hidden, arguments.head, arguments.bias
    ctx.dtypes = (hidden.dtype, head.dtype, (head if bias is None else bias).dtype)
    ctx.needs_gradient, ctx.backend = arguments.needs_gradient, arguments.backend


def _backward(ctx: Any, by_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    if by_loss is None:
        return tuple(_Arguments())
    *gradients, unit = ctx.saved_tensors
    factor = by_loss * unit
    scaled = [
        # (1, rows, columns): the form that rows of logits have
        scaled_rows(gradient.view(1, -1, gradient.size(-1)), factor, dtype, ctx.backend).view(gradient.shape)
        if needs_gradient
        else None
        for gradient, dtype, needs_gradient in zip(gradients, ctx.dtypes, ctx.needs_gradient, strict=True)
    ]
    return tuple(_Arguments(**dict(zip(("hidden", "head", "bias"), scaled, strict=True))))


linear_policy_loss_op.register_autograd(_backward, setup_context=_setup_context)
