"""Credit and policy loss of a batch from one packed forward: the whole update of a training loop but its backward."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..batch import Batch
from ..loss.ragged import LossBatch
from ..model.parts import causal_lm
from ..model.run_inside import run_inside
from ..rows import Rows
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
    rows: Rows,
    advantages: Tensor | Sequence[Tensor],
    *,
    credit: CounterfactualConfig | str,
    old_logprobs: Sequence[Tensor] | None = None,
    ref_logprobs: Sequence[Tensor] | None = None,
    mask: Sequence[Tensor] | None = None,
    groups: Tensor | None = None,
    rewards: Tensor | Sequence[float] | None = None,
    seed: int | Sequence[int] = 0,
    token_budget: int | None = None,
    **options: Any,
) -> CreditedLoss:
    """Compute the policy loss with credited tokens, by one forward that credit and loss both read.

    It is `counterfactual_credit` and then `packed_policy_loss`, to rounding. Later iterations on the same completions
    take `packed_policy_loss` with the weights of `credit`, or its advantages if it has some.

    Args:
        model: as in `score_counterfactuals`, in any mode without dropout; completions are judged as it computes now.
        tokenizer: the one that sampled the ids.
        rows: prompts and completions; equal prompts, and longer common prefixes, are fed once.
        advantages: (B,), or B tensors (T_b,).
        credit: configuration of credit, or the name of a preset.
        old_logprobs: B tensors (T_b,) under the sampling policy; None means on-policy.
        ref_logprobs: B tensors (T_b,), needed when `beta != 0`.
        mask: B tensors (T_b,) of 0 and 1, the tokens that the policy wrote and the loss counts; None for all.
        groups, rewards, seed: as in `counterfactual_credit`.
        token_budget: maximum tokens of each forward; default by free memory.
        **options: those of `linear_policy_loss`, `loss_type` and `temperature` among them.

    Raises:
        ValueError, NotImplementedError: as `counterfactual_credit` and `packed_policy_loss` do.
    """
    causal, config = causal_lm(model), as_config(credit)

    def body() -> CreditedLoss:
        columns: dict[str, Any] = {"mask": mask, "ref_logprobs": ref_logprobs, **options}
        plain = LossBatch.of(rows, old_logprobs, advantages, **columns)
        temperature = options.get("temperature", 1.0)
        inputs = Batch(rows, advantages=advantages, groups=groups, rewards=rewards, mask=mask)
        assigned = DeferredCredit(config, tokenizer, inputs, seed=seed, temperature=temperature)
        every = range(len(rows))
        reads = assigned.reads(every)  # also a completion without an advantage, where completions are compared
        forward = packed_forward(
            causal,
            rows,
            needed=[n if read else need for n, need, read in zip(rows.lengths, plain.needed(), reads, strict=True)],
            trained=[one or read for one, read in zip(plain.trained.tolist(), reads, strict=True)],
            token_budget=token_budget,
            keep_states=config.continues,
            foreseen=assigned.foreseen(every, causal),
        )
        assigned.by_forward(every, forward)
        batch = LossBatch.of(rows, old_logprobs, assigned.signed(every), weights=assigned.weights(every), **columns)
        loss, metrics, logprobs = forward.policy_loss(batch)
        found = assigned.finished()
        assert found is not None
        return CreditedLoss(loss, {**metrics, **found.metrics(mask)}, logprobs, found)

    return run_inside(model, body, trains=True)
