"""Replace a masked unit by what the model itself might have written there.

`score_counterfactuals` uses placeholders by default. `resampled_fills` samples replacements of each unit, and
`resampled_scores` scores the answers after them.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn

from ..hf.head import Head
from ..hf.limits import refuse_length_dependent_rope, rows_per_forward
from ..hf.memory import halves, rows_at_once, run_in_memory
from ..hf.model import vocab_size
from ..hf.model_walk import ModelWalk
from ..hf.stateful_layers import has_cells
from ..hf.tree_forward import KeyValueStore, packed_hidden, tree_attention_mode
from ..hf.verify import check_supported
from ..ops.head_matmul import empty_strip, write_logits
from ..ops.row_softmax import Softmax, compute_dtype, probabilities
from ..packing.prefix_tree import Pack, PrefixTree
from ..scoring.access import ModelAccess
from ..scoring.batch import Row, ScoredBatch
from ..scoring.masked import CounterfactualScores, ScoringWork, score_batch
from ..scoring.outcomes import Outcome
from ..scoring.plan import ScoringOptions
from ..span import Span


def resampled_fills(
    access: ModelAccess, batch: ScoredBatch, *, seed: int, samples: int = 1
) -> tuple[list[list[np.ndarray]], ScoringWork]:
    """Sample replacements of every unit, of equal length, from the model's own distribution at its place.

    Each token is drawn given the prompt, the completion before the unit and the fill so far; text after the unit
    is not seen. All units of all completions advance together, one token each per forward, on the keys and values of
    one packed tree; prompts and completions are fed once. Pass the ids to `ScoredBatch.with_units`.

    A fill depends only on the seed, the prompt, the completion before the unit and the model, not on the rest of the
    batch (to rounding, which can change a draw that falls on an edge between two tokens). Units that start at the same
    place share their draws.

    Args:
        access: access to the model, which must be in this process.
        batch: completions and the units to fill. A completion and its fills stay together, even over the token budget,
            as long as memory holds them.
        seed: seed of the draws, an integer.
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
    drawn = [
        [_Fill(b, row, span, f"{seed}/{draw}") for draw in range(samples) for span in row.spans]
        for b, row in zip(batch.numbers, batch.rows, strict=True)
    ]
    head = check_supported(walk)

    def write(fills: Sequence[_Fill]) -> ScoringWork:
        for fill in fills:
            fill.tokens.clear()  # ids that were drawn before memory ran out
        writer = _Writer(walk, head, _tree_of(fills))
        writer.write(fills)
        return ScoringWork(writer.forwards, writer.tokens_fed)

    work = ScoringWork()
    with tree_attention_mode(walk):
        together = _in_budget(drawn, rows_per_forward(walk, batch.token_budget))
        for done in run_in_memory(together, write, lambda fills: halves(fills, lambda fill: fill.row)):
            work += done
    every = [fill for row in drawn for fill in row]
    unshared = sum(fill.length * len(fill.context) + fill.length * (fill.length - 1) // 2 for fill in every)
    work += ScoringWork(tokens_unshared=unshared, head_rows=sum(fill.length for fill in every))
    return [[np.array(fill.tokens, dtype=np.int64) for fill in row] for row in drawn], work


def resampled_scores(
    access: ModelAccess, batch: ScoredBatch, *, seed: int, samples: int = 1, outcome: Outcome = "logprob"
) -> CounterfactualScores:
    """Score answers with each unit replaced by what the model itself might have written in its place.

    Averages over `samples` fills of each unit, all of them branches of the same trees. A unit's drop is low where its
    own words matter to the answer, not merely that something is in its place.

    Args:
        access: access to the model, which must be in this process.
        batch: completions, units and answers.
        seed, samples: as in `resampled_fills`.
        outcome: as in `score_counterfactuals`.

    Returns:
        `CounterfactualScores`, in the batch's order: `masked` and `drop` are means over the fills, `work` includes the
        sampling.

    Raises:
        As `resampled_fills` and `score_counterfactuals`.

    Source: resampling as in Thought Anchors (arXiv 2506.19143), the rest of the completion held fixed.
    """
    fills, work = resampled_fills(access, batch, seed=seed, samples=samples)
    filled = batch.with_units([row.spans * samples for row in batch.rows], fills)
    scores = score_batch(access.model, filled, ScoringOptions(outcome))
    masked = [row.view(samples, -1).mean(0) for row in scores.masked]
    drop = [row - base for row, base in zip(masked, scores.base, strict=True)]
    return CounterfactualScores(scores.base, masked, drop, None, scores.work + work)


class _Fill:
    """Replacement of a span, partly drawn; `key` distinguishes draws that have the same text before them."""

    def __init__(self, number: int, row: Row, span: Span, key: str) -> None:
        self.row, self.length = number, span.end - span.start
        self.context = np.concatenate([row.prompt, row.completion[: span.start]])
        self.tokens: list[int] = []
        self.packed_row = 0  # row that predicts the next token
        digest = hashlib.blake2b(f"{key}/".encode() + self.context.tobytes(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        self.draws = torch.rand(self.length, generator=generator, dtype=torch.float64)

    @property
    def draw(self) -> Tensor:
        """Return the number in [0, 1) that chooses the next token."""
        return self.draws[len(self.tokens)]


def _in_budget(drawn: list[list[_Fill]], budget: int) -> Iterator[Sequence[_Fill]]:
    """Batch fills that are drawn together, those of a completion at once, for trees of at most `budget` rows."""
    members, growth, tree = list[_Fill](), 0, PrefixTree()
    for fills in drawn:
        if not fills:
            continue
        longest = _longest_context(fills)
        own = sum(fill.length - 1 for fill in fills)
        tree.insert(longest)
        if members and tree.num_tokens + growth + own > budget:
            yield members
            members, growth, tree = list[_Fill](), 0, PrefixTree()
            tree.insert(longest)
        members += fills
        growth += own
    if members:
        yield members


def _tree_of(fills: Sequence[_Fill]) -> PrefixTree:
    """Lay out the text before fills as a tree; fills of a completion are side by side."""
    tree = PrefixTree()
    for _, of_row in groupby(fills, lambda fill: fill.row):
        tree.insert(_longest_context(of_row))
    return tree


def _longest_context(fills: Iterable[_Fill]) -> np.ndarray:
    return max((fill.context for fill in fills), key=len)


class _GrowingStore(KeyValueStore):
    """Keys and values of all rows so far; those of rows that continue them are added."""

    def before(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return and keep what this call of `layer` kept before, followed by `key` and `value`."""
        call = self._read.get(layer, 0)
        self._kept[layer][call] = joined = super().before(layer, key, value)
        return joined


@dataclass
class _Writer:
    """Tree that grows by one token of each fill at a time, with the hidden states of its rows."""

    walk: ModelWalk
    head: Head
    tree: PrefixTree
    forwards: int = 0
    tokens_fed: int = 0
    store: KeyValueStore | None = field(init=False)
    hidden: Tensor = field(init=False)  # (N, H) on the head's device

    def __post_init__(self) -> None:
        # Layers that carry a state would need it: they are fed from the roots again.
        self.store = None if has_cells(self.walk) else _GrowingStore()
        self.hidden = self.head.weight.new_zeros(0, self.head.weight.shape[1])
        self._feed()

    def write(self, fills: Sequence[_Fill]) -> None:
        """Sample all tokens of `fills`."""
        while fills:
            for fill in fills:
                so_far = np.concatenate([fill.context, np.array(fill.tokens, dtype=np.int64)])
                fill.packed_row = int(self.tree.insert(so_far)[-1])
            self._feed()
            rows = self.hidden[torch.tensor([fill.packed_row for fill in fills], device=self.hidden.device)]
            draws = torch.stack([fill.draw for fill in fills])
            for fill, token in zip(fills, self._sample(rows, draws, fills).tolist(), strict=True):
                fill.tokens.append(token)
            fills = [fill for fill in fills if len(fill.tokens) < fill.length]

    def _feed(self) -> None:
        """Compute the hidden states of the new rows."""
        if self.tree.num_tokens == len(self.hidden):
            return
        first = 0 if self.store is None else len(self.hidden)
        table, none = self.tree.table(), np.zeros(0, np.int64)
        pack = Pack(
            input_ids=self.tree.input_ids()[first:], position_ids=table.positions()[first:], table=table, rows=none,
            targets=none, num_tempered=0, query_index=none, bundles=range(0), tree=self.tree, first_row=first,
        )  # fmt: skip
        found = packed_hidden(self.walk, pack, store=self.store).to(self.head.weight)
        self.hidden = torch.cat([self.hidden[:first], found])
        self.forwards += 1
        self.tokens_fed += pack.num_tokens

    def _sample(self, rows: Tensor, draws: Tensor, fills: Sequence[_Fill]) -> Tensor:
        """Choose ids (N,) from hidden states (N, H): the first whose cumulated probability exceeds the draw."""
        weight, bias = self.head.weight, self.head.bias
        softmax = Softmax.of(1.0, self.head.softcap, self.head.logit_scale)
        height = rows_at_once(len(weight))
        usable = min(vocab_size(self.walk.model), len(weight))
        chosen = []
        for some, draw in zip(rows.split(height), draws.split(height), strict=True):
            exact = compute_dtype(weight.dtype)
            logits, _ = empty_strip(len(some), len(weight), exact, exact, weight.device)
            write_logits(some, weight, logits)
            none = torch.zeros(len(some), dtype=torch.long, device=weight.device)
            p = probabilities(logits[None], bias, none, none.bool(), softmax, out=logits[None]).p[0]
            cumulated = p[:, :usable].double().cumsum(-1)
            threshold = draw.to(weight.device)[:, None] * cumulated[:, -1:]
            chosen.append(torch.searchsorted(cumulated, threshold, right=True)[:, 0].clamp(max=usable - 1))
            if not torch.isfinite(cumulated[:, -1]).all():
                bad = len(chosen[:-1]) * height + int((~torch.isfinite(cumulated[:, -1])).nonzero()[0])
                raise FloatingPointError(f"completions row {fills[bad].row}: the model gave a nan log-prob")
        return torch.cat(chosen).cpu()
