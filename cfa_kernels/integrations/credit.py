"""Connect credit to any trainer: what a host offers, and credit of rows whose model is in other processes."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from .. import CounterfactualConfig
from ..batch import Batch
from ..credit.deferred import DeferredCredit
from ..estimators import ESTIMATORS
from ..estimators.base import ANSWER, ENTROPIES, EXTERNAL, LOG_RATIOS, NEEDS, REWARDS, SIBLINGS, TARGETS, Estimator
from ..rows import Rows
from ..scoring.access import DISTRIBUTIONS, GRADIENTS, LOGPROBS, MODEL, WHOLE, ModelAccess, Sharded

OFFERED_BY_A_SERVICE = frozenset({ANSWER, SIBLINGS, REWARDS, LOGPROBS})
"""Names of `NEEDS` offered by a host that gives only log-probs of sampled tokens of its model."""

_IN_ONE_PROCESS = frozenset({GRADIENTS, WHOLE})
_COLUMNS = frozenset({EXTERNAL, LOG_RATIOS, TARGETS})  # that only a loop of the caller's passes in

OFFERS = {
    "TRL": frozenset(NEEDS) - _COLUMNS,
    "TRL, FSDP": frozenset(NEEDS) - _COLUMNS - _IN_ONE_PROCESS,
    "TRL, AsyncGRPO": frozenset(NEEDS) - _COLUMNS - {ENTROPIES, SIBLINGS, REWARDS},
    "verl": OFFERED_BY_A_SERVICE | {ENTROPIES} | Sharded.capabilities,
    "verl, by log-prob requests": OFFERED_BY_A_SERVICE | {ENTROPIES},
    "OpenRLHF": OFFERED_BY_A_SERVICE,
    "prime-rl": OFFERED_BY_A_SERVICE,
    "your loop, `InProcess` or `PackedForward`": frozenset(NEEDS),
    "your loop, `Sharded`": frozenset(NEEDS) - _IN_ONE_PROCESS,
    "your loop, `LogprobService`": frozenset(NEEDS) - {DISTRIBUTIONS, MODEL} - _IN_ONE_PROCESS,
}
"""Names of `NEEDS` that each host offers; refusals and the table in docs/other_trainers.md derive from it."""

ONE_RATIO = "a completion has one ratio there, so that only the sum of its tokens' weights acts"


def obstacles(*cases: tuple[object, str]) -> list[str]:
    """Keep the sentences of the cases whose condition holds: an option with its value, a reason or a remedy."""
    return [sentence for holds, sentence in cases if holds]


def refuse(reasons: Iterable[str], what: str = "counterfactual credit") -> None:
    """Raise `NotImplementedError` that names all that `what` cannot be combined with, if there is anything."""
    if names := "; nor with ".join(reasons):
        raise NotImplementedError(f"{what} cannot be combined with {names}")


def unmet_needs(config: CounterfactualConfig, offers: Collection[str]) -> list[str]:
    """Name each thing that `config` needs and `offers`, names of `NEEDS`, lacks: the option, the need and a remedy."""
    return [_sentence(need, config, offers) for need in sorted(config.needs - set(offers))]


_INSTEAD = {
    EXTERNAL: "give a function (model, Batch) -> Importances for estimator",
    SIBLINGS: "sample more than one completion of each prompt",
    TARGETS: "take target='answer'",
}
"""Remedies for needs that another estimator would not remove."""


def _sentence(need: str, config: CounterfactualConfig, offers: Collection[str]) -> str:
    cause, instead = _option_that_needs(need, config.estimator), "omit it"
    if cause is None:
        cause = config.part_that_needs(need)
        able = [name for name, kind in ESTIMATORS.items() if kind().needs <= set(offers)]
        instead = _INSTEAD.get(need, f"take one of {', '.join(able)}")
    return f"{cause}: it needs {NEEDS[need]}, which this trainer does not give; {instead}"


def _option_that_needs(missing: str, estimator: Estimator) -> str | None:
    """Find the option of an estimator without which it would not need `missing`; None where it always does."""
    kind: Any = type(estimator)
    for entry in fields(kind):
        if (value := getattr(estimator, entry.name)) != entry.default:
            try:
                without: Any = replace(estimator, **{entry.name: entry.default})  # type: ignore[type-var]
            except ValueError:  # another option is read only together with this one
                continue
            if missing not in without.needs:
                return f"{entry.name}={value!r}"
    return None


def credit_rows(
    tokenizer: Any,
    rows: Rows,
    counted: Sequence[Tensor],
    advantages: Sequence[Tensor],
    access: ModelAccess,
    *,
    config: CounterfactualConfig,
    seed: Sequence[int],
    groups: Tensor,
    rewards: Tensor,
    entropies: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], dict[str, float]]:
    """Credit a batch whose model is in other processes.

    Args:
        tokenizer, rows, config, seed, groups, rewards: as in `counterfactual_credit`.
        counted: B tensors (T_b,), 1 on tokens that are trained on, 0 on others, such as a tool's, which are no answer
            and no unit.
        advantages: B tensors (T_b,), float; estimators get (B,) where each row has one value on the counted tokens.
        entropies: B tensors (T_b,), nats.

    Returns:
        B tensors (T_b,) to train on, of which tokens that do not count keep their advantages; and the figures to log.
    """
    advantages, masks = [row.cpu() for row in advantages], [row.cpu().bool() for row in counted]
    own = _row_advantages([row * mask for row, mask in zip(advantages, masks, strict=True)], masks)
    batch = Batch(rows, advantages=own, mask=masks, groups=groups, rewards=rewards)
    deferred = DeferredCredit(config, tokenizer, batch, seed=seed)
    deferred.by_model(access, entropies)
    credit = deferred.finished()
    assert credit is not None
    credited = credit.applied_to(own)
    whole = [
        torch.where(mask, row.to(before), before) for row, before, mask in zip(credited, advantages, masks, strict=True)
    ]
    return whole, credit.metrics(masks) | {"credit/seconds": deferred.seconds}


def _row_advantages(advantages: list[Tensor], masks: Sequence[Tensor]) -> Tensor | list[Tensor]:
    """Reduce advantages, 0 outside of `masks`, to (B,) if each row has one value inside; else keep them."""
    firsts = [row[mask][:1].sum() for row, mask in zip(advantages, masks, strict=True)]
    rows = zip(advantages, firsts, masks, strict=True)
    return torch.stack(firsts) if all(torch.equal(row, first * mask) for row, first, mask in rows) else advantages
