"""Compute the policy loss from hidden states and the head, strip by strip of logits, with gradients in the forward.

For each strip: logits by GEMM, one row kernel that turns them into their gradient, then the GEMMs of the gradients by
hidden and head. If a token's loss depends on its sequence, strips hold whole sequences, and the sums over them are
computed between two row kernels. If a sequence is longer than a strip, or its end not known on the host, logits are
made a second time.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..ops.head_matmul import HeadGradients, Index, empty_strip, write_logits
from ..ops.kept_tokens import KeptLogits, KeptTokens, Support
from ..ops.operator_arguments import arguments_of
from ..ops.row_logprobs import row_gradients, row_logprobs
from ..ops.row_softmax import LogitRows, RowLogprobs, Softmax, compute_dtype
from ..ops.upload import upload
from .centering import subtract_expected_score
from .logits import scaled_rows
from .options import LossOptions
from .policy_rows import STATS, policy_of_logprobs, policy_rows, to_unit_scale
from .token_loss import Tokens, refuse_second_derivative

DEAD_SHARE = 0.1  # rows without gradient are cut out of a strip before its GEMMs if they are at least this share of it


def contributing(tokens: Tokens, *, joins_tokens: bool, every: bool) -> Tensor:
    """Find those of `tokens` (B, T) whose log-prob the loss or a gradient needs, (B, T) bool."""
    # A token with zero weighted advantage adds nothing; where losses join a sequence's tokens its log-prob is
    # needed if any of them has one. The KL term and the entropy want `every` counted token.
    counted = tokens.scale > 0
    if every or tokens.ref_logprobs is not None:
        return counted
    moved = tokens.moved()
    if joins_tokens:
        moved = (moved & counted).any(1, keepdim=True)
    return counted & moved


def _sequences(rows: Tensor | None, shape: torch.Size, size: int) -> Iterator[tuple[slice, slice]]:
    """Cut B sequences of T tokens into runs of at most `size` looked-at tokens if possible, and yield those tokens too.

    One run of all if `rows` are not on the host or not in order.
    """
    if rows is not None and (rows.device.type != "cpu" or bool((rows.diff() <= 0).any())):
        yield slice(0, shape[0]), slice(0, len(rows))
        return
    grid = torch.arange(1, shape[0] + 1) * shape[1]
    ends = grid if rows is None else torch.searchsorted(rows, grid)
    first = done = 0
    for b, (end, after) in enumerate(itertools.pairwise([*ends.tolist(), math.inf]), 1):
        if after - done > size:
            yield slice(first, b), slice(done, int(end))
            first, done = b, int(end)


def _strips(
    hidden: Tensor,
    support: Support,
    counted: Tensor,
    rows: Tensor | None,
    rows_alone: bool,
    strip: tuple[Tensor, Tensor],
    looked_at: slice,
) -> Iterator[tuple[Index, Index, Tensor, Tensor, Tensor, KeptLogits | None]]:
    """Yield the indices of n tokens, and of their states, those (n, H), logits and their gradient (1, n, V) in `strip`.

    Then the logits to centre the scores by, which the gradient may be written over.

    `hidden` is (N, H), or with `rows_alone` (M, H): the states of the M `rows`, in their order; `looked_at` takes some
    of the rows, or if they are None of all tokens.
    """
    size = len(strip[0])
    for start in range(looked_at.start, looked_at.stop, size):
        part = slice(start, min(start + size, looked_at.stop))
        tokens = part if rows is None else rows[part]
        places = part if rows_alone else tokens
        # Padding may hold nan; rows that do not count are 0, so that they add 0 to the head's gradient.
        states = torch.where(counted[tokens].unsqueeze(1), hidden[places], 0)
        logits, gradient = (memory[: len(states)] for memory in strip)
        write_logits(states, support.head, logits)
        kept = support.restrict(logits, part)
        yield tokens, places, states, logits.unsqueeze(0), gradient.unsqueeze(0), kept


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
    kept_offsets: Tensor | None,
    kept_ids: Tensor | None,
    kept_logprobs: Tensor | None,
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
    contiguous, N = B * T. Gradients that are not needed are empty. `rows`, on any device, are the flattened tokens to
    look at; None with `drop_rows` waits for the device and takes those that `contributing` finds. kept_offsets,
    kept_ids and kept_logprobs, on the host, are `KeptTokens` of the N tokens; with them `rows` on the device are waited
    for, and with log-probs scores are centred.
    """
    options, cap = LossOptions.of(kinds, numbers), Softmax(*softmax)
    shape = scale.shape
    grid, entropy_scale, unit = to_unit_scale(
        Tokens(old_logprobs, advantages, weights, ref_logprobs, sampling_logprobs, scale), entropy_scale
    )
    if rows is None and drop_rows:
        some = contributing(grid, joins_tokens=options.joins_tokens, every=with_entropy)
        rows = some.flatten().nonzero().squeeze(1)
    tokens, targets = grid.map(torch.flatten), targets.flatten()
    counted, count = tokens.scale > 0, len(hidden if rows is None else rows)
    runs = _sequences(rows, shape, chunk_size) if options.joins_tokens else iter(())
    kept = None
    if kept_offsets is not None and kept_ids is not None:
        kept = KeptTokens(kept_offsets, kept_ids, kept_logprobs)
        kept = kept if rows is None else kept.take(rows.cpu())
    if rows is not None and rows.device != hidden.device:
        (rows,) = upload([rows], hidden.device)
    support = Support.of(head, bias, targets, kept)
    strip = empty_strip(min(chunk_size, max(count, 1)), len(support.head), hidden.dtype, hidden.device)
    strips = partial(_strips, hidden, support, counted, rows, rows_alone, strip)
    gradients, learns = HeadGradients(hidden, support.head, needs_gradient), any(needs_gradient)
    loss, stats = scale.new_zeros(()), scale.new_zeros(len(STATS), targets.numel())

    def rows_of(index: Index, logits: Tensor) -> LogitRows:
        return LogitRows(logits, support.bias, support.targets[index], cap, backend, kept is not None)

    def add_gradients(index: Index, states: Tensor, gradient: Tensor, by_logprob: Tensor) -> None:
        if drop_rows and entropy_scale is None and rows is not None and kept_logprobs is None:
            index, states, gradient = _without_dead_rows(index, states, gradient, by_logprob)
        gradients.add(index, states, gradient)

    with torch.autocast(hidden.device.type, enabled=False):
        for index, place, states, logits, gradient, kept_logits in (
            () if options.joins_tokens else strips(slice(0, count))
        ):
            logit_rows, part = rows_of(index, logits), tokens.map(itemgetter(index))
            part_loss, stats[:, index], by_part = policy_rows(
                logit_rows, part, entropy_scale, options, gradient if learns else None, with_entropy=with_entropy
            )
            loss += part_loss
            if kept_logits is not None:
                loss += subtract_expected_score(kept_logits, logit_rows, part, options, gradient if learns else None)
            if learns:
                add_gradients(place, states, gradient[0], by_part)

        known, (by_logprob, by_entropy) = torch.zeros_like(stats[:4]), torch.zeros_like(stats[:2])
        for sequences, looked_at in runs:
            once = looked_at.stop - looked_at.start <= chunk_size
            made = list(strips(looked_at)) if once else strips(looked_at)
            for index, _, _, logits, gradient, _ in made:
                values = row_logprobs(
                    rows_of(index, logits), counted[index], with_entropy=with_entropy,
                    gradient=gradient if once and learns else None, entropy_gradient=entropy_scale is not None,
                )  # fmt: skip
                known[:, index] = torch.stack(values[:4])
            run = slice(sequences.start * shape[1], sequences.stop * shape[1])
            part_loss, stats[:, run], by_logprob[run], by_entropies = policy_of_logprobs(
                known[0, run],
                known[1, run],
                tokens.map(itemgetter(run)),
                entropy_scale,
                options,
                (-1, shape[1]),
                learns,
            )
            loss += part_loss
            if by_entropies is not None:
                by_entropy[run] = by_entropies
            for index, place, states, logits, gradient, _ in (made if once else strips(looked_at)) if learns else ():
                if not once:
                    values = RowLogprobs(*known[:, index])
                by_entropies = None if entropy_scale is None else by_entropy[index]
                row_gradients(rows_of(index, logits), gradient, by_logprob[index], by_entropies, values)
                add_gradients(place, states, gradient[0], by_logprob[index])
    by_hidden, by_head, by_bias = gradients.finish()
    by_head, by_bias = (support.widened(total, len(head)) for total in (by_head, by_bias))
    return loss * unit, stats, by_hidden, by_head, by_bias, unit


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
    ctx.set_materialize_grads(False)  # no zeros of the size of hidden and head next to the gradient of the loss
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
