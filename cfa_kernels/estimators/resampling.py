"""What takes the place of a masked span, and what is left when all but some units are masked.

Placeholders are the default of `score_counterfactuals`. `resampled_fills` writes in each span's place what the model
itself might have written there, and `resampled_scores` scores that; `sufficiency` masks all but the units to keep.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..hf.head import Head
from ..hf.limits import refuse_length_dependent_rope, rows_per_forward
from ..hf.memory import halves, rows_at_once, run_in_memory
from ..hf.model import causal_lm, context_length, vocab_size
from ..hf.stateful_layers import has_cells
from ..hf.tree_forward import KeyValueStore, packed_hidden, tree_attention_mode
from ..hf.verify import prove_supported
from ..ops.head_matmul import empty_strip, write_logits
from ..ops.row_softmax import Softmax, compute_dtype, probabilities
from ..packing.prefix_tree import Pack, PrefixTree, Query
from ..scoring.batch import Row, check_columns, checked_ids, checked_rows, equal_prompts_together
from ..scoring.masked import CounterfactualScores, ScoringWork, query_logprobs, score_counterfactuals
from ..scoring.outcomes import Outcome
from ..span import Span


@dataclass(frozen=True)
class Fills:
    """What the model writes in place of spans.

    Attributes:
        tokens: B lists of K_b int64 tensors on the host, as many ids as the span has tokens.
        work: counts of what was computed.
    """

    tokens: list[list[Tensor]]
    work: ScoringWork


def resampled_fills(
    model: nn.Module,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    spans: Sequence[Sequence[Span]],
    *,
    seed: int,
    temperature: float = 1.0,
    token_budget: int | None = None,
) -> Fills:
    """Sample, for every span, as many tokens as it has from the model's own distribution in its place.

    Each token is drawn given the prompt, the completion before the span and the fill so far; what stands behind the
    span is not seen. All spans of all completions advance together, one token each per forward, on the keys and values
    of one packed tree; prompts and completions are fed once. Hand the tokens to `score_counterfactuals` as `fills`.

    A fill depends on the seed, the prompt, the completion before the span, the temperature and the model alone, not on
    what else is in the batch (to rounding, which can move a draw that falls on an edge between two tokens). Spans that
    start at one place share their draws.

    Args:
        model: as in `score_counterfactuals`.
        prompts, completions: B 1-D int64 tensors, unpadded.
        spans: for each completion, spans to fill.
        seed: of the draws, an integer.
        temperature: divides the logits.
        token_budget: most rows of a tree, fills included; default by free memory. A completion and its fills stay
            together, even over the budget, as long as memory holds them.

    Returns:
        `Fills`.

    Raises:
        ValueError: bad input; the message names argument, row and value.
        TypeError, NotImplementedError: models that cannot be scored, or whose rotary frequencies would change inside a
            batch this long; the message says why.
        FloatingPointError: the model gave no distribution; the message names the row.
    """
    return _sampled(model, prompts, completions, spans, seed, 1, temperature, token_budget)


def resampled_scores(
    model: nn.Module,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    spans: Sequence[Sequence[Span]],
    answers: Sequence[Span | None],
    *,
    seed: int,
    samples: int = 1,
    temperature: float = 1.0,
    outcome: Outcome = "logprob",
    token_budget: int | None = None,
) -> CounterfactualScores:
    """`score_counterfactuals` with what the model itself might have written in place of each span.

    The mean over `samples` fills of each span, all of them branches of the same trees. A span scores low where its own
    words matter to the answer, not merely that something stands in its place.

    Args:
        model, prompts, completions, spans, answers, outcome: as in `score_counterfactuals`.
        seed, temperature, token_budget: as in `resampled_fills`; the first fills are the ones that it gives.
        samples: fills of each span, at least 1.

    Returns:
        `CounterfactualScores`: `masked` and `drop` are means over the fills, `work` includes the sampling.

    Raises:
        As `resampled_fills` and `score_counterfactuals`; also `ValueError` for `samples` below 1.

    Source: resampling as in Thought Anchors (arXiv 2506.19143), the rest of the completion held fixed.
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples must be an integer of at least 1, got {samples!r}")
    fills = _sampled(model, prompts, completions, spans, seed, samples, temperature, token_budget)
    scores = score_counterfactuals(
        model, prompts, completions, [list(row) * samples for row in spans], answers, placeholder_id=0,
        fills=fills.tokens, outcome=outcome, token_budget=token_budget,
    )  # fmt: skip
    masked = [row.view(samples, -1).mean(0) for row in scores.masked]
    drop = [row - base for row, base in zip(masked, scores.base, strict=True)]
    return CounterfactualScores(scores.base, masked, drop, None, scores.work + fills.work)


def _sampled(
    model: nn.Module,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    spans: Sequence[Sequence[Span]],
    seed: int,
    samples: int,
    temperature: float,
    token_budget: int | None,
) -> Fills:
    """`samples` fills of every span, those of a row draw by draw."""
    causal = causal_lm(model)
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be an integer, got {seed!r}")
    check_columns(prompts, completions=completions, spans=spans)
    ids = checked_ids(prompts, completions, vocab_size(causal), context_length(causal))
    rows = checked_rows(causal, ids, spans, [None] * len(ids), 0)
    refuse_length_dependent_rope(causal, max((len(row.prompt) + len(row.completion) for row in rows), default=0))
    drawn = [
        [_Fill(b, row, span, f"{seed}/{draw}") for draw in range(samples) for span in row.spans]
        for b, row in enumerate(rows)
    ]
    head = prove_supported(causal)

    def write(fills: Sequence[_Fill]) -> ScoringWork:
        for fill in fills:
            fill.tokens.clear()  # what was drawn before memory ran out
        writer = _Writer(causal, head, _tree_of(fills))
        writer.write(fills, temperature)
        return ScoringWork(writer.forwards, writer.tokens_fed)

    work = ScoringWork()
    with tree_attention_mode(causal):
        together = _in_budget(rows, drawn, rows_per_forward(causal, token_budget))
        for done in run_in_memory(together, write, lambda fills: halves(fills, lambda fill: fill.row)):
            work += done
    every = [fill for row in drawn for fill in row]
    unshared = sum(fill.length * len(fill.context) + fill.length * (fill.length - 1) // 2 for fill in every)
    work += ScoringWork(tokens_unshared=unshared, head_rows=sum(fill.length for fill in every))
    return Fills([[torch.tensor(fill.tokens) for fill in row] for row in drawn], work)


class _Fill:
    """One span's replacement under way; `key` tells draws apart that have the same text before them."""

    def __init__(self, number: int, row: Row, span: Span, key: str) -> None:
        self.row, self.length = number, span.end - span.start
        self.context = np.concatenate([row.prompt, row.completion[: span.start]])
        self.tokens: list[int] = []
        self.packed_row = 0  # the row that predicts the next token
        digest = hashlib.blake2b(f"{key}/".encode() + self.context.tobytes(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        self.draws = torch.rand(self.length, generator=generator, dtype=torch.float64)

    @property
    def draw(self) -> Tensor:
        """The number in [0, 1) that chooses the next token."""
        return self.draws[len(self.tokens)]


def _in_budget(rows: list[Row], drawn: list[list[_Fill]], budget: int) -> Iterator[Sequence[_Fill]]:
    """Fills to write together, whole rows of them, at most `budget` rows of a tree in the end."""
    members, growth, tree = list[_Fill](), 0, PrefixTree()
    for b in equal_prompts_together([row.prompt for row in rows]):
        if not drawn[b]:
            continue
        longest = _longest_context(drawn[b])
        own = sum(fill.length - 1 for fill in drawn[b])
        tree.insert(longest)
        if members and tree.num_tokens + growth + own > budget:
            yield members
            members, growth, tree = list[_Fill](), 0, PrefixTree()
            tree.insert(longest)
        members += drawn[b]
        growth += own
    if members:
        yield members


def _tree_of(fills: Sequence[_Fill]) -> PrefixTree:
    """What stands before fills, those of a row side by side."""
    tree = PrefixTree()
    for _, of_row in groupby(fills, lambda fill: fill.row):
        tree.insert(_longest_context(of_row))
    return tree


def _longest_context(fills: Iterable[_Fill]) -> np.ndarray:
    return max((fill.context for fill in fills), key=len)


class _GrowingStore(KeyValueStore):
    """Keys and values of all rows so far: what continues them is kept, too."""

    def before(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """What this call of `layer` kept, followed by `key` and `value`, all of which it keeps."""
        call = self._read.get(layer, 0)
        self._kept[layer][call] = joined = super().before(layer, key, value)
        return joined


@dataclass
class _Writer:
    """A tree that grows by a token of each fill at a time, with the hidden states of its rows."""

    model: PreTrainedModel
    head: Head
    tree: PrefixTree
    forwards: int = 0
    tokens_fed: int = 0
    store: KeyValueStore | None = field(init=False)
    hidden: Tensor = field(init=False)  # (N, H) on the head's device

    def __post_init__(self) -> None:
        # Layers that carry a state would have to be handed it: they are fed from the roots again.
        self.store = None if has_cells(self.model) else _GrowingStore()
        self.hidden = self.head.weight.new_zeros(0, self.head.weight.shape[1])
        self._feed()

    def write(self, fills: Sequence[_Fill], temperature: float) -> None:
        """Sample all tokens of `fills`."""
        while fills:
            for fill in fills:
                so_far = np.concatenate([fill.context, np.array(fill.tokens, dtype=np.int64)])
                fill.packed_row = int(self.tree.insert(so_far)[-1])
            self._feed()
            rows = self.hidden[torch.tensor([fill.packed_row for fill in fills], device=self.hidden.device)]
            draws = torch.stack([fill.draw for fill in fills])
            for fill, token in zip(fills, self._sample(rows, draws, temperature, fills).tolist(), strict=True):
                fill.tokens.append(token)
            fills = [fill for fill in fills if len(fill.tokens) < fill.length]

    def _feed(self) -> None:
        """The hidden states of the rows that are new."""
        if self.tree.num_tokens == len(self.hidden):
            return
        first = 0 if self.store is None else len(self.hidden)
        table, none = self.tree.table(), np.zeros(0, np.int64)
        pack = Pack(
            input_ids=self.tree.input_ids()[first:], position_ids=table.positions()[first:], table=table, rows=none,
            targets=none, num_tempered=0, query_index=none, units=range(0), tree=self.tree, first_row=first,
        )  # fmt: skip
        found = packed_hidden(self.model, pack, store=self.store).to(self.head.weight)
        self.hidden = torch.cat([self.hidden[:first], found])
        self.forwards += 1
        self.tokens_fed += pack.num_tokens

    def _sample(self, rows: Tensor, draws: Tensor, temperature: float, fills: Sequence[_Fill]) -> Tensor:
        """(N,) ids from hidden states (N, H): the first whose cumulated probability exceeds the draw."""
        weight, bias = self.head.weight, self.head.bias
        softmax = Softmax.of(temperature, self.head.softcap, self.head.logit_scale)
        height = rows_at_once(len(weight))
        usable = min(vocab_size(self.model), len(weight))
        chosen = []
        for some, draw in zip(rows.split(height), draws.split(height), strict=True):
            exact = compute_dtype(weight.dtype)
            logits, _ = empty_strip(len(some), len(weight), exact, exact, weight.device)
            write_logits(some, weight, logits)
            none = torch.zeros(len(some), dtype=torch.long, device=weight.device)
            p = probabilities(logits[None], bias, none, none.bool(), softmax, keep_below=False, room=logits[None]).p[0]
            cumulated = p[:, :usable].double().cumsum(-1)
            threshold = draw.to(weight.device)[:, None] * cumulated[:, -1:]
            chosen.append(torch.searchsorted(cumulated, threshold, right=True)[:, 0].clamp(max=usable - 1))
            if not torch.isfinite(cumulated[:, -1]).all():
                bad = len(chosen[:-1]) * height + int((~torch.isfinite(cumulated[:, -1])).nonzero()[0])
                raise FloatingPointError(f"completions row {fills[bad].row}: the model gave a nan log-prob")
        return torch.cat(chosen).cpu()


@dataclass(frozen=True)
class Sufficiency:
    """Answer log-probs in nats, whole and with only some units left, of B completions.

    Attributes:
        base: (B,) fp32 log P(answer | prompt, reasoning); nan where there is no answer.
        kept: (B,) fp32, the same with every unit masked but the kept ones.
        drop: (B,) fp32, `kept - base`: near 0 where what is kept suffices.
        work: counts of what was computed.
    """

    base: Tensor
    kept: Tensor
    drop: Tensor
    work: ScoringWork


def sufficiency(
    model: nn.Module,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    units: Sequence[Sequence[Span]],
    answers: Sequence[Span | None],
    keep: Sequence[Sequence[int]],
    *,
    placeholder_id: int,
    token_budget: int | None = None,
) -> Sufficiency:
    """How probable the answer stays when only the kept units are left and all others are masked: one branch per row.

    Text that belongs to no unit stays. A token that a kept unit holds stays, whatever other units hold it.

    Args:
        model, prompts, completions, answers, placeholder_id, token_budget: as in `score_counterfactuals`.
        units: for each completion, spans; none may overlap the answer.
        keep: for each completion, the numbers of the units to keep, as from `top_units`.

    Returns:
        `Sufficiency`.

    Raises:
        ValueError: bad input; the message names argument, row and value.
        TypeError, NotImplementedError, FloatingPointError: as `score_counterfactuals`.

    Source: ERASER (DeYoung et al. 2020); `drop` is the negative of its sufficiency, in log-probs.
    """
    causal = causal_lm(model)
    check_columns(prompts, completions=completions, units=units, answers=answers, keep=keep)
    ids = checked_ids(prompts, completions, vocab_size(causal), context_length(causal))
    rows = checked_rows(causal, ids, units, answers, placeholder_id)
    order = equal_prompts_together([row.prompt for row in rows])
    asked = [_whole_and_kept(b, rows[b], keep[b], placeholder_id) for b in order]
    lengths = [len(rows[b].prompt) + len(rows[b].completion) for b in order]
    found, work = query_logprobs(model, asked, lengths=lengths, row_numbers=order, token_budget=token_budget)
    both = torch.full((len(rows), 2), float("nan"))
    for b, values in zip(order, found, strict=True):
        if values:
            both[b] = torch.stack([value.sum() for value in values])
    base, kept = both.unbind(1)
    return Sufficiency(base, kept, kept - base, work)


def _whole_and_kept(b: int, row: Row, keep: Sequence[int], placeholder_id: int) -> list[Query]:
    masked = np.zeros(len(row.completion), dtype=bool)
    for span in row.spans:
        masked[span.start : span.end] = True
    for number in keep:
        if not 0 <= number < len(row.spans):
            raise ValueError(f"keep row {b}: {number} is no number of one of its {len(row.spans)} units")
        masked[row.spans[number].start : row.spans[number].end] = False
    if row.answer is None:
        return []
    start, end = (len(row.prompt) + edge for edge in row.answer)
    whole = np.concatenate([row.prompt, row.completion])
    kept = np.concatenate([row.prompt, np.where(masked, placeholder_id, row.completion)])
    targets, beyond = whole[start:end], whole[end - 1 :]
    return [Query(tokens[: end - 1], start - 1, targets, beyond=beyond) for tokens in (whole, kept)]
