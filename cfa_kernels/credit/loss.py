"""Credit and policy loss of a batch from one packed forward: the whole update of a training loop but its backward."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..batch import Batch, batch_and_options
from ..loss.ragged import LossBatch
from ..model.limits import smallest_budget
from ..model.parts import causal_lm
from ..model.run_inside import run_inside
from ..rows import Rows
from ..scoring.access import ModelAccess
from ..scoring.packed import packed_forward
from .assign import Credit
from .config import CounterfactualConfig, as_config
from .deferred import DeferredCredit


class CreditedLoss(NamedTuple):
    """Result of `credited_loss`."""

    loss: Tensor  # (), differentiable
    metrics: dict[str, Tensor | float]  # as from `policy_loss`, and `Credit.metrics`
    logprobs: list[Tensor]  # B tensors (T_b,) fp32, detached, for later iterations; nan where the loss needed none
    credit: Credit


def credited_loss(
    model: nn.Module,
    tokenizer: Any,
    rows: Rows | Batch,
    *,
    credit: CounterfactualConfig | str | Mapping[str, Any],
    scorer: nn.Module | ModelAccess | None = None,
    seed: int | Sequence[int] = 0,
    token_budget: int | None = None,
    **options: Any,
) -> CreditedLoss:
    """Compute the policy loss with credited tokens, by one forward that credit and loss both read.

    It is `counterfactual_credit` and then `packed_policy_loss`, to rounding, with their errors. Later iterations on the
    same completions take `packed_policy_loss` with the weights of `credit`, or its advantages if it has some.

    Args:
        model: as in `score_counterfactuals`, in any mode without dropout; completions are scored as it computes now.
        tokenizer: the one that sampled the ids.
        rows: prompts and completions, or a batch with its columns.
        credit: configuration of credit, the name of a preset, or a mapping of options by path.
        scorer: model that scores in place of `model`, such as a frozen reference, by its own forwards.
        seed: as in `counterfactual_credit`.
        token_budget: maximum tokens of each forward, or the batch's own if that is less; default by free memory. That
            of the configuration also limits credit's own forwards.
        **options: columns of `Batch` by name, `advantages` among them, and options of `linear_policy_loss`. `weights`
            multiply those of credit before these are normalised.
    """
    causal, config = causal_lm(model), as_config(credit)

    def body() -> CreditedLoss:
        batch, others = batch_and_options(rows, options)
        batch = batch.exchanged(token_budget=smallest_budget(token_budget, batch.token_budget))
        plain, every = LossBatch.of(batch, **others), range(len(batch))
        assigned = DeferredCredit(config, tokenizer, batch, seed=seed, temperature=others.get("temperature", 1.0))
        if scorer is not None:
            if config.reads_entropies and batch.entropies is None:
                raise ValueError("scorer: its entropies are not the policy's, which credit reads; pass entropies")
            assigned.by_model(scorer)
        reads = [one and scorer is None for one in assigned.reads(every)]  # also one without an advantage, if compared
        needed = zip(batch.rows.lengths, plain.needed(), reads, strict=True)
        forward = packed_forward(
            causal,
            batch.rows,
            needed=[length if read else count for length, count, read in needed],
            trained=[one or read for one, read in zip(plain.trained.tolist(), reads, strict=True)],
            token_budget=batch.token_budget,
            keep_states=config.continues and scorer is None,
        )
        if scorer is None:
            assigned.by_forward(every, forward, queues=True)
        loss, metrics, logprobs = forward.policy_loss(plain.credited(**assigned.columns(every)))
        found = assigned.take(every)
        return CreditedLoss(loss, {**metrics, **found.metrics(batch.mask)}, logprobs, found)

    return run_inside(model, body, trains=True)
