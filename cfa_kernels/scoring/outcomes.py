"""What a masked span may move: an answer's log-probs, or the distribution that they come from, by its KL divergence.

Scoring feeds packs and reads them here, off the hidden states of the rows that predict an answer. No row's logits are
kept: a divergence takes one log-prob and one dot product a branch, or strips of the vocabulary. Nothing here waits for
the device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ..hf.head import Head
from ..hf.memory import columns_at_once
from ..hf.tree_forward import HeadRows, target_logprobs
from ..ops.head_matmul import sum_dtype, write_logits
from ..ops.row_softmax import FLOAT32_NOISE, LOWEST
from ..ops.upload import upload
from ..packing.prefix_tree import Pack, Query

Outcome = Literal["logprob", "mean_logprob", "last", "mean"]
"""What is compared between a completion and its branches.

| name | of the answer's A tokens | source |
|---|---|---|
| `logprob` | the sum of their log-probs | CF paper, eq. 5 |
| `mean_logprob` | the mean of their log-probs | OAR paper, AS-joint |
| `last` | KL of the distribution that the first of them is drawn from | OAR paper, LT-logits |
| `mean` | KL of the softmax of the logits' mean over the rows that predict them | OAR paper, AS-mean |

A KL is KL(P || P_t), the unmasked distribution first (OAR paper, OAR-P).
"""

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""Their names."""

DIVERGENCES: tuple[Outcome, ...] = ("last", "mean")
"""Outcomes that are distributions."""


def checked_outcome(outcome: str) -> Outcome:
    """Raises `ValueError` for a name that is none."""
    if outcome not in OUTCOMES:
        raise ValueError(f"outcome must be one of {', '.join(OUTCOMES)}, got {outcome!r}")
    return outcome  # type: ignore[return-value]


def rounding(logprobs: Tensor, tokens: int, noise: float = FLOAT32_NOISE) -> Tensor:
    """Nats by which log-probs (<= 0) of an answer of so many tokens may be off just by rounding.

    `noise` is that of one token, see `noise_floor`: roundings of tokens add like independent errors, and those of a
    likely answer shrink with its distance from certainty.
    """
    return (noise * (-logprobs).clamp(max=tokens**0.5)).clamp(min=FLOAT32_NOISE)


class OutcomeReader:
    """Reads the values of queries off packs; what completions gave is kept for branches in later packs.

    Args:
        head: the head that `check_head` gives.
        temperature: of tempered log-probs.
    """

    def __init__(self, head: Head, temperature: float = 1.0) -> None:
        self._head, self._temperature = head, temperature
        self._divergences = Divergences(head)

    def read(
        self, pack: Pack, queries: Sequence[Query], units: Sequence[int], rows: HeadRows
    ) -> tuple[Tensor, np.ndarray]:
        """The values of a pack's queries: log-probs, or minus a divergence.

        Args:
            pack: that was fed.
            queries: of the pack, in its order.
            units: the row that each belongs to. A row's first divergence query is the completion as sampled, from
                which its others diverge.
            rows: R of them, of the pack.

        Returns:
            fp32 values, or those of a float64 head, on its device; and an index into them, (sum of `num_values`,)
            int64 on the host, under which they are those of one query after the other.
        """
        diverges = np.array([query.divergence for query in queries], dtype=bool)
        if not diverges.any():
            return target_logprobs(self._head, rows, self._temperature), pack.query_index
        counts = np.array([len(query.targets) for query in queries])
        asks = np.repeat(diverges, counts)  # of each target
        wanted, place = np.unique(pack.query_index[~asks], return_inverse=True)
        inside, counts = pack.query_index[asks], counts[diverges]
        first = inside[np.cumsum(counts) - counts]
        plain, moved, tokens = upload([wanted, inside, first], rows.states.device)
        found = -self._divergences.read(
            rows.states.index_select(0, moved),
            counts,
            rows.targets.index_select(0, tokens),
            [unit for unit, one in zip(units, diverges, strict=True) if one],
        )
        is_divergence = np.repeat(diverges, [query.num_values for query in queries])
        index = np.empty(len(is_divergence), dtype=np.int64)
        index[is_divergence], index[~is_divergence] = np.arange(len(counts)), len(counts) + place
        if len(wanted):
            num_tempered = int((wanted >= len(pack.rows) - pack.num_tempered).sum())
            some = HeadRows(rows.states.index_select(0, plain), rows.targets.index_select(0, plain), num_tempered)
            found = torch.cat([found, target_logprobs(self._head, some, self._temperature)])
        return found, index


@dataclass(frozen=True)
class _Tangent:
    """The distribution of a completion under a linear head, as branches need it."""

    state: Tensor  # (H,) fp64
    slope: Tensor  # (H,) fp64: of minus the token's log-prob, by the hidden state
    logprob: Tensor  # () of the token


class Divergences:
    """KL(P || P_t) of branches from their completions, P the softmax of the mean logits over a query's rows.

    For a linear head the mean of the logits is the head of the mean hidden state h, and with
    `f(h) = -log softmax(W h + b)[g]`, g any token, `KL = f(h_t) - f(h) - f'(h) (h_t - h)`: the logits' log-sum-exp is
    what KL is the Bregman divergence of, and a term linear in h changes nothing. A cap makes the mean another one;
    then, and for the mean of half-precision rows, which is none, strips of the logits themselves are averaged.

    Args:
        head: maps hidden states to logits.
    """

    def __init__(self, head: Head) -> None:
        self._head = head
        self._tangents: dict[int, _Tangent] = {}
        self._rows: dict[int, Tensor] = {}

    def read(self, states: Tensor, counts: np.ndarray, tokens: Tensor, units: Sequence[int]) -> Tensor:
        """KL of each of Q queries from the first query of its unit, in this call or an earlier one; 0 for that one.

        Args:
            states: (N, H) hidden states of their rows, one query after the other.
            counts: (Q,) rows of each, at least one; equal in a unit.
            tokens: (Q,) any token, equal in a unit; best a likely one.
            units: (Q,) whose.

        Returns:
            (Q,) nats, fp32 or the dtype of a float64 head.
        """
        head = self._head
        exact = head.weight.dtype in (torch.float32, torch.float64)
        linear = np.zeros(len(counts), bool) if head.softcap is not None else exact | (counts == 1)
        out = states.new_empty(len(counts), dtype=sum_dtype(states.dtype))
        with torch.autocast(states.device.type, enabled=False):
            for chosen, of in ((linear, self._by_tangents), (~linear, self._by_strips)):
                if chosen.all():
                    out = of(states, counts, tokens, units).to(out.dtype)
                elif chosen.any():
                    taken = [np.flatnonzero(np.repeat(chosen, counts)), np.flatnonzero(chosen)]
                    rows, which = upload(taken, states.device)
                    mine = [unit for unit, one in zip(units, chosen, strict=True) if one]
                    found = of(states.index_select(0, rows), counts[chosen], tokens.index_select(0, which), mine)
                    out.index_copy_(0, which, found.to(out.dtype))
        return out.clamp_(min=0)  # below it only by rounding

    def _by_tangents(self, states: Tensor, counts: np.ndarray, tokens: Tensor, units: Sequence[int]) -> Tensor:
        new = {unit: q for q, unit in reversed(list(enumerate(units))) if unit not in self._tangents}
        of = {unit: i for i, unit in enumerate(dict.fromkeys(units))}
        arrays = [counts, np.array(list(new.values()), dtype=np.int64), np.array([of[unit] for unit in units])]
        rows_of, first, which = upload(arrays, states.device)
        means = row_means(states, rows_of).to(self._head.weight.dtype)
        logprobs, means = self._head.logprobs(means, tokens), means.double()
        if new:
            own = [part.index_select(0, first) for part in (means, tokens, logprobs)]
            for unit, state, slope, logprob in zip(new, own[0], _slopes(self._head, *own[:2]), own[2], strict=True):
                self._tangents[unit] = _Tangent(state, slope, logprob)
        tangents = [self._tangents[unit] for unit in of]
        state, slope, logprob = (
            torch.stack([getattr(tangent, name) for tangent in tangents]).index_select(0, which)
            for name in ("state", "slope", "logprob")
        )
        return logprob.double() - logprobs - ((means - state) * slope).sum(1)

    def _by_strips(self, states: Tensor, counts: np.ndarray, tokens: Tensor, units: Sequence[int]) -> Tensor:
        starts = np.cumsum(counts) - counts
        for q, unit in enumerate(units):
            if unit not in self._rows:
                self._rows[unit] = states[starts[q] : starts[q] + counts[q]].clone()
        of = {unit: i for i, unit in enumerate(dict.fromkeys(units))}
        bases = [self._rows[unit] for unit in of]
        rows, first = torch.cat([*bases, states]), len(bases)
        arrays = [np.concatenate([[len(base) for base in bases], counts]), np.array([of[unit] for unit in units])]
        rows_of, which = upload(arrays, states.device)
        log_sums = rows.new_full((len(rows_of),), float("-inf"), dtype=torch.float64)
        for z in _strips(self._head, rows, rows_of):
            log_sums = torch.logaddexp(log_sums, z.logsumexp(1).double())
        mass, gap = rows.new_zeros(2, len(which), dtype=torch.float64)
        for z in _strips(self._head, rows, rows_of):
            p = (z[:first] - log_sums[:first, None].to(z.dtype)).exp()
            mass += p.sum(1).index_select(0, which)
            gap += (p.index_select(0, which) * (z[:first].index_select(0, which) - z[first:])).sum(1)
        return gap / mass + log_sums[first:] - log_sums[:first].index_select(0, which)


def row_means(rows: Tensor, counts: Tensor) -> Tensor:
    """(Q, N) mean of each query's rows, `counts` (Q,) of them, in their sums' dtype."""
    rows = rows.to(sum_dtype(rows.dtype))
    if len(rows) == len(counts):
        return rows
    return torch.segment_reduce(rows, "mean", lengths=counts, unsafe=True)


def _slopes(head: Head, states: Tensor, tokens: Tensor) -> Tensor:
    """(B, H) derivative of minus each token's log-prob by its row's hidden state (B, H), float64."""
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
    """(Q, S) mean logits over each query's rows, strip after strip of the vocabulary."""
    kind = sum_dtype(rows.dtype)
    width = columns_at_once(len(rows), rows.device)
    for start in range(0, len(head.weight), width):
        weight = head.weight[start : start + width]
        z = rows.new_empty(len(rows), len(weight), dtype=kind)
        write_logits(rows, weight, z)
        if head.bias is not None:
            z += head.bias[start : start + width].to(kind)
        yield row_means(head.transformed(z).clamp_(min=LOWEST), counts)
