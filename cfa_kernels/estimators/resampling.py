"""Replace a masked unit by what the model itself might have written there."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..batch import Batch, ScoredRow
from ..model.attention import KeyValueStore
from ..model.check.verify import check_supported
from ..model.head import Head
from ..model.limits import refuse_length_dependent_rope, rows_per_forward
from ..model.memory import rows_at_once, run_in_memory
from ..model.parts import vocab_size
from ..model.stateful_layers import has_cells
from ..model.tree_forward import packed_hidden, tree_attention_mode
from ..model.walk import ModelWalk
from ..ops.head_matmul import write_logits
from ..ops.row_softmax import compute_dtype
from ..rows import keyed_generator
from ..scoring.access import ModelAccess
from ..scoring.masked import CounterfactualScores, ScoringWork, score_batch
from ..scoring.outcomes import Outcome
from ..span import Span
from ..tree.packs import groups_within, pack_of
from ..tree.prefix_tree import PrefixTree


def draw_fills(access: ModelAccess, batch: Batch, samples: int) -> tuple[list[list[np.ndarray]], ScoringWork]:
    """Sample `samples` replacements of every unit, of equal length, from the model's own distribution at its place.

    A fill is drawn given the text before it, by the batch's seed, the row's index and the unit's place (rounding can
    change a draw that falls on an edge between two tokens). A completion and its fills share forwards, even over the
    token budget. Raises as `score_counterfactuals`, and `NotImplementedError` where rotary frequencies would change.

    Returns the ids, int64, of all units of each completion, draw by draw, and counts of work.
    """
    walk = ModelWalk.of(access.model)
    refuse_length_dependent_rope(
        walk, max((len(row.prompt) + len(row.completion) for row in batch.scored_rows), default=0)
    )
    fills = [
        [_Fill(row, span, batch.seed, n) for n in range(samples) for span in row.spans] for row in batch.scored_rows
    ]
    head, rows = check_supported(walk), [row for row in fills if row]
    sizes = [max(len(fill.context) for fill in row) + sum(fill.length - 1 for fill in row) for row in rows]
    groups = groups_within(sizes, rows_per_forward(walk, batch.token_budget))
    together = [[fill for i in group for fill in rows[i]] for group in groups]

    def smaller(some: list[_Fill]) -> list[list[_Fill]]:
        lengths = [fill.length for fill in some]
        return [[some[i] for i in group] for group in groups_within(lengths, sum(lengths) // 2)]

    with tree_attention_mode(walk):
        work = sum(run_in_memory(together, partial(_write, walk, head), smaller), ScoringWork())
    return [[np.array(fill.tokens, dtype=np.int64) for fill in row] for row in fills], work


def resampled_scores(access: ModelAccess, batch: Batch, samples: int, outcome: Outcome) -> CounterfactualScores:
    """Score answers by means over `samples` fills of each unit, all of them branches of the same trees.

    Source: resampling as in Thought Anchors (arXiv 2506.19143), the rest of the completion held fixed.
    """
    fills, work = draw_fills(access, batch, samples)
    filled = batch.with_columns(units=[list(units) * samples for units in batch.units])
    mask = [[torch.from_numpy(ids) for ids in row] for row in fills]
    scores = score_batch(access.model, filled, outcome, mask)
    masked = [row.view(samples, -1).mean(0) for row in scores.masked]
    drop = [base - row for row, base in zip(masked, scores.base, strict=True)]
    return CounterfactualScores(scores.base, masked, drop, scores.work + work)


class _Fill:
    """Replacement of a span, partly drawn."""

    def __init__(self, row: ScoredRow, span: Span, seed: Sequence[int], draw: int) -> None:
        self.index, self.length, self.tokens = row.index, span.end - span.start, list[int]()
        self.context = np.concatenate([row.prompt, row.completion[: span.start]])
        generator = keyed_generator(*seed, row.index, "fill", draw, span.start)
        self.draws = torch.rand(self.length, generator=generator, dtype=torch.float64)


def _write(walk: ModelWalk, head: Head, fills: Sequence[_Fill]) -> ScoringWork:
    """Sample all tokens of `fills`, one of each per forward, on one tree that grows by them."""
    tree, work = PrefixTree(), ScoringWork()
    # Layers that carry a state would need it: they are fed from the roots again.
    store = None if has_cells(walk) else KeyValueStore(grows=True)
    hidden = head.weight.new_zeros(0, head.weight.shape[1])
    for fill in fills:
        fill.tokens.clear()  # ids that were drawn before memory ran out
    while fills:
        sequences = [np.concatenate([fill.context, np.array(fill.tokens, dtype=np.int64)]) for fill in fills]
        rows = torch.tensor([int(tree.insert(tokens)[-1]) for tokens in sequences], device=hidden.device)
        if tree.num_tokens > len(hidden):
            first = 0 if store is None else len(hidden)
            pack = pack_of(tree, first_row=first)
            hidden = torch.cat([hidden[:first], packed_hidden(walk, pack, store=store).to(head.weight)])
            work += ScoringWork(1, pack.num_tokens)
        work += ScoringWork(tokens_unshared=sum(map(len, sequences)))
        for fill, token in zip(fills, _sample(walk, head, hidden[rows], fills), strict=True):
            fill.tokens.append(token)
        fills = [fill for fill in fills if len(fill.tokens) < fill.length]
    return work


def _sample(walk: ModelWalk, head: Head, states: Tensor, fills: Sequence[_Fill]) -> list[int]:
    """Choose each fill's next token by hidden states (N, H): the first whose cumulated probability exceeds the draw."""
    weight, usable, tokens = head.weight, min(vocab_size(walk.model), len(head.weight)), list[int]()
    for some in states.split(rows_at_once(len(weight))):
        logits = some.new_empty(len(some), len(weight), dtype=compute_dtype(weight.dtype))
        write_logits(some, weight, logits)
        logits = head.transformed(logits if head.bias is None else logits + head.bias)
        cumulated = logits.softmax(-1)[:, :usable].double().cumsum(-1)
        chosen = fills[len(tokens) : len(tokens) + len(some)]
        if (bad := (~torch.isfinite(cumulated[:, -1])).nonzero()).numel():
            raise FloatingPointError(f"completions row {chosen[int(bad[0])].index}: the model gave a nan log-prob")
        draws = torch.stack([fill.draws[len(fill.tokens)] for fill in chosen]).to(cumulated)
        threshold = draws[:, None] * cumulated[:, -1:]
        tokens += torch.searchsorted(cumulated, threshold, right=True)[:, 0].clamp(max=usable - 1).tolist()
    return tokens
