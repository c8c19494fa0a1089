"""Define the interface of estimators: what they take, return and declare."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..batch import Batch
from ..scoring.access import CAPABILITIES, ModelAccess
from ..scoring.masked import ScoringWork

ANSWER = "answer"
SIBLINGS = "siblings"
REWARDS = "rewards"
ENTROPIES = "entropies"
EXTERNAL = "external"
LOG_RATIOS = "log_ratios"
TARGETS = "targets"
NEEDS = CAPABILITIES | {
    ANSWER: "an answer in the completion",
    SIBLINGS: "several completions of one prompt",
    REWARDS: "the rewards of completions",
    ENTROPIES: "the entropy of each sampled token's distribution",
    EXTERNAL: "importances that the caller passes in",
    LOG_RATIOS: "log-probs of sampled tokens under the policy and under a reference",
    TARGETS: "gold answers that the caller passes in",
}
"""Needs that an estimator may have of a batch and a model, and what each means; a host declares which it offers."""


@dataclass(frozen=True)
class Importances:
    """Importances of the units of a batch."""

    values: list[Tensor]  # B tensors (K_b,) fp32 on the host, one per unit, high where the unit matters
    signed: bool = False  # values are added to the advantages of their units' tokens, instead of becoming weights
    base: Tensor | None = None  # (B,) fp32 log P(answer), nats, nan without an answer; None if it was not scored
    work: ScoringWork | None = None  # counts of what was fed; None for nothing
    change_of: Literal["logprob", "mean_logprob", "probability"] | None = None
    """Quantity of the answer whose changes the values are, from which their rounding follows; None for others."""
    details: dict[str, Any] | None = None  # further results by name


class Estimator:
    """Estimator of the importance of units: a frozen dataclass whose fields are its options."""

    name: ClassVar[str]  # what configurations call it
    default_units: ClassVar[str] = "spans"  # of the names that `CounterfactualConfig.units` takes
    weights: ClassVar[str | None] = "range"  # rule for its importances by default; None where they are signed
    # Properties where they depend on options.
    negative: ClassVar[bool] = False  # whether importances may be below 0
    needs: ClassVar[frozenset[str]] = frozenset()  # names of `NEEDS` that must be met
    continues: ClassVar[bool] = False  # whether its queries continue completions that a training forward has fed
    observes: ClassVar[bool] = False  # whether it scores a turn together with the observation that follows it
    on_device: ClassVar[bool] = False  # whether it may leave importances, with a base, where scores are
    is_reward: ClassVar[bool] = False  # whether high importances mean good units, also where the answer is wrong

    def __call__(self, access: ModelAccess, batch: Batch) -> Importances:
        """Score the units of a batch."""
        raise NotImplementedError


ESTIMATORS: dict[str, type[Estimator]] = {}
"""Estimators by name, filled by the package."""


@dataclass(frozen=True)
class OwnFunction(Estimator):
    """Estimator of the caller: a function (model, `Batch`) -> `Importances`.

    It gets every completion of the batch, whatever its advantage, and the access where the model is in other processes.
    """

    function: Callable[..., Importances]

    @property
    def name(self) -> str:  # type: ignore[override]
        """Return the function's own name."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, access: ModelAccess, batch: Batch) -> Importances:
        """Call the function."""
        return self.function(access if access.module is None else access.module, batch)


def unit_means(tokens: Sequence[Tensor], batch: Batch, rows: Sequence[int] | None = None) -> list[Tensor]:
    """Average token values (T_b,) of completions over each unit, (K_b,). `rows` are their rows; default all."""
    means = []
    for b, row in zip(range(len(batch)) if rows is None else rows, tokens, strict=True):
        sums = torch.cat([torch.zeros(1, dtype=torch.float64), row.detach().double().cpu().cumsum(0)])
        edges = torch.tensor([tuple(unit) for unit in batch.units[b]], dtype=torch.int64).reshape(-1, 2)
        means.append(((sums[edges[:, 1]] - sums[edges[:, 0]]) / (edges[:, 1] - edges[:, 0])).float())
    return means


def required(name: str, column: Any) -> Any:
    """Return a column that an estimator reads; raise `ValueError` naming it if it is None."""
    if column is None:
        raise ValueError(f"{name} is None, and the estimator reads it; pass {name}, or choose another estimator")
    return column
