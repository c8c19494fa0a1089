"""Centre the scores of a policy loss over the ids that the sampler kept (Marek and Ryabinin, arXiv 2609.20807)."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..ops.kept_tokens import KeptLogits, KeptTokens
from ..ops.row_softmax import LogitRows
from .options import LossOptions
from .token_loss import Tokens, policy_gradient

NOISE = 1e-2  # of log-probs, and of sums of probabilities, that may have been stored in half precision


def subtract_expected_score(
    kept: KeptLogits, rows: LogitRows, tokens: Tokens, options: LossOptions, gradient: Tensor | None
) -> Tensor:
    """Add score centering to the gradient by the logits of `rows`, (1, n, V), in place; return its part of the loss.

    Let q be the sampler's distribution over the ids v that it kept, p the policy's, and b_v the derivative of the
    token's loss by its log-prob, had v been drawn. A token's part of the gradient, b_y grad log p_y, becomes
    `b_y grad log p_y - sum_v q_v b_v grad log p_v`, whose mean over y ~ q is 0 (the paper's eqs. 9 and 12; q and b are
    constants). By a logit z_j the sum is q_j b_j - p_j sum_v q_v b_v, so that only kept ids change. With `reinforce`
    b_v = -A, and -A (1[j = y] - q_j) is left.
    """

    def by_row(kind: str, values: Tensor) -> Tensor:  # in a fixed order, as sums by index are not on a GPU
        return torch.segment_reduce(values, kind, lengths=kept.counts, unsafe=True)

    z, softmax = kept.values.to(tokens.scale.dtype), rows.softmax
    if rows.bias is not None:
        z = z + rows.bias[kept.column].to(z.dtype)
    slope = torch.ones_like(z)
    if softmax.softcap:
        squashed = torch.tanh(z / softmax.softcap)
        z, slope = softmax.softcap * squashed, 1 - squashed * squashed
    z, slope = z / softmax.temperature, slope / softmax.temperature
    z = z - by_row("max", z)[kept.line]
    logprobs = z - by_row("sum", z.exp()).log()[kept.line]

    drawn = tokens.map(lambda column: column[kept.line][None])
    sampled = torch.where((drawn.scale > 0) & drawn.moved(), kept.logprobs.to(z.dtype), 0)  # others may be anything
    drawn = drawn._replace(
        ref_logprobs=None,  # the KL term is no part of it
        old_logprobs=None if drawn.old_logprobs is None else sampled,
        sampling_logprobs=None if drawn.sampling_logprobs is None else sampled,
    )
    by_logprob = (sampled.exp() * policy_gradient(logprobs[None], drawn, options)[1])[0]
    if gradient is not None:
        by_logit = (by_logprob - by_row("sum", by_logprob)[kept.line] * logprobs.exp()) * slope
        there = 0, kept.line, kept.column
        gradient[there] = (gradient[there] - by_logit).to(gradient.dtype)
    return -(by_logprob * logprobs).sum()


def check_joins(joins_tokens: bool) -> None:
    """Raise `ValueError` if a token's loss depends on the log-probs of its sequence, which centering does not know."""
    if joins_tokens:
        raise ValueError(
            "score_centering needs importance_sampling_level='token', no sampling_mode or mask of sequences, and "
            "another loss_type than vespo"
        )


def check_centering(
    kept: KeptTokens | None,
    place: Callable[[int], str],
    *,
    targets: Tensor | None = None,
    moved: Tensor | None = None,
    **logprobs: Tensor,
) -> None:
    """Raise `ValueError` unless scores of N tokens can be centred, naming `place(n)` and value.

    `kept` is checked already. The sampler's `logprobs` (N,) by name are looked at where `moved` (N,); all on the host.
    """
    if kept is None or (kept.logprobs is None and len(kept.ids)):
        got = "None" if kept is None else "ids without logprobs"
        raise ValueError(f"score_centering needs kept_tokens with the sampler's logprobs of the ids, got {got}")
    if targets is None or moved is None:
        return
    token, sampled = kept.tokens(), torch.zeros(0) if kept.logprobs is None else kept.logprobs
    mass = torch.zeros(len(targets), dtype=sampled.dtype).index_add_(0, token, sampled.exp())
    own, drawn = torch.full_like(mass, torch.nan), kept.ids == targets[token]
    own[token[drawn]] = sampled[drawn]
    for n in (moved & ~((mass - 1).abs() <= NOISE)).nonzero().flatten().tolist():
        raise ValueError(
            f"{place(n)}: score_centering needs probabilities that sum to 1 over the ids that the sampler kept, got "
            f"{mass[n].item():.6g} over {int(kept.counts[n])} ids; normalise logprobs over them, each id once"
        )
    for name, column in logprobs.items():
        for n in (moved & ~((column - own).abs() <= NOISE)).nonzero().flatten().tolist():
            raise ValueError(
                f"{place(n)}: with score_centering {name} must be the drawn token's log-prob in kept_tokens, "
                f"{own[n].item():.6g}, got {column[n].item():.6g}"
            )
