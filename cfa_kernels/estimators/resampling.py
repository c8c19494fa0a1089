"""Replace a masked unit by what the model itself might have written there.

`resampled_fills` samples replacements of each unit, and `resampled_scores` scores the answers after them.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from ..hf.head import Head
from ..hf.limits import refuse_length_dependent_rope, rows_per_forward
from ..hf.memory import rows_at_once, run_in_memory
from ..hf.model import vocab_size
from ..hf.model_walk import ModelWalk
from ..hf.stateful_layers import has_cells
from ..hf.tree_forward import KeyValueStore, packed_hidden, tree_attention_mode
from ..hf.verify import check_supported
from ..ops.head_matmul import empty_strip, write_logits
from ..ops.row_softmax import Softmax, compute_dtype, probabilities
from ..packing.packs import groups_within, pack_of
from ..packing.prefix_tree import PrefixTree
from ..rows import keyed_generator
from ..scoring.access import ModelAccess
from ..scoring.batch import ScoredBatch, ScoredRow
from ..scoring.masked import CounterfactualScores, ScoringWork, score_batch
from ..scoring.outcomes import Outcome
from ..span import Span


def resampled_fills(
    access: ModelAccess, batch: ScoredBatch, *, samples: int = 1
) -> tuple[list[list[np.ndarray]], ScoringWork]:
    """Sample replacements of every unit, of equal length, from the model's own distribution at its place.

    Each token is drawn given the prompt, the completion before the unit and the fill so far; text after the unit
    is not seen. All units of all completions advance together, one token each per forward, on the keys and values of
    one packed tree. A fill depends on the batch's seed, the row's index and the unit's place, not on the rest of the
    batch (to rounding, which can change a draw that falls on an edge between two tokens).

    Args:
        access: access to the model, which must be in this process.
        batch: completions and the units to fill. A completion and its fills stay together, even over the token budget,
            as long as memory holds them.
        samples: fills of each unit, at least 1.

    Returns:
        For each completion the ids, int64, of all its units, draw by draw, as many as the unit has tokens; and counts
        of work.

    Raises:
        TypeError, NotImplementedError: models that cannot be scored, or whose rotary frequencies would change inside a
            batch this long; the message says why.
        FloatingPointError: the model gave no distribution; the message names the row.
    """
    walk = ModelWalk.of(access.model)
    refuse_length_dependent_rope(walk, batch.longest)
    fills = [[_Fill(row, span, batch.seed, n) for n in range(samples) for span in row.spans] for row in batch.rows]
    head, budget = check_supported(walk), rows_per_forward(walk, batch.token_budget)
    some = [of_row for of_row in fills if of_row]
    sizes = [len(_longest(of_row)) + sum(fill.length - 1 for fill in of_row) for of_row in some]
    together = [[fill for i in group for fill in some[i]] for group in groups_within(sizes, budget)]

    def smaller(some: list[_Fill]) -> list[list[_Fill]]:
        lengths = [fill.length for fill in some]
        return [[some[i] for i in group] for group in groups_within(lengths, sum(lengths) // 2)]

    work = ScoringWork()
    with tree_attention_mode(walk):
        for done in run_in_memory(together, lambda some: _write(walk, head, some), smaller):
            work += done
    every = [fill for of_row in fills for fill in of_row]
    unshared = sum(fill.length * len(fill.context) + fill.length * (fill.length - 1) // 2 for fill in every)
    work += ScoringWork(tokens_unshared=unshared, head_rows=sum(fill.length for fill in every))
    return [[np.array(fill.tokens, dtype=np.int64) for fill in of_row] for of_row in fills], work


def resampled_scores(
    access: ModelAccess, batch: ScoredBatch, *, samples: int = 1, outcome: Outcome = "logprob"
) -> CounterfactualScores:
    """Score answers with each unit replaced by what the model itself might have written in its place.

    `masked` and `drop` are means over `samples` fills of each unit, all of them branches of the same trees. Arguments
    and errors are those of `resampled_fills` and `score_counterfactuals`. Source: resampling as in Thought Anchors
    (arXiv 2506.19143), the rest of the completion held fixed.
    """
    fills, work = resampled_fills(access, batch, samples=samples)
    by_place = {row.place: of_row for row, of_row in zip(batch.rows, fills, strict=True)}
    filled = batch.with_units([row.spans * samples for row in batch.rows], lambda row, k: by_place[row.place][k])
    scores = score_batch(access.model, filled, outcome)
    masked = [row.view(samples, -1).mean(0) for row in scores.masked]
    drop = [row - base for row, base in zip(masked, scores.base, strict=True)]
    return CounterfactualScores(scores.base, masked, drop, scores.work + work)


class _Fill:
    """Replacement of a span, partly drawn."""

    def __init__(self, row: ScoredRow, span: Span, seed: Sequence[int], draw: int) -> None:
        self.row, self.length, self.tokens = row, span.end - span.start, list[int]()
        self.context = np.concatenate([row.prompt, row.completion[: span.start]])
        generator = keyed_generator(*seed, row.index, "fill", draw, span.start)
        self.draws = torch.rand(self.length, generator=generator, dtype=torch.float64)


def _longest(fills: Sequence[_Fill]) -> np.ndarray:
    return max((fill.context for fill in fills), key=len)


def _write(walk: ModelWalk, head: Head, fills: Sequence[_Fill]) -> ScoringWork:
    """Sample all tokens of `fills`, those of a completion side by side, on one tree that grows by a token of each."""
    tree, work = PrefixTree(), ScoringWork()
    # Layers that carry a state would need it: they are fed from the roots again.
    store = None if has_cells(walk) else KeyValueStore(grows=True)
    hidden = head.weight.new_zeros(0, head.weight.shape[1])

    def feed() -> None:
        """Compute the hidden states of the new rows."""
        nonlocal hidden, work
        if tree.num_tokens > len(hidden):
            first = 0 if store is None else len(hidden)
            pack = pack_of(tree, first_row=first)
            hidden = torch.cat([hidden[:first], packed_hidden(walk, pack, store=store).to(head.weight)])
            work += ScoringWork(1, pack.num_tokens)

    for _, of_row in groupby(fills, lambda fill: fill.row.index):
        tree.insert(_longest(list(of_row)))
    for fill in fills:
        fill.tokens.clear()  # ids that were drawn before memory ran out
    feed()
    while fills:
        sequences = [np.concatenate([fill.context, np.array(fill.tokens, dtype=np.int64)]) for fill in fills]
        rows = torch.tensor([int(tree.insert(tokens)[-1]) for tokens in sequences], device=hidden.device)
        feed()
        draws = torch.stack([fill.draws[len(fill.tokens)] for fill in fills])
        for fill, token in zip(fills, _sample(walk, head, hidden[rows], draws, fills).tolist(), strict=True):
            fill.tokens.append(token)
        fills = [fill for fill in fills if len(fill.tokens) < fill.length]
    return work


def _sample(walk: ModelWalk, head: Head, rows: Tensor, draws: Tensor, fills: Sequence[_Fill]) -> Tensor:
    """Choose ids (N,) from hidden states (N, H): the first whose cumulated probability exceeds the draw."""
    weight = head.weight
    softmax = Softmax.of(1.0, head.softcap, head.logit_scale)
    usable, exact = min(vocab_size(walk.model), len(weight)), compute_dtype(weight.dtype)
    chosen, height = list[Tensor](), rows_at_once(len(weight))
    for some, draw in zip(rows.split(height), draws.split(height), strict=True):
        logits, _ = empty_strip(len(some), len(weight), exact, exact, weight.device)
        write_logits(some, weight, logits)
        none = torch.zeros(len(some), dtype=torch.long, device=weight.device)
        p = probabilities(logits[None], head.bias, none, none.bool(), softmax, out=logits[None]).p[0]
        cumulated = p[:, :usable].double().cumsum(-1)
        if (bad := (~torch.isfinite(cumulated[:, -1])).nonzero()).numel():
            row = fills[len(chosen) * height + int(bad[0])].row
            raise FloatingPointError(f"completions row {row.index}: the model gave a nan log-prob")
        threshold = draw.to(weight.device)[:, None] * cumulated[:, -1:]
        chosen.append(torch.searchsorted(cumulated, threshold, right=True)[:, 0].clamp(max=usable - 1))
    return torch.cat(chosen).cpu()
