"""Compute log-probs and the policy loss of whole completions, with gradients, by one packed forward without padding.

`packed_forward` runs the model; log-probs, the loss and, from its keys and values, counterfactual scores are read off.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..batch import Batch, Masks, batch_and_options
from ..loss.policy import linear_policy_loss
from ..loss.ragged import LossBatch, checked_kept_tokens
from ..model.attention import KeyValueStore
from ..model.check.verify import check_trainable, was_checked
from ..model.head import Head
from ..model.limits import rope_lengths, smallest_budget
from ..model.parts import causal_lm
from ..model.router_loss import packed_router_loss, uses_of_rows
from ..model.run_inside import run_inside
from ..model.sharded.ranks import Ranks, inside
from ..model.state import ModelState, TensorMarks
from ..model.stateful_layers import has_cells
from ..model.tree_forward import packed_hidden, tree_training_mode
from ..model.walk import ModelWalk
from ..ops.kept_tokens import KeptTokens, padded_kept_tokens
from ..ops.linear_logprob import linear_logprob
from ..ops.upload import upload
from ..options import POSITIVE, check_class
from ..rows import Rows
from ..tree.packs import lay_out_behind
from ..tree.prefix_tree import Pack, Query
from .access import InProcess, Sharded
from .branches import check_ids
from .masked import (
    CounterfactualScores,
    ScoringWork,
    collect_logprobs,
    collect_scores,
    on_host,
    query_logprobs,
    run_plan,
    score_batch,
)
from .outcomes import Outcome
from .plan import QueryPlan, TrainingPlan, as_many_as_others, plan_queries, plan_scoring, plan_training


class PackedLoss(NamedTuple):
    """Result of `packed_policy_loss`."""

    loss: Tensor  # (), differentiable
    metrics: dict[str, Tensor]  # as from `policy_loss`
    logprobs: list[Tensor]  # B tensors (T_b,) fp32, detached, for later iterations; nan where the loss needed none


def packed_logprobs(
    model: nn.Module,
    rows: Rows,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    kept_tokens: Sequence[KeptTokens] | None = None,
    token_budget: int | None = None,
) -> list[Tensor] | tuple[list[Tensor], list[Tensor]]:
    """Compute log-probs of every completion token by one forward that feeds each prompt once; differentiable.

    Args:
        model: as in `score_counterfactuals`, in any mode without dropout. If processes share it, each needs a row.
        rows: prompts and completions. Equal prompts and longer common prefixes are fed once.
        temperature: divides the logits.
        return_entropy: also return the entropy of the distribution that each token was drawn from.
        kept_tokens: for each row, the ids that the sampler kept at each of its tokens, to normalise over.
        token_budget: maximum tokens per forward; default by free memory. Completions of one prompt, and rows that go on
            as they begin, stay together.

    Returns B tensors (T_b,) in nats on the head's device, float32, or float64 from a model in float64. With
    `return_entropy` a second list like it. Raises `ValueError` naming argument, row and value, `NotImplementedError`
    for a model that cannot be run this way.
    """
    causal = causal_lm(model)

    def body() -> list[Tensor] | tuple[list[Tensor], list[Tensor]]:
        POSITIVE.check(temperature=temperature)
        check_class(Rows, rows=rows)
        return packed_forward(causal, rows, token_budget=token_budget).logprobs(
            temperature, return_entropy=return_entropy, kept_tokens=kept_tokens
        )

    return run_inside(model, body, trains=True)


def packed_policy_loss(
    model: nn.Module,
    rows: Rows | Batch,
    *,
    token_budget: int | None = None,
    **options: Any,
) -> PackedLoss:
    """Compute `policy_loss` from token ids, by one forward that feeds each prompt once, the head fused into the loss.

    The loss is that of the unshared batch. Completions, and ends of completions, that it does not need (no advantage,
    weight or mask there, and neither KL nor entropy wanted) are not fed; their tokens stay in the denominators.

    Args:
        model, rows, token_budget: as in `packed_logprobs`, with its errors; rows may be a batch with its columns, and
            its own `token_budget` if that is less.
        **options: columns of `Batch` by name, and options of `linear_policy_loss`. The loss reads `advantages`, which
            it needs, `old_logprobs` (None means on-policy), `ref_logprobs` (needed when `beta != 0`), `weights` (on the
            clipped policy term), `mask`, `sampling_logprobs` and `kept_tokens`.
    """
    causal = causal_lm(model)

    def body() -> PackedLoss:
        batch, others = batch_and_options(rows, options)
        given = LossBatch.of(batch, **others)
        forward = packed_forward(
            causal, batch.rows, needed=given.needed(), trained=given.trained.tolist(),
            token_budget=smallest_budget(token_budget, batch.token_budget),
        )  # fmt: skip
        return forward.policy_loss(given)

    return run_inside(model, body, trains=True)


def packed_forward(
    causal: PreTrainedModel,
    rows: Rows,
    *,
    needed: Sequence[int] | None = None,
    trained: Sequence[bool] | None = None,
    token_budget: int | None = None,
    keep_states: bool = False,
    router_loss: bool = False,
) -> "PackedForward":
    """Run `causal` on the packed trees of a batch, with gradients.

    Args:
        causal: the model that `causal_lm` finds.
        rows, token_budget: as in `packed_logprobs`, with its errors.
        needed: for each row, how many of its first tokens will be read; 0 feeds nothing. Default all.
        trained: for each row, whether a backward is to reach it; default all. Prompts without any such row are fed
            without gradient, unless processes share the model. If no row is trained, one dummy token is fed so that a
            backward still runs, and leaves zeros.
        keep_states: keep the keys and values of every layer, so that `PackedForward.score` can continue the rows.
        router_loss: for `PackedForward.router_loss`, feed all rows whole and with gradient, and keep routers' logits.
    """
    check_ids(causal, rows)
    walk = ModelWalk.of(causal)
    plan = plan_training(
        walk, rows, needed, None if router_loss else trained, token_budget=token_budget, whole=router_loss
    )
    # A check that runs forwards needs the memory; one that only compares is made while the device runs.
    head = None if was_checked(walk, router_loss=router_loss) else check_trainable(walk, router_loss=router_loss)
    states = list[_PackStates]()

    def feed(packs: Iterable[Pack]) -> None:
        for pack in packs:
            store, routers = KeyValueStore() if keep_states else None, list[tuple[Tensor, ...]]()
            hidden = packed_hidden(walk, pack, store=store, routers=routers if router_loss else None)
            states.append(_PackStates(pack, hidden, store, *routers))

    with tree_training_mode(walk):
        feed(as_many_as_others(causal, plan.packs(with_gradient=True), at_least=int(trained is not None)))
        with torch.no_grad():
            feed(plan.packs(with_gradient=False))
    head = head or check_trainable(walk, router_loss=router_loss)
    return PackedForward(plan, head, states, ModelState(walk) if keep_states else None)


def stands_alone(walk: ModelWalk) -> bool:
    """Whether later rows cannot continue a forward's, and no other rows may be fed with it."""
    return has_cells(walk) or bool(rope_lengths(walk)[0])


@dataclass
class _PackStates:
    """One pack after its forward; its queries are rows of the batch."""

    pack: Pack
    hidden: Tensor  # (N, H), with gradient if a row of it is trained
    store: KeyValueStore | None
    routers: tuple[Tensor, ...] = ()  # (N, experts) each


class PackedForward(InProcess):
    """Hidden states of a batch's completions, and everything that is read off them.

    As a `ModelAccess` it feeds only what the forward has not fed: branches and queries continue its completions.
    `meanwhile` is called while they run, for what the loss needs beside their scores.
    """

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, plan: TrainingPlan, head: Head, packs: list[_PackStates], state: ModelState | None) -> None:
        super().__init__(plan.walk.model)
        if isinstance(inside(plan.walk.model), Ranks):
            self.capabilities = Sharded.capabilities
        self.head, self.rows, self.counts, self.packs = head, plan.rows, plan.counts, packs
        self._walk, self._with_gradient = plan.walk, plan.with_gradient
        self.device = head.weight.device
        self._head = TensorMarks([head.weight] if head.bias is None else [head.weight, head.bias])
        self._model = state
        predicting, offset = [np.zeros(0, np.int64)] * (len(self.rows) + 1), 0
        for one in packs:
            parts = np.split(one.pack.rows[one.pack.query_index] + offset, np.cumsum(self.counts[one.pack.queries]))
            for b, part in zip(one.pack.queries, parts, strict=False):  # the last part is empty
                predicting[b] = part
            offset += one.pack.num_tokens
        self._predicting = np.concatenate(predicting)  # packed row of each fed token, row by row, packs laid end to end

    @property
    def tokens_fed(self) -> int:
        """Count the packed tokens that went through the model."""
        return sum(one.pack.num_tokens for one in self.packs)

    def logprobs(
        self,
        temperature: float = 1.0,
        *,
        return_entropy: bool = False,
        kept_tokens: Sequence[KeptTokens] | None = None,
    ) -> list[Tensor] | tuple[list[Tensor], list[Tensor]]:
        """Compute log-probs, as `packed_logprobs` does, of the fed tokens of each row."""
        self._require_same_head()
        counts = self.counts.tolist()
        targets = [ids.numpy()[:count] for ids, count in zip(self.rows.completions, counts, strict=True)]
        targets.append(np.zeros(0, np.int64))
        predicting, predicted = upload([self._predicting, np.concatenate(targets)], self.device)
        hidden = self._hidden(predicting)
        kept = None
        if kept_tokens is not None and counts:
            own = checked_kept_tokens(kept_tokens, self.rows, vocabulary=len(self.head.weight))
            kept = KeptTokens.joined([one.take(slice(0, n)) for one, n in zip(own, counts, strict=True)])
        found = linear_logprob(
            hidden, self.head.weight, predicted, return_entropy=return_entropy, temperature=temperature,
            kept_tokens=kept, **self.head.options,
        )  # fmt: skip
        return (
            (list(found[0].split(counts)), list(found[1].split(counts)))
            if return_entropy
            else list(found.split(counts))
        )

    def policy_loss(self, batch: Batch | LossBatch, **options: Any) -> PackedLoss:
        """Compute the loss of `packed_policy_loss`, with its options, from what this forward has fed."""
        self._require_same_head()
        batch = LossBatch.of(batch, **options) if isinstance(batch, Batch) else batch
        mask, trains = batch.columns["mask"], torch.is_grad_enabled()
        if len(mask) != len(self.rows):
            raise ValueError(f"batch has {len(mask)} rows, this forward has {len(self.rows)}; they must agree")
        pairs = zip(batch.needed(), self.counts.tolist(), self._with_gradient, strict=True)
        for b, (needed, count, has_gradient) in enumerate(pairs):
            if needed > count:
                raise ValueError(f"batch row {b}: its loss needs {needed} tokens, but {count} were fed (needed[{b}])")
            if trains and batch.trained[b] and not has_gradient:
                raise ValueError(f"batch row {b}: its loss has a gradient, but it was fed without (trained[{b}])")
        row, token = np.divmod(batch.needed_tokens.numpy(), mask.shape[1])
        starts = np.cumsum(self.counts) - self.counts
        there, (index,) = batch.to(self.device, torch.from_numpy(self._predicting[starts[row] + token]))
        kept = None
        if batch.kept_tokens is not None:
            own = checked_kept_tokens(batch.kept_tokens, self.rows, mask, len(self.head.weight))
            kept = padded_kept_tokens(own, mask.shape[1])
        loss, metrics, logprobs = linear_policy_loss(
            self._hidden(index),
            self.head.weight,
            rows=batch.needed_tokens,
            kept_tokens=kept,
            return_logprobs=True,
            **there,  # type: ignore[arg-type]
            **self.head.options,
            **batch.options,
        )
        return PackedLoss(loss, metrics, [line[:n] for line, n in zip(logprobs, self.rows.lengths, strict=True)])

    def router_loss(self) -> Tensor:
        """Compute transformers' load-balancing loss, (), of the rows as if none were shared."""
        if not all(one.routers for one in self.packs):
            raise ValueError("router_loss must be True for a forward whose routers are read, got False")
        packs = [(one.routers, uses_of_rows(one.pack, map(self.rows.whole, one.pack.queries))) for one in self.packs]
        return packed_router_loss(self.model, packs).to(self.device)

    def score(
        self, batch: Batch, *, mask: Masks = None, outcome: Outcome = "logprob", merge_adapters: bool = False
    ) -> CounterfactualScores:
        """Score some or all of the forward's rows, found by their index, and feed only branches.

        With `merge_adapters` the unmasked answer is a branch too: its rows are fed again, so that the same weights give
        both log-probs of a drop. Layers that carry a state, and rotary frequencies that follow a forward's longest
        sequence, take forwards of their own. Raises `RuntimeError` if a weight or adapter has changed since. Scores
        stay on the device if `batch.unread` is a list, which then gets the check of their values.
        """
        walk = self._kept_walk()
        if stands_alone(walk):
            self._require_same_model()
            return score_batch(walk, batch, outcome, mask, merge_adapters)
        plan = plan_scoring(walk, batch, outcome, mask)
        own = self._own_rows(batch.rows)
        for index, b, bundle in zip(batch.index, own, plan.bundles, strict=True):
            if bundle and not self.counts[b]:
                raise ValueError(f"answers row {index}: its completion was not fed (needed[{b}] was 0)")
        pack_of = {b: one.pack for one in self.packs for b in one.pack.queries}
        trunks = [pack_of.get(b) for b in own]
        if merge_adapters:
            pairs = zip(plan.queries, plan.bundle_of, strict=True)
            plan = replace(plan, queries=[_fed_again(query, trunks[bundle]) for query, bundle in pairs])
        values, work = self._run(walk, plan, trunks, merge_adapters)
        if batch.unread is None:
            values = on_host(values, plan)
        else:
            batch.unread.append(lambda: on_host(values, plan))
        return collect_scores(values, plan.sizes, batch, outcome, work)

    def _own_rows(self, rows: Rows) -> list[int]:
        """Find rows of this forward by their index; raise `ValueError` for others; compares no tokens."""
        row_of = {number: b for b, number in enumerate(self.rows.index)}
        own = [row_of.get(number, -1) for number in rows.index]
        for b, number, prompt, length in zip(own, rows.index, rows.prompts, rows.lengths, strict=True):
            if b < 0 or (len(prompt), length) != (len(self.rows.prompts[b]), self.rows.lengths[b]):
                raise ValueError(f"rows: must be those of packed_forward, and row {number} of {length} tokens is not")
        return own

    def query(self, bundles: Sequence[Sequence[Query]], **options: Any) -> tuple[list[list[Tensor]], ScoringWork]:
        """Answer queries as `query_logprobs` does, from the states of this forward; errors as in `score`."""
        walk = self._kept_walk()
        if not self.packs or stands_alone(walk):
            self._require_same_model()
            return query_logprobs(self.model, bundles, **options)
        plan = plan_queries(walk, bundles, **options)
        trunks = [self._nearest(plan.queries[b[0]].tokens) if b else None for b in plan.bundles]
        values, work = self._run(walk, plan, trunks)
        return collect_logprobs(on_host(values, plan), plan), work

    def _kept_walk(self) -> ModelWalk:
        if self._model is None or self._walk is None:
            raise ValueError("keep_states must be True for a forward whose rows are to be continued, got False")
        return self._walk

    def _require_same_model(self) -> None:
        if self._model is not None and not self._model.holds(self._kept_walk().model):
            raise RuntimeError(
                "this forward's rows cannot be continued: a weight or an adapter has changed since it ran; ask before "
                "that, or run packed_forward again"
            )

    def _require_same_head(self) -> None:
        if not self._head.hold([self.head.weight] if self.head.bias is None else [self.head.weight, self.head.bias]):
            raise RuntimeError(
                "this forward's log-probs cannot be read: the head has changed since it ran; ask before the optimizer "
                "step, or run packed_forward again"
            )

    def _nearest(self, tokens: np.ndarray) -> Pack:
        """Find the pack that has fed most of a sequence."""
        return max((one.pack for one in self.packs), key=lambda pack: pack.tree.common_prefix(tokens))

    def _run(
        self, walk: ModelWalk, plan: QueryPlan, trunks: Sequence[Pack | None], merge_adapters: bool = False
    ) -> tuple[Tensor, ScoringWork]:
        """Compute the values of a plan's queries; those of each bundle continue its trunk."""
        states = {one.pack: (one.hidden.detach(), one.store) for one in self.packs}
        bundles = [bundle for part in plan.parts for group in part for bundle in group]
        bundles_of = {trunk: [own for own in bundles if trunks[plan.bundle_of[own[0]]] is trunk] for trunk in states}
        packs = chain.from_iterable(
            lay_out_behind(trunk, plan.queries, own, plan.limits) for trunk, own in bundles_of.items()
        )

        def meanwhile() -> None:
            self._require_same_model()
            self.meanwhile()

        with torch.no_grad():
            return run_plan(walk, self.head, plan, packs, states, merge_adapters=merge_adapters, meanwhile=meanwhile)

    def _hidden(self, predicting: Tensor) -> Tensor:
        """Gather the hidden states (R, H), with gradient, of packed rows (R,), which may repeat."""
        if not self.packs:
            return self.head.weight.new_zeros(0, self.head.weight.shape[1])
        hidden = self.packs[0].hidden if len(self.packs) == 1 else torch.cat([one.hidden for one in self.packs])
        # As an embedding: where completions share a row, its gradient is a sum in a fixed order. Indexing adds
        # atomically on a CPU of several threads, `index_select` on a GPU.
        rows = nn.functional.embedding(predicting.to(hidden.device), hidden).to(self.device)
        return rows if torch.is_autocast_enabled(rows.device.type) else rows.to(self.head.weight.dtype)


def _fed_again(query: Query, trunk: Pack | None) -> Query:
    """Make `query` share none of the rows that predict its targets, if the trunk has fed one of them."""
    is_fed = trunk is not None and trunk.tree.common_prefix(query.tokens) > query.first
    return replace(query, alone_from=query.first) if is_fed else query
