"""Define outcomes: an answer's log-probs, or the KL divergence of the distribution that they come from."""

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ..model.head import Head
from ..model.memory import columns_at_once
from ..model.tree_forward import HeadRows
from ..ops.head_matmul import write_logits
from ..ops.row_softmax import FLOAT32_NOISE, LOWEST, compute_dtype
from ..ops.upload import upload
from ..tree.prefix_tree import Pack

Outcome = Literal["logprob", "mean_logprob", "last", "mean"]
"""Outcomes: the quantities that can be compared between a completion and its branches.

| name | of the answer's A tokens | source |
|---|---|---|
| `logprob` | the sum of their log-probs | CF paper, eq. 5 |
| `mean_logprob` | the mean of their log-probs | OAR paper, AS-joint |
| `last` | KL of the distribution that the first of them is drawn from | OAR paper, LT-logits |
| `mean` | KL of the softmax of the logits' mean over the rows that predict them | OAR paper, AS-mean |

A KL is KL(P || P_t), the unmasked distribution first (OAR paper, OAR-P).
"""

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
DIVERGENCES: tuple[Outcome, ...] = ("last", "mean")  # outcomes that are distributions


def rounding(logprobs: Tensor, tokens: Tensor, accuracy: float) -> Tensor:
    """Estimate the nats by which rounding may move log-probs (<= 0) of answers; `accuracy` is that of one token."""
    # Roundings of tokens add like independent errors; those of a likely answer shrink with its distance from certainty.
    return (accuracy * (-logprobs).clamp(max=tokens**0.5)).clamp(min=FLOAT32_NOISE)


class Divergences:
    """Computation of KL(P || P_t) of branches, where P is the softmax of the mean logits over a query's rows.

    Logits are never kept, and nothing waits for the device.
    """

    # For a linear head the mean of the logits is the head of the mean hidden state h, and with
    # `f(h) = -log softmax(W h + b)[g]`, g any token, `KL = f(h_t) - f(h) - f'(h) (h_t - h)`: KL is the Bregman
    # divergence of the logits' log-sum-exp, and a term linear in h cancels. With a cap, logits are not linear in h;
    # then, and for the mean of half-precision rows, which is not exact, strips of the logits themselves are averaged.

    def __init__(self, head: Head) -> None:
        self._head = head
        # By bundle: hidden state (H,), slope (H,) of minus the token's log-prob by it, both fp64, and that log-prob ().
        self._tangents: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._rows: dict[int, Tensor] = {}

    def of_pack(self, pack: Pack, rows: HeadRows, counts: Sequence[int], bundles: Sequence[int]) -> Tensor:
        """Read the divergences of a pack's queries, in its order, as `read` does; `rows` are those of the pack."""
        first = pack.query_index[np.cumsum(counts) - counts]
        inside, tokens = upload([pack.query_index, first], rows.states.device)
        states, targets = rows.states.index_select(0, inside), rows.targets.index_select(0, tokens)
        return self.read(states, np.array(counts), targets, bundles)

    def read(self, states: Tensor, counts: np.ndarray, tokens: Tensor, bundles: Sequence[int]) -> Tensor:
        """Compute the KL of each of Q queries from the first query of its bundle, in this call or an earlier one.

        Args:
            states: (N, H) of the queries' rows, one query after the other.
            counts: (Q,) rows of each query, at least 1; equal in a bundle.
            tokens: (Q,) any token, equal in a bundle; a likely one is most accurate.
            bundles: (Q,) number of each query's bundle.

        Returns:
            (Q,) nats, fp32, or float64 for a float64 head; 0 for a bundle's first query.
        """
        head = self._head
        exact = head.weight.dtype in (torch.float32, torch.float64)
        linear = np.zeros(len(counts), bool) if head.softcap is not None else exact | (counts == 1)
        out = states.new_empty(len(counts), dtype=compute_dtype(states.dtype))
        with torch.autocast(states.device.type, enabled=False):
            for chosen, divergence in ((linear, self._by_tangents), (~linear, self._by_strips)):
                if chosen.all():
                    out = divergence(states, counts, tokens, bundles).to(out.dtype)
                elif chosen.any():
                    arrays = [np.flatnonzero(np.repeat(chosen, counts)), np.flatnonzero(chosen)]
                    rows, which = upload(arrays, states.device)
                    own = [bundle for bundle, is_chosen in zip(bundles, chosen, strict=True) if is_chosen]
                    part = divergence(states.index_select(0, rows), counts[chosen], tokens.index_select(0, which), own)
                    out.index_copy_(0, which, part.to(out.dtype))
        return out.clamp_(min=0)  # below it only by rounding

    def _by_tangents(self, states: Tensor, counts: np.ndarray, tokens: Tensor, bundles: Sequence[int]) -> Tensor:
        new = {bundle: q for q, bundle in reversed(list(enumerate(bundles))) if bundle not in self._tangents}
        own, base_of = np.unique(bundles, return_inverse=True)
        arrays = [counts, np.array(list(new.values()), dtype=np.int64), base_of]
        lengths, first, which = upload(arrays, states.device)
        means = row_means(states, lengths).to(self._head.weight.dtype)
        logprobs, means = self._head.logprobs(means, tokens), means.double()
        if new:
            state, token, logprob = (part.index_select(0, first) for part in (means, tokens, logprobs))
            self._tangents |= zip(new, zip(state, _slopes(self._head, state, token), logprob, strict=True), strict=True)
        tangents = zip(*(self._tangents[bundle] for bundle in own), strict=True)
        state, slope, logprob = (torch.stack(part).index_select(0, which) for part in tangents)
        return logprob.double() - logprobs - ((means - state) * slope).sum(1)

    def _by_strips(self, states: Tensor, counts: np.ndarray, tokens: Tensor, bundles: Sequence[int]) -> Tensor:
        starts = np.cumsum(counts) - counts
        for q, bundle in enumerate(bundles):
            if bundle not in self._rows:
                self._rows[bundle] = states[starts[q] : starts[q] + counts[q]].clone()
        own, base_of = np.unique(bundles, return_inverse=True)
        bases = [self._rows[bundle] for bundle in own]
        rows, first = torch.cat([*bases, states]), len(bases)
        lengths, which = upload([np.concatenate([[len(base) for base in bases], counts]), base_of], states.device)
        log_sums = rows.new_full((len(lengths),), float("-inf"), dtype=torch.float64)
        for z in _strips(self._head, rows, lengths):
            log_sums = torch.logaddexp(log_sums, z.logsumexp(1).double())
        mass, gap = rows.new_zeros(2, len(which), dtype=torch.float64)
        for z in _strips(self._head, rows, lengths):
            p = (z[:first] - log_sums[:first, None].to(z.dtype)).exp()
            mass += p.sum(1).index_select(0, which)
            gap += (p.index_select(0, which) * (z[:first].index_select(0, which) - z[first:])).sum(1)
        return gap / mass + log_sums[first:] - log_sums[:first].index_select(0, which)


def row_means(rows: Tensor, counts: Tensor) -> Tensor:
    """Average the rows of each query, `counts` (Q,) of them; returns (Q, N) in the sums' dtype."""
    rows = rows.to(compute_dtype(rows.dtype))
    if len(rows) == len(counts):
        return rows
    return torch.segment_reduce(rows, "mean", lengths=counts, unsafe=True)


def _slopes(head: Head, states: Tensor, tokens: Tensor) -> Tensor:
    """Derive minus each token's log-prob by its row's hidden state (B, H); returns (B, H) float64."""
    width = columns_at_once(max(states.shape), states.device)  # of the logits, and of the head in float64
    scale = head.logit_scale
    peak = states.new_full((len(states), 1), float("-inf"))
    total, mean = torch.zeros_like(peak), torch.zeros_like(states)
    for start in range(0, len(head.weight), width):
        weight = head.weight[start : start + width].double()
        z = states @ weight.t()
        if head.bias is not None:
            z += head.bias[start : start + width].double()
        z = z.mul_(scale).clamp_(min=LOWEST)
        highest = torch.maximum(peak, z.amax(1, keepdim=True))
        decay, p = (peak - highest).exp(), (z - highest).exp()
        total, mean, peak = total * decay + p.sum(1, keepdim=True), mean * decay + p @ weight, highest
    return scale * (mean / total - head.weight[tokens].double())


def _strips(head: Head, rows: Tensor, counts: Tensor) -> Iterator[Tensor]:
    """Yield mean logits (Q, S) over each query's rows, strip after strip of the vocabulary."""
    kind = compute_dtype(rows.dtype)
    width = columns_at_once(len(rows), rows.device)
    for start in range(0, len(head.weight), width):
        weight = head.weight[start : start + width]
        z = rows.new_empty(len(rows), len(weight), dtype=kind)
        write_logits(rows, weight, z)
        if head.bias is not None:
            z += head.bias[start : start + width].to(kind)
        yield row_means(head.transformed(z).clamp_(min=LOWEST), counts)
