"""An approximation of masking: the answer's rows lose sight of a span, and everything else stays as it was.

One forward over the completions and a few rows per span, instead of a branch from the span to the answer. It sees what
the answer reads from the span itself, and misses what later reasoning carries over from it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .hf import causal_lm, context_length, refuse_length_dependent_rope, rows_per_forward, vocab_size
from .ops.segment_table import SegmentTable
from .packed_model import TreeMask, Visibility, pack_logprobs, tree_attention_mode
from .proof import prove_supported
from .recurrent import has_cells
from .scoring import CounterfactualScores, Row, ScoringWork, checked_rows
from .spans import Span
from .token_rows import check_columns, checked_ids, equal_prompts_together
from .tree import Pack, PrefixTree


def answer_knockout(
    model: nn.Module,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    spans: Sequence[Sequence[Span]],
    answers: Sequence[Span | None],
    *,
    blind_from: Sequence[int] | None = None,
    token_budget: int | None = None,
) -> CounterfactualScores:
    """Score each answer with its own rows blind to one span at a time.

    The rows from the one that predicts the answer's first token on attend to everything but the span, at their own
    positions; all rows before them are those of the completion as sampled. Equal to one forward per span with a mask
    that hides the span from those rows, to rounding. An approximation of `score_counterfactuals`, whose branches
    recompute all rows behind the span.

    Args:
        model: as in `score_counterfactuals`, with full attention in every layer.
        prompts, completions, spans, answers, token_budget: as in `score_counterfactuals`. A row never loses sight of
            itself.
        blind_from: for each completion, the first token whose row is blind, say the first one of the answer's marker;
            at most, and by default, the one before the answer.

    Returns:
        `CounterfactualScores`, in which `masked` and `drop` are those of the blind rows.

    Raises:
        ValueError: bad input; the message names argument, row and value.
        NotImplementedError: also a model with windows, chunks or layers that carry a state.
        TypeError, FloatingPointError: as `score_counterfactuals`.

    Source: the attention suppression of Thought Anchors (arXiv 2506.19143), from a sentence to the answer alone.
    """
    causal = causal_lm(model)
    check_columns(prompts, completions=completions, spans=spans, answers=answers)
    ids = checked_ids(prompts, completions, vocab_size(causal), context_length(causal))
    rows = checked_rows(causal, ids, spans, answers, 0)
    blind = _first_blind(rows, blind_from)
    if has_cells(causal):
        raise NotImplementedError(
            f"model: {type(causal).__name__} carries a state past a span that attention leaves out"
        )
    refuse_length_dependent_rope(causal, max((len(row.prompt) + len(row.completion) for row in rows), default=0))
    head = prove_supported(causal)
    base = torch.full((len(rows),), float("nan"))
    masked = [torch.full((len(row.spans),), float("nan")) for row in rows]
    forwards = fed = unshared = head_rows = 0
    with tree_attention_mode(causal), _full_attention_alone(causal):
        for trunk in _trunks(rows, blind, rows_per_forward(causal, token_budget)):
            pack = trunk.pack()
            values = pack_logprobs(causal, head, pack).cpu()
            for asked, answer_values in zip(trunk.asked, values.split(trunk.counts), strict=True):
                if torch.isnan(answer_values).any():
                    raise FloatingPointError(f"completions row {asked.row}: the model gave a nan log-prob")
                score = answer_values.sum()
                if asked.span is None:
                    base[asked.row] = score
                    masked[asked.row] = score.repeat(len(masked[asked.row]))  # spans behind the answer change nothing
                else:
                    masked[asked.row][asked.span] = score
                unshared += asked.unshared
            forwards, fed, head_rows = forwards + 1, fed + pack.num_tokens, head_rows + len(pack.rows)
    drop = [row - base[b] for b, row in enumerate(masked)]
    return CounterfactualScores(base, masked, drop, None, ScoringWork(forwards, fed, unshared, head_rows))


def _first_blind(rows: list[Row], blind_from: Sequence[int] | None) -> list[int]:
    """The first blind row of each completion with an answer, -1 for its prompt's last."""
    before = [-1 if row.answer is None else row.answer.start - 1 for row in rows]
    if blind_from is None:
        return before
    if len(blind_from) != len(rows):
        raise ValueError(f"blind_from has {len(blind_from)} rows, prompts has {len(rows)}; they must agree")
    for b, (row, first) in enumerate(zip(rows, blind_from, strict=True)):
        if row.answer is not None and not 0 <= first <= row.answer.start:
            raise ValueError(
                f"blind_from row {b}: {first} is outside [0, {row.answer.start}], what is before the answer"
            )
    return [min(first, last) for first, last in zip(blind_from, before, strict=True)]


@contextmanager
def _full_attention_alone(model: PreTrainedModel) -> Iterator[None]:
    """Refuse layers with a window or a chunk: where rows are left out, places in a context are no positions."""

    def refuse(module: nn.Module, args: tuple, kwargs: dict) -> None:
        for mask in (*args, *kwargs.values()):
            if isinstance(mask, TreeMask) and mask.visibility != Visibility():
                raise NotImplementedError(
                    f"model: {type(model).__name__} has layers with a window or chunk of positions, which cannot lose "
                    "sight of a span alone; use score_counterfactuals"
                )

    hooks = [module.register_forward_pre_hook(refuse, with_kwargs=True) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class _Blind:
    """Rows that continue a path, some of which they do not see."""

    tokens: np.ndarray
    start: int  # position of the first
    seen: np.ndarray  # packed rows


@dataclass(frozen=True)
class _Asked:
    """An answer to score: as sampled, or with span number `span` out of sight."""

    row: int
    span: int | None
    targets: np.ndarray
    rows: np.ndarray  # packed rows that predict them, if they are the completion's own
    blind: list[_Blind]  # else what they are the last rows of
    unshared: int  # tokens of a forward of its own


@dataclass
class _Trunk:
    """Completions of one forward as a tree, and the blind rows behind it."""

    tree: PrefixTree = field(default_factory=PrefixTree)
    asked: list[_Asked] = field(default_factory=list)

    @property
    def counts(self) -> list[int]:
        """Targets of each of `asked`."""
        return [len(asked.targets) for asked in self.asked]

    @property
    def num_tokens(self) -> int:
        """Rows of the forward."""
        return self.tree.num_tokens + sum(len(part.tokens) for asked in self.asked for part in asked.blind)

    def add(self, b: int, row: Row, first: int) -> None:
        """Lay a completion out up to its last row that predicts an answer token, and its blind rows behind."""
        assert row.answer is not None
        path = self.tree.insert(np.concatenate([row.prompt, row.completion[: row.answer.end - 1]]))
        targets = row.completion[slice(*row.answer)]
        predicting = path[len(path) - len(targets) :]
        self.asked.append(_Asked(b, None, targets, predicting, [], len(path)))
        for k, span in enumerate(row.spans):
            if row.masks_something(span):
                self.asked.append(_Asked(b, k, targets, predicting, _blind_rows(row, path, span, first), len(path)))

    def pack(self) -> Pack:
        """The whole forward."""
        tree = self.tree.table()
        rows, next_row = list[np.ndarray](), tree.num_rows
        for asked in self.asked:
            next_row += sum(len(part.tokens) for part in asked.blind)
            own = np.arange(next_row - len(asked.targets), next_row)
            rows.append(own if asked.blind else asked.rows)
        blind = [part for asked in self.asked for part in asked.blind]
        positions = [np.arange(part.start, part.start + len(part.tokens)) for part in blind]
        return Pack(
            input_ids=np.concatenate([self.tree.input_ids(), *(part.tokens for part in blind)]),
            position_ids=np.concatenate([tree.positions(), *positions]),
            table=_with_blind(tree, blind),
            rows=np.concatenate(rows).astype(np.int64),
            targets=np.concatenate([asked.targets for asked in self.asked]),
            num_tempered=0,
            query_index=np.arange(sum(self.counts)),
            units=range(0),
            tree=self.tree,
        )


def _blind_rows(row: Row, path: np.ndarray, span: Span, first: int) -> list[_Blind]:
    """A completion's rows behind `span` from token `first` on, which see all but the span and what rows see alone."""
    assert row.answer is not None
    shift, (start, end) = len(row.prompt), row.answer
    before = path[: shift + span.start]
    parts = []
    if span.end == start:  # the row that predicts the first answer token is the span's own last: it sees itself
        parts.append(_Blind(row.completion[start - 1 : start], shift + start - 1, before))
    own = max(first, span.end)
    if own < end - 1:
        seen = np.concatenate([before, path[shift + span.end : shift + own]])
        parts.append(_Blind(row.completion[own : end - 1], shift + own, seen))
    return parts


def _with_blind(tree: SegmentTable, blind: list[_Blind]) -> SegmentTable:
    """`tree` with a segment behind it for each of `blind`."""
    seen = np.array([len(part.seen) for part in blind], dtype=np.int32)
    length = np.array([len(part.tokens) for part in blind], dtype=np.int32)
    row = tree.num_rows + np.cumsum(length) - length
    start = len(tree.context_rows) + np.cumsum(seen) - seen
    return SegmentTable(
        row_start=np.concatenate([tree.row_start, row]).astype(np.int32),
        length=np.concatenate([tree.length, length]).astype(np.int32),
        context_start=np.concatenate([tree.context_start, start]).astype(np.int32),
        context_length=np.concatenate([tree.context_length, seen]).astype(np.int32),
        context_rows=np.concatenate([tree.context_rows, *(part.seen for part in blind)]).astype(np.int32),
    )


def _trunks(rows: list[Row], blind: list[int], budget: int) -> Iterator[_Trunk]:
    """Forwards of at most `budget` rows each; a completion with its blind rows that is over it has one of its own."""
    trunk = _Trunk()
    for b in equal_prompts_together([row.prompt for row in rows]):
        if rows[b].answer is None:
            continue
        mark, known = trunk.tree.checkpoint(), len(trunk.asked)
        trunk.add(b, rows[b], blind[b])
        if known and trunk.num_tokens > budget:
            trunk.tree.rollback(mark)
            del trunk.asked[known:]
            yield trunk
            trunk = _Trunk()
            trunk.add(b, rows[b], blind[b])
    if trunk.asked:
        yield trunk
