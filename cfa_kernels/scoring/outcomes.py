"""Define outcomes: an answer's log-probs, or the KL divergence of the distribution that they come from."""

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ..model.head import Head
from ..model.memory import columns_at_once
from ..ops.head_matmul import write_logits
from ..ops.row_softmax import LOWEST, compute_dtype
from ..ops.upload import upload

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


class Divergences:
    """Computation of KL(P || P_t) of branches, where P is the softmax of the mean logits over a query's rows.

    Logits are never kept, and nothing waits for the device.
    """

    def __init__(self, head: Head) -> None:
        self._head = head
        # A linear head maps the mean of its inputs to the mean of its outputs. Of half precision it is not exact.
        self._averages_states = head.softcap is None and head.weight.dtype in (torch.float32, torch.float64)
        self._bases: dict[int, Tensor] = {}  # hidden states of the first query of each bundle

    def read(self, states: Tensor, counts: np.ndarray, bundles: Sequence[int]) -> Tensor:
        """Compute the KL (Q,) nats of each of Q queries from the first query of its bundle, in this or an earlier call.

        `states` are (N, H) of the queries' rows, `counts` (Q,) of them each, equal in a bundle.
        """
        with torch.autocast(states.device.type, enabled=False):
            if self._averages_states:
                states = row_means(states, *upload([counts], states.device)).to(self._head.weight.dtype)
                counts = np.ones_like(counts)
            for bundle, start, stop in zip(bundles, np.cumsum(counts) - counts, np.cumsum(counts), strict=True):
                if bundle not in self._bases:
                    self._bases[bundle] = states[start:stop].clone()
            own, base_of = np.unique(bundles, return_inverse=True)
            bases = [self._bases[bundle] for bundle in own]
            arrays = [np.concatenate([[len(base) for base in bases], counts]), base_of]
            values = self._from_bases(torch.cat([*bases, states]), *upload(arrays, states.device))
        return values.clamp_(min=0).to(compute_dtype(states.dtype))  # below it only by rounding

    def _from_bases(self, rows: Tensor, lengths: Tensor, base_of: Tensor) -> Tensor:
        """Compute the KL (Q,) of queries from their bases, which come first, in one pass over strips of logits."""
        # KL(P || P_t) = E_P[z - z_t] + log sum exp z_t - log sum exp z, with sums relative to the largest logit so far.
        bases = len(lengths) - len(base_of)
        peak = rows.new_full((len(lengths),), LOWEST, dtype=torch.float64)
        total, gap = torch.zeros_like(peak), torch.zeros_like(peak[bases:])
        for z in _strips(self._head, rows, lengths):
            highest = torch.maximum(peak, z.amax(1).double())
            decay, p = (peak - highest).exp(), (z - highest[:, None].to(z.dtype)).exp()
            mean = p.index_select(0, base_of), z.index_select(0, base_of) - z[bases:]
            total, peak = total * decay + p.sum(1).double(), highest
            gap = gap * decay.index_select(0, base_of) + (mean[0] * mean[1]).sum(1).double()
        log_sums = peak + total.log()
        of_base = log_sums.index_select(0, base_of)
        return gap / total.index_select(0, base_of) + log_sums[bases:] - of_base


def row_means(rows: Tensor, counts: Tensor) -> Tensor:
    """Average the rows of each query, `counts` (Q,) of them; returns (Q, N) in the sums' dtype."""
    rows = rows.to(compute_dtype(rows.dtype))
    if len(rows) == len(counts):
        return rows
    return torch.segment_reduce(rows, "mean", lengths=counts, unsafe=True)


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
