"""Compute the policy loss from hidden states and the head, strip by strip of logits, with gradients in the forward.

For each strip: logits by GEMM, one row kernel that turns them into their gradient, then the GEMMs of the gradients by
hidden and head. If a token's loss depends on its sequence, strips hold whole sequences, and the sums over them are
computed between two row kernels. If a sequence is longer than a strip, or its end not known on the host, logits are
made a second time.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.head_matmul import HeadGradients, Index, empty_strip, write_logits
from ..ops.kept_tokens import KeptLogits, KeptTokens, Support
from ..ops.operator_arguments import arguments_of
from ..ops.row_logprobs import row_gradients, row_logprobs
from ..ops.row_softmax import LogitRows, RowLogprobs, Softmax, compute_dtype
from ..ops.upload import upload
from .centering import subtract_expected_score
from .options import LossOptions
from .policy_rows import STATS, has_kernel, policy_of_logprobs, policy_rows, to_unit_scale
from .token_loss import Tokens, fold_correction, refuse_second_derivative

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


class Strip(NamedTuple):
    """Logits of n rows."""

    tokens: Index
    places: Index  # of their states
    states: Tensor  # (n, H)
    rows: LogitRows  # (1, n, V)
    gradient: Tensor  # (1, n, V), perhaps over the logits
    kept: KeptLogits | None  # to centre the scores by


def _sequences(rows: Tensor | None, shape: torch.Size, size: int) -> Iterator[tuple[slice, slice]]:
    """Cut B sequences of T tokens into runs of at most `size` looked-at tokens if possible: tokens, and those of them.

    One run of all if `rows` are not on the host or not in order.
    """
    if rows is not None and (rows.device.type != "cpu" or bool((rows.diff() <= 0).any())):
        yield slice(0, shape.numel()), slice(0, len(rows))
        return
    grid = torch.arange(1, shape[0] + 1) * shape[1]
    ends = grid if rows is None else torch.searchsorted(rows, grid)
    first = done = 0
    for b, (end, after) in enumerate(itertools.pairwise([*ends.tolist(), math.inf]), 1):
        if after - done > size:
            yield slice(first * shape[1], b * shape[1]), slice(done, int(end))
            first, done = b, int(end)


def _cut(part: slice, size: int) -> Iterator[slice]:
    for start in range(part.start, part.stop, size):
        yield slice(start, min(start + size, part.stop))


def _live(index: Index, hidden: Tensor, gradient: Tensor, by_logprob: Tensor) -> tuple[Index, Tensor, Tensor]:
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
    folded = grid
    if kept_logprobs is None:  # centering needs the correction of every id
        folded, options = fold_correction(grid, options)
    if rows is None and drop_rows:
        some = contributing(grid, joins_tokens=options.joins_tokens, every=with_entropy)
        rows = some.flatten().nonzero().squeeze(1)
    tokens, targets = folded.map(torch.flatten), targets.flatten()
    counted, count = tokens.scale > 0, len(hidden if rows is None else rows)
    by_sequence = _sequences(rows, shape, chunk_size)
    kept = None
    if kept_offsets is not None and kept_ids is not None:
        kept = KeptTokens(kept_offsets, kept_ids, kept_logprobs)
        kept = kept if rows is None else kept.take(rows.cpu())
    if rows is not None and rows.device != hidden.device:
        (rows,) = upload([rows], hidden.device)
    support = Support.of(head, bias, targets, kept)
    memory = empty_strip(min(chunk_size, max(count, 1)), len(support.head), hidden.dtype, hidden.device)
    gradients, learns = HeadGradients(hidden, support.head, needs_gradient), any(needs_gradient)
    loss, stats = scale.new_zeros(()), scale.new_zeros(len(STATS), targets.numel())
    known, (by_logprob, by_entropy) = torch.zeros_like(stats[:4]), torch.zeros_like(stats[:2])
    whole = learns and backend == "triton" and has_kernel(tokens, options)
    cuts_dead = drop_rows and entropy_scale is None and rows is not None and kept_logprobs is None

    def tokens_of(part: slice) -> Index:
        return part if rows is None else rows[part]

    def strips(looked_at: slice) -> Iterator[Strip]:
        for part in _cut(looked_at, chunk_size):
            index = tokens_of(part)
            places = part if rows_alone else index
            # Padding may hold nan; rows that do not count are 0, so that they add 0 to the head's gradient.
            states = torch.where(counted[index].unsqueeze(1), hidden[places], 0)
            logits, gradient = (one[: len(states)].unsqueeze(0) for one in memory)
            write_logits(states, support.head, logits[0])
            kept_logits = support.restrict(logits[0], part)
            logit_rows = LogitRows(logits, support.bias, support.targets[index], cap, backend, kept is not None)
            yield Strip(index, places, states, logit_rows, gradient, kept_logits)

    by_token = ((tokens_of(part), part) for part in _cut(slice(0, count), chunk_size))
    with torch.autocast(hidden.device.type, enabled=False):
        for run, looked_at in by_sequence if options.joins_tokens else by_token:
            once = looked_at.stop - looked_at.start <= chunk_size
            made = list(strips(looked_at)) if once else strips(looked_at)
            some_tokens = tokens.map(itemgetter(run))
            if whole:
                (one,) = made
                part_loss, stats[:, run], by_logprob[run] = policy_rows(
                    one.rows, some_tokens, entropy_scale, options, one.gradient, with_entropy=with_entropy
                )
            else:
                for one in made:
                    values = row_logprobs(
                        one.rows, counted[one.tokens], with_entropy=with_entropy,
                        gradient=one.gradient if once and learns else None, entropy_gradient=entropy_scale is not None,
                    )  # fmt: skip
                    known[:, one.tokens] = torch.stack(values[:4])
                part_loss, stats[:, run], by_logprob[run], by_entropy[run] = policy_of_logprobs(
                    known[0, run], known[1, run], some_tokens, entropy_scale, options,
                    (-1, shape[1]) if options.joins_tokens else (1, -1), learns,
                )  # fmt: skip
            loss += part_loss
            for one in made if once else strips(looked_at) if learns else ():
                if learns and not whole:
                    if not once:
                        values = RowLogprobs(*known[:, one.tokens])
                    by_entropies = None if entropy_scale is None else by_entropy[one.tokens]
                    row_gradients(one.rows, one.gradient, by_logprob[one.tokens], by_entropies, values)
                if one.kept is not None:
                    own = tokens.map(itemgetter(one.tokens))
                    gradient = one.gradient if learns else None
                    loss += subtract_expected_score(one.kept, one.rows, own, options, gradient)
                if learns:
                    part = one.places, one.states, one.gradient[0]
                    gradients.add(*_live(*part, by_logprob[one.tokens]) if cuts_dead else part)
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
    ctx.needs_gradient = arguments.needs_gradient


def _backward(ctx: Any, by_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    if by_loss is None:
        return tuple(_Arguments())
    *gradients, unit = ctx.saved_tensors
    factor = (by_loss * unit).view(1)  # a tensor of no dimension would be rounded to halves before the product
    scaled = [
        torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype)) if needs_gradient else None
        for gradient, dtype, needs_gradient in zip(gradients, ctx.dtypes, ctx.needs_gradient, strict=True)
    ]
    return tuple(_Arguments(**dict(zip(("hidden", "head", "bias"), scaled, strict=True))))


linear_policy_loss_op.register_autograd(_backward, setup_context=_setup_context)
