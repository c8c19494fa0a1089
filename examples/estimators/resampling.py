"""Replace each unit by what the model itself might have written there: `examples.estimators.resampling:Resampling`.

Source: resampling as in Thought Anchors (arXiv 2506.19143), with the rest of the completion held fixed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cfa_kernels.batch import Batch, ScoredRow
from cfa_kernels.estimators.base import ANSWER, Estimator, Importances
from cfa_kernels.model.check.verify import check_supported
from cfa_kernels.model.head import Head
from cfa_kernels.model.limits import refuse_length_dependent_rope, rows_per_forward
from cfa_kernels.model.memory import rows_at_once
from cfa_kernels.model.parts import vocab_size
from cfa_kernels.model.tree_forward import packed_hidden, tree_attention_mode
from cfa_kernels.model.walk import ModelWalk
from cfa_kernels.options import Count, check_fields
from cfa_kernels.rows import keyed_generator
from cfa_kernels.scoring.access import MODEL, ModelAccess
from cfa_kernels.scoring.masked import ScoringWork, score_batch
from cfa_kernels.scoring.outcomes import DIVERGENCES, Outcome
from cfa_kernels.span import Span
from cfa_kernels.tree.packs import groups_within, pack_of
from cfa_kernels.tree.prefix_tree import PrefixTree


@dataclass(frozen=True)
class Resampling(Estimator):
    """Sample replacements of each unit from the model, and see how the answer moves in the mean over them."""

    name = "resampling"
    needs = frozenset({ANSWER, MODEL})

    outcome: Outcome = "logprob"
    """Outcome to compare, as of masking."""
    samples: Count = 1
    """Draws of each unit to average."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def negative(self) -> bool:  # type: ignore[override]
        """Whether importances may be below 0: a divergence is not."""
        return self.outcome not in DIVERGENCES

    def __call__(self, access: ModelAccess, batch: Batch) -> Importances:
        """Score the answers after all fills as branches of the same trees."""
        fills, work = draw_fills(access, batch, self.samples)
        filled = batch.with_columns(units=[list(units) * self.samples for units in batch.units])
        fills_of = dict(zip(batch.index, fills, strict=True))
        scores = score_batch(access.model, filled, self.outcome, lambda row, k: fills_of[row.index][k])
        masked = [row.view(self.samples, -1).mean(0) for row in scores.masked]
        values = [(base - row).float() for row, base in zip(masked, scores.base, strict=True)]
        change_of = None if self.outcome in DIVERGENCES else self.outcome
        return Importances(values, base=scores.base, work=scores.work + work, change_of=change_of)  # type: ignore[arg-type]


def draw_fills(access: ModelAccess, batch: Batch, samples: int) -> tuple[list[list[np.ndarray]], ScoringWork]:
    """Sample `samples` replacements of every unit, of equal length, from the model's own distribution at its place.

    A fill is drawn given the text before it, by the batch's seed, the row's index and the unit's place (rounding can
    change a draw that falls on an edge between two tokens). A completion and its fills share forwards, even over the
    token budget; each forward feeds them from the root. Raises as `score_counterfactuals`, and `NotImplementedError`
    where rotary frequencies would change.

    Returns the ids, int64, of all units of each completion, draw by draw, and counts of work.
    """
    walk = ModelWalk.of(access.model)
    lengths = [len(row.prompt) + len(row.completion) for row in batch.scored_rows]
    refuse_length_dependent_rope(walk, max(lengths, default=0))
    fills = [
        [_Fill(row, span, batch.seed, n) for n in range(samples) for span in row.spans] for row in batch.scored_rows
    ]
    head, rows = check_supported(walk), [row for row in fills if row]
    sizes = [max(len(fill.context) for fill in row) + sum(fill.length - 1 for fill in row) for row in rows]
    groups = groups_within(sizes, rows_per_forward(walk, batch.token_budget))
    with tree_attention_mode(walk), torch.no_grad():
        work = sum((_write(walk, head, [fill for i in group for fill in rows[i]]) for group in groups), ScoringWork())
    return [[np.array(fill.tokens, dtype=np.int64) for fill in row] for row in fills], work


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
    while fills:
        sequences = [np.concatenate([fill.context, np.array(fill.tokens, dtype=np.int64)]) for fill in fills]
        rows = torch.tensor([int(tree.insert(tokens)[-1]) for tokens in sequences], device=head.weight.device)
        hidden = packed_hidden(walk, pack_of(tree)).to(head.weight)[rows]
        work += ScoringWork(1, tree.num_tokens, sum(map(len, sequences)))
        for fill, token in zip(fills, _sample(walk, head, hidden, fills), strict=True):
            fill.tokens.append(token)
        fills = [fill for fill in fills if len(fill.tokens) < fill.length]
    return work


def _sample(walk: ModelWalk, head: Head, states: Tensor, fills: Sequence[_Fill]) -> list[int]:
    """Choose each fill's next token by hidden states (N, H): the first whose cumulated probability exceeds the draw."""
    usable, tokens = min(vocab_size(walk.model), len(head.weight)), list[int]()
    for some in states.split(rows_at_once(len(head.weight))):
        cumulated = head.logits(some).softmax(-1)[:, :usable].double().cumsum(-1)
        chosen = fills[len(tokens) : len(tokens) + len(some)]
        if (bad := (~torch.isfinite(cumulated[:, -1])).nonzero()).numel():
            raise FloatingPointError(f"completions row {chosen[int(bad[0])].index}: the model gave a nan log-prob")
        draws = torch.stack([fill.draws[len(fill.tokens)] for fill in chosen]).to(cumulated)
        threshold = draws[:, None] * cumulated[:, -1:]
        tokens += torch.searchsorted(cumulated, threshold, right=True)[:, 0].clamp(max=usable - 1).tolist()
    return tokens
