"""Estimate importance by gradient times input at the embeddings: one backward instead of a branch for every unit."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..batch import Batch, ScoredRow
from ..model.check.verify import check_supported
from ..model.head import Head
from ..model.limits import default_token_budget
from ..model.memory import rows_at_once, run_in_memory
from ..model.parts import embedding, input_device
from ..model.tree_forward import last_layer_on_rows, packed_hidden, tree_attention_mode
from ..model.walk import ModelWalk
from ..ops.upload import upload
from ..options import Count, NotNegative, check_fields
from ..rows import equal_prompts, keyed_generator
from ..scoring.access import GRADIENTS, ModelAccess
from ..scoring.masked import ScoringWork
from ..scoring.outcomes import DIVERGENCES, Outcome, row_means
from ..scoring.plan import plan_queries, queries_of
from ..tree.packs import groups_within, lay_out
from ..tree.prefix_tree import Pack, Query
from .base import ANSWER, Estimator, Importances


@dataclass(frozen=True)
class Gradient(Estimator):
    """Gradient of the outcome's change under noise, times the embeddings (OAR paper, section 3: OAR-G).

    Noise N(0, sigma^2) is added to the embeddings e of the units' tokens. J is the change of the outcome. A token's
    importance is |<dJ/de_t, e_t>| with the clean e_t, a unit's the sum over its tokens. e is the output of the input
    embedding.

    | outcome | J |
    |---|---|
    | `last` | KL(P_0, P_noisy), P the distribution of the answer's first token |
    | `mean` | the same, P the softmax of the mean logits over the answer's tokens |
    | `mean_logprob` | mean log-prob of the answer's tokens, clean minus noisy |
    | `logprob` | their sum, clean minus noisy |

    One draw scatters by some two thirds of its size; average several `samples`. At `sigma` 0 importances of `last` and
    `mean` are those of `mean_logprob`: gradient times input, one deterministic pass.
    """

    name = "gradient"
    default_units = "tokens"
    weights = "bilevel"
    needs = frozenset({ANSWER, GRADIENTS})

    outcome: Outcome = "mean"
    """Outcome to compare: "logprob" or "mean_logprob" of the answer, or by KL divergence the distribution of its first
    token ("last") or of its mean logits ("mean")."""
    sigma: NotNegative = 1e-3
    """Standard deviation of the noise, in the embeddings' own scale; 0 for plain gradient x input."""
    samples: Count = 1
    """Draws to average."""

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, access: ModelAccess, batch: Batch) -> Importances:
        """Score the units of a batch; nan in completions without an answer.

        The model is left exactly as it was. KL outcomes take one clean forward for all draws; every draw takes a
        forward and one backward to the embeddings. Raises `TypeError` or `NotImplementedError` for models that cannot
        be run this way, `FloatingPointError` naming the row for a gradient that is not finite.
        """
        options = self
        if self.sigma == 0:  # a divergence has no gradient there
            options = Gradient("mean_logprob" if self.outcome in DIVERGENCES else self.outcome, 0.0)
        walk = ModelWalk.of(access.model)
        rows, own_budget = [_Row.of(row, options.outcome) for row in batch.scored_rows], batch.token_budget
        plan = plan_queries(
            walk, [[row.query] if row.query and len(row.moving) else [] for row in rows], index=batch.index,
            groups=equal_prompts(batch.rows.prompts),
            token_budget=default_token_budget(walk, training=True) if own_budget is None else own_budget,
        )  # fmt: skip
        queries = {plan.bundle_of[n]: query for n, query in enumerate(plan.queries)}  # by row
        head = _widened(check_supported(walk))

        def run(pack: Pack) -> _Sums:
            return _PackSaliency(walk, head, pack, [rows[i] for i in pack.queries], options, batch.seed).run()

        def smaller(pack: Pack) -> Iterator[Pack]:
            return lay_out(queries, [[i] for i in pack.queries], pack.num_tokens // 2)

        with torch.inference_mode(False), tree_attention_mode(walk), _frozen(walk):
            parts = [[[plan.bundle_of[n] for n in own] for group in part for own in group] for part in plan.parts]
            packs = (pack for part in parts for pack in lay_out(queries, part, plan.limits.token_budget))
            sums = list(run_in_memory(packs, run, smaller))
        return _gather(rows, batch.index, sums, options.samples)


class _Row(NamedTuple):
    """One completion and its query."""

    row: ScoredRow
    query: Query | None  # None without an answer
    moving: np.ndarray  # (n,) int64: tokens of the units that can move the outcome, ascending

    @classmethod
    def of(cls, row: ScoredRow, outcome: Outcome) -> "_Row":
        if row.answer is None:
            return cls(row, None, np.zeros(0, np.int64))
        steps = np.zeros(len(row.completion) + 1, np.int64)
        for start, end in row.spans:
            steps[start] += 1
            steps[end] -= 1
        (query,) = queries_of(replace(row, spans=[]), outcome)
        moving = np.flatnonzero(np.cumsum(steps)[: row.answer.start])
        return cls(row, replace(query, alone_from=len(row.prompt)), moving)

    def importances(self, tokens: np.ndarray) -> Tensor:
        """Sum the importances (n,) of the `moving` tokens over each unit, (K,) fp32."""
        if self.query is None:
            return torch.full((len(self.row.spans),), math.nan)
        each = np.zeros(len(self.row.completion) + 1)
        each[self.moving] = tokens
        # Sums over [start, end) and over what is between one end and the next start; only the former are kept.
        edges = np.array(self.row.spans, dtype=np.int64).ravel()
        return torch.from_numpy(np.add.reduceat(each, edges)[::2] if len(edges) else np.zeros(0)).float()


@contextmanager
def _frozen(walk: ModelWalk) -> Iterator[None]:
    """Switch off gradients of parameters inside, so that a backward computes only those of activations."""
    trained = [parameter for parameter in walk.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


class _Sums(NamedTuple):
    members: list[int]
    values: Tensor  # (n,) float64 on the device: over draws, of the importances of the members' `moving` tokens
    work: ScoringWork


def _gather(rows: list[_Row], index: Sequence[int], sums: list[_Sums], samples: int) -> Importances:
    """Collect the importances of every row by one copy to the host, which waits for the device."""
    tokens, work = [np.zeros(0)] * len(rows), sum((one.work for one in sums), ScoringWork())
    if sums:
        means = torch.cat([one.values for one in sums]).cpu().numpy() / samples
        members = [i for one in sums for i in one.members]
        ends = np.cumsum([len(rows[i].moving) for i in members])
        for i, part in zip(members, np.split(means, ends[:-1]), strict=True):
            if not np.isfinite(part).all():
                raise FloatingPointError(f"completions row {index[i]}: the model gave a gradient that is not finite")
            tokens[i] = part
    return Importances([row.importances(part) for row, part in zip(rows, tokens, strict=True)], work=work)


class _PackSaliency:
    """Forwards and backwards of one pack of completions. Nothing here waits for the device."""

    def __init__(
        self, walk: ModelWalk, head: Head, pack: Pack, rows: list[_Row], options: Gradient, seed: tuple
    ) -> None:
        self.walk, self.model, self.head, self.pack, self.rows = walk, walk.model, head, pack, rows
        self.options, self.seed = options, seed
        self.diverges = options.outcome in DIVERGENCES  # a KL needs a clean forward
        queries = [row.query for row in rows if row.query]
        self.sizes = [len(query.targets) for query in queries]  # number of rows that decide each outcome
        read = pack.rows[pack.query_index]  # (R,) those rows, one member after the other
        first = read[np.cumsum(self.sizes) - self.sizes]
        # From its first token on a completion's rows are its own, one after the other.
        starts = [row.answer.start for row, _, _ in rows if row.answer]
        own = [row.moving + at + 1 - start for row, at, start in zip(rows, first, starts, strict=True)]
        self.counts = [len(tokens) for tokens in own]
        member, share = np.arange(len(rows)), [1 / size for size in self.sizes]
        self.device = input_device(self.model)
        self.noised, self.member_of_token, self.once, self.read = upload(
            [np.concatenate(own), np.repeat(member, self.counts), np.unique(read), read], self.device
        )  # (n,) rows of the units' tokens
        self.targets, self.member_of_row, self.lengths, self.shares = upload(
            [np.concatenate([query.targets for query in queries]), np.repeat(member, self.sizes), np.array(self.sizes),
             np.repeat(share, self.sizes)], head.weight.device,
        )  # fmt: skip

        forwards = options.samples + self.diverges
        self.work = ScoringWork(
            forwards=forwards,
            tokens_fed=forwards * pack.num_tokens,
            tokens_unshared=forwards * sum(len(query.tokens) for query in queries),
        )

    def run(self) -> _Sums:
        """Run all draws."""
        generators = [keyed_generator(*self.seed, row.row.index, "noise", device=self.device) for row in self.rows]
        clean = self._forward(_EmbeddingTap(self.model)) if self.diverges else None
        total = torch.zeros(sum(self.counts), dtype=torch.float64, device=self.device)
        for _ in range(self.options.samples):
            total += self._draw(clean, generators)
        return _Sums(self.pack.queries, total, self.work)

    def _draw(self, clean: Tensor | None, generators: list[torch.Generator]) -> Tensor:
        """Compute |<dJ/de, e>| (n,) float64 under one draw of noise."""
        noise, pairs, width = None, zip(self.counts, generators, strict=True), embedding(self.model).shape[1]
        if self.options.sigma:
            draws = [torch.randn(n, width, generator=generator, device=self.device) for n, generator in pairs]
            noise = self.options.sigma * torch.cat(draws)
        tap = _EmbeddingTap(self.model, self.noised, noise)
        with torch.enable_grad():
            rows = self._forward(tap)
            if not rows.requires_grad:
                raise NotImplementedError(tap.no_gradient)
            by_rows = self._by_rows(clean, rows.detach())
            # A power of two is taken out of each completion's gradient, so that half precision resolves it.
            largest = torch.segment_reduce(by_rows.abs().amax(1), "max", lengths=self.lengths, unsafe=True)
            unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest)[1])
            scaled = (by_rows / unit.index_select(0, self.member_of_row)[:, None]).to(rows.dtype)
            (gradient,) = torch.autograd.grad(rows, [tap.fed], scaled.to(rows.device), allow_unused=True)
        if gradient is None:
            raise NotImplementedError(tap.no_gradient)
        products = gradient[0, self.noised].double() * tap.clean[0, self.noised].double()
        return products.sum(1).abs() * unit.double().to(self.device).index_select(0, self.member_of_token)

    def _forward(self, tap: "_EmbeddingTap") -> Tensor:
        """Compute the hidden states (R, H) of the rows that decide the outcomes."""
        with tap, last_layer_on_rows(self.model, self.once):
            hidden = packed_hidden(self.walk, self.pack)
        return hidden.index_select(0, self.read.to(hidden.device))

    def _by_rows(self, clean: Tensor | None, noisy: Tensor) -> Tensor:
        """Compute the gradient (R, H) of the sum of all J by the hidden states `noisy` of the rows that decide them."""
        weight = self.head.weight
        with torch.autocast(weight.device.type, enabled=False):
            if clean is None:
                leaf = noisy.to(weight, copy=True).requires_grad_()
                values = self.head.logprobs(leaf, self.targets)
                mean = self.options.outcome == "mean_logprob"
                weights = self.shares.to(values.dtype) if mean else torch.ones_like(values)
                return torch.autograd.grad(values, leaf, -weights)[0]
            return _divergence_by_rows(clean, noisy, self.sizes, self.head)


def _widened(head: Head) -> Head:
    """Copy a head with weights in float32 at least."""
    dtype = torch.promote_types(head.weight.dtype, torch.float32)
    return replace(head, weight=head.weight.to(dtype), bias=None if head.bias is None else head.bias.to(dtype))


def _divergence_by_rows(clean: Tensor, noisy: Tensor, sizes: Sequence[int], head: Head) -> Tensor:
    """Compute the gradient (R, H) by `noisy` of the sum of KL(P_0, P_noisy) over outcomes of `sizes` rows each."""
    most = rows_at_once(len(head.weight))
    gradients, start = list[Tensor](), 0
    for group in groups_within(sizes, most):
        group_sizes = [sizes[i] for i in group]
        rows = slice(start, start + sum(group_sizes))
        (counts,) = upload([np.array(group_sizes)], head.weight.device)
        with torch.no_grad():
            expected = _outcome_logits(clean[rows].to(head.weight), counts, head).softmax(-1)
        leaf = noisy[rows].to(head.weight, copy=True).requires_grad_()
        logits = _outcome_logits(leaf, counts, head)
        # The KL's gradient by the logits is a small difference between results of two forwards.
        by_logits = logits.detach().softmax(-1) - expected
        gradients.append(torch.autograd.grad(logits, leaf, by_logits)[0])
        start = rows.stop
    return torch.cat(gradients)


def _outcome_logits(rows: Tensor, counts: Tensor, head: Head) -> Tensor:
    """Compute mean logits (B, V) of B outcomes, each decided by `counts` (B,) of the `rows` (R, H)."""
    if head.softcap is None:  # a linear head maps the mean of its inputs to the mean of its outputs
        return head.logits(row_means(rows, counts))
    return row_means(head.logits(rows), counts)


class _EmbeddingTap:
    """Make the input embedding return a leaf tensor inside: its output, with noise on some rows."""

    clean: Tensor  # (1, N, H) output of the embedding
    fed: Tensor  # (1, N, H) input of the model, to be differentiated by

    def __init__(self, model: PreTrainedModel, rows: Tensor | None = None, noise: Tensor | None = None) -> None:
        self.model, self.rows, self.noise, self.calls = model, rows, noise, 0
        self.no_gradient = f"model: {type(model).__name__} passes no gradient to its embeddings"

    def __enter__(self) -> None:
        self._hook = self.model.get_input_embeddings().register_forward_hook(self._exchange)

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        self._hook.remove()
        if failed is None and self.calls != 1:
            raise NotImplementedError(
                f"{self.no_gradient}: its forward looks tokens up {self.calls} times in its input embedding, not once"
            )

    def _exchange(self, _: nn.Module, __: tuple, output: Tensor) -> Tensor:
        self.calls += 1
        self.clean = output.detach()
        self.fed = self.clean.clone()
        if self.noise is not None and self.rows is not None:
            noisy = self.clean[0, self.rows] + self.noise.to(output.device)
            self.fed[0, self.rows] = noisy.to(output.dtype)
        if torch.is_grad_enabled():
            self.fed.requires_grad_()
        # Not the leaf itself: hooks that count or profile inputs of modules cannot follow one in `autograd.grad`.
        return self.fed.view_as(self.fed)
