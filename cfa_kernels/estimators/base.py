"""Interface of estimators: what they take, return and declare."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from ..scoring.access import CAPABILITIES, MODEL, ModelAccess
from ..scoring.batch import ScoredBatch
from ..scoring.masked import ScoringWork

ANSWER = "answer"
SIBLINGS = "siblings"
REWARDS = "rewards"
ENTROPIES = "entropies"
EXTERNAL = "external"
NEEDS = CAPABILITIES | {
    ANSWER: "an answer in the completion",
    SIBLINGS: "several completions of one prompt",
    REWARDS: "the rewards of completions",
    ENTROPIES: "the entropy of each sampled token's distribution",
    EXTERNAL: "importances that the caller passes in",
}
"""What an estimator may need of a batch and of a model, in words; a host says which of them it offers."""


@dataclass(frozen=True)
class Importances:
    """Importances of the units of a batch.

    Attributes:
        values: B tensors (K_b,) fp32 on the host, one per unit in the batch's order, high where the unit matters.
        signed: the values are added to the advantages of their units' tokens, instead of becoming weights.
        base: (B,) fp32 log P(answer), nats, nan where there is no answer; None where answers were not scored.
        work: what was fed for them; None for nothing.
        change_of: what of the answer the values are changes of, by which their rounding is known: its "logprob", its
            "mean_logprob", or the "probability" by that mean; None for all else.
        details: what else was found, by name; each estimator's docstring says what.
    """

    values: list[Tensor]
    signed: bool = False
    base: Tensor | None = None
    work: ScoringWork | None = None
    change_of: Literal["logprob", "mean_logprob", "probability"] | None = None
    details: dict[str, Any] | None = None


class Estimator(Protocol):
    """A way to find the importance of units: a frozen dataclass whose fields are its options.

    Attributes:
        name: what configurations call it.
        judges: what it judges unless told otherwise, "spans" or "tokens".
        weights: how its importances become weights unless told otherwise; None where they are signed.
        needs: of `NEEDS`, what it cannot do without; may depend on its options.
        continues: whether what it asks continues completions that a training forward has fed already.
    """

    name: ClassVar[str]
    judges: ClassVar[str]
    weights: ClassVar[str | None]

    @property
    def negative(self) -> bool:
        """Whether importances may be below 0."""
        ...

    @property
    def needs(self) -> frozenset[str]:
        """Needs, of `NEEDS`, that must be met."""
        ...

    @property
    def continues(self) -> bool:
        """Whether it continues completions that are fed already."""
        ...

    def __call__(self, access: ModelAccess, batch: ScoredBatch) -> Importances:
        """Judge the units of a batch."""
        ...


@dataclass(frozen=True)
class OwnFunction:
    """A caller's own estimator: a function (model, `ScoredBatch`) -> `Importances`.

    It is given every completion of the batch, whatever its advantage. Where the model is in other processes, it is
    given the access that answers for it: `access.score(replace(batch, placeholder_id=0))`.
    """

    function: Callable[..., Importances]

    judges: ClassVar[str] = "spans"
    weights: ClassVar[str | None] = "range"
    needs: ClassVar[frozenset[str]] = frozenset()
    negative: ClassVar[bool] = False  # that is for its weights to find out
    continues: ClassVar[bool] = False

    @property
    def name(self) -> str:  # type: ignore[override]
        """The function's own name."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, access: ModelAccess, batch: ScoredBatch) -> Importances:
        """Call the function."""
        return self.function(access.module if MODEL in access.capabilities else access, batch)


def unit_means(tokens: Sequence[Tensor], batch: ScoredBatch, rows: Sequence[int] | None = None) -> list[Tensor]:
    """Average values of tokens, (T_b,) a completion, over each unit: (K_b,). `rows` are their places; default all."""
    means = []
    for b, row in zip(range(len(batch)) if rows is None else rows, tokens, strict=True):
        if row.shape != (batch.lengths[b],):
            raise ValueError(
                f"row {batch.numbers[b]}: needs a number for each of {batch.lengths[b]} tokens, got {tuple(row.shape)}"
            )
        sums = torch.cat([torch.zeros(1, dtype=torch.float64), row.detach().double().cpu().cumsum(0)])
        edges = torch.tensor([tuple(unit) for unit in batch.units[b]], dtype=torch.int64).reshape(-1, 2)
        means.append(((sums[edges[:, 1]] - sums[edges[:, 0]]) / (edges[:, 1] - edges[:, 0])).float())
    return means


def given(name: str, column: Any) -> Any:
    """Take a column of the batch that an estimator reads; raise `ValueError` naming it if it was not given."""
    if column is None:
        raise ValueError(f"{name} must be given to an estimator that reads them, got None")
    return column
