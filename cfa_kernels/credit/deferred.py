"""Assign the credit of a batch, at once or from the training forward of each micro-batch, and keep it by row."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from ..model.modes import evaluation_mode
from ..model.parts import causal_lm, input_device
from ..model.sharded.ranks import inside
from ..model.walk import ModelWalk
from ..rows import Rows, check_columns, check_floating
from ..scoring.access import InProcess, ModelAccess, TrainingForward
from ..scoring.packed import PackedForward, packed_logprobs, stands_alone
from ..tree.prefix_tree import Query
from .assign import Assignment, Credit, counterfactual_credit
from .config import CounterfactualConfig
from .units import CreditInputs
from .weights import Gather, normalized_weights


class Draws:
    """Keys of draws, one per batch: the seed, the step and the number of earlier batches of that step.

    A resumed run makes the same keys. With the index of a row a key decides the row's draws, in every host and on any
    number of processes.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self._step, self._before = seed, -1, 0

    def key(self, step: int) -> tuple[int, int, int]:
        """Return the key of the next batch of `step`; call it once for each batch."""
        self._before = self._before + 1 if step == self._step else 0
        self._step = step
        return self.seed, step, self._before


class DeferredCredit:
    """Credit of the rows of a batch.

    Where completions are compared, by the estimator, a function of the caller's or `weights="top"`, they are those of
    the whole batch, whatever forwards and processes it is split over: credit is then assigned at once, by `by_model`.

    Args:
        config, tokenizer, rows, advantages, seed, groups, rewards: as in `counterfactual_credit`.
        mask: B tensors (T_b,), 1 on tokens that the policy wrote and the loss counts; default all.
        gather: as in `counterfactual_credit`, where this process assigns credit to a part of the batch only.
        factors: B tensors (T_b,), by which weights are multiplied before they are normalised; default 1.
        temperature: that of sampling, for entropies.

    Attributes:
        parts: the credit assigned so far, each with its rows.
        seconds: time that assigning credit took.
    """

    def __init__(
        self,
        config: CounterfactualConfig,
        tokenizer: Any,
        rows: Rows,
        advantages: Tensor | Sequence[Tensor],
        *,
        seed: int | Sequence[int],
        groups: Tensor | None = None,
        rewards: Tensor | Sequence[float] | None = None,
        mask: Sequence[Tensor] | None = None,
        factors: Sequence[Tensor] | None = None,
        temperature: float = 1.0,
        gather: Gather | None = None,
    ) -> None:
        self.config, self.tokenizer, self.rows, self.temperature = config, tokenizer, rows, temperature
        inputs = CreditInputs.of(
            rows, advantages, credited_rows=config.completions, groups=groups, rewards=rewards, mask=mask
        )
        self.advantages: Any = inputs.advantages
        self.mask, self.factors, self._gather = inputs.mask, factors, gather
        self._to_judge = inputs.credited
        self.parts: list[tuple[list[int], Credit]] = []
        self.seconds = 0.0
        self._seed = seed
        self._columns = {name: getattr(inputs, name) for name in ("advantages", "groups", "rewards", "mask")}
        self._place: dict[int, tuple[Credit, int]] = {}  # by row, its credit and its place there
        self._is_reported = False
        self._prepared: tuple[list[int], Assignment] | None = None  # for the next forward, of these rows

    def is_due(self, rows: Sequence[int]) -> bool:
        """Whether any of `rows` has no credit yet."""
        return any(b not in self._place for b in rows)

    def to_judge(self) -> list[int]:
        """List the rows that are to be judged, whether or not they have an answer and units."""
        return self._to_judge

    def reads(self, rows: Sequence[int]) -> list[bool]:
        """Say of each of `rows` whether assigning credit reads a forward of it, to its end."""
        judged = {*self._to_judge}
        return [b in judged or (self.config.compares and self.rows.lengths[b] > 0) for b in rows]

    def compares_beyond(self, forwards: Sequence[Sequence[int]]) -> bool:
        """Whether completions are compared that no single one of the `forwards`, each of some rows, has all of."""
        if not self.config.compares_rows or self._gather is not None:
            return self.config.compares_rows
        others = {*range(len(self.rows))}.difference(*forwards)
        return len(forwards) > 1 or any(self.reads(sorted(others)))

    def foreseen(self, rows: Sequence[int], causal: PreTrainedModel) -> list[list[Query]] | None:
        """List for each of `rows` the queries that its forward can feed so that its credit needs no forward of its own.

        None for none, and on a CPU, where their backward costs more than another forward. Call it before that forward.
        For an estimator that foresees none no text is looked at yet: the device runs the forward meanwhile.
        """
        config = self.config
        if input_device(causal).type == "cpu" or not (config.continues and config.estimator.foresees):
            return None
        alone = inside(causal) is not None or stands_alone(ModelWalk.of(causal))
        if alone or config.compares_rows or config.reads_entropies:
            return None
        began, rows = time.perf_counter(), list(rows)
        columns = {name: None if column is None else _some(column, rows) for name, column in self._columns.items()}
        inputs = CreditInputs.of(self.rows.take(rows), credited_rows=self.config.completions, **columns)
        assignment = Assignment.of(self.config, InProcess(causal), self.tokenizer, inputs, self._seed)
        self._prepared, queries = (rows, assignment), assignment.foreseen()
        self.seconds += time.perf_counter() - began
        return queries

    def by_forward(self, rows: Sequence[int], forward: PackedForward) -> None:
        """Assign credit to `rows` from their training forward, of `self.rows.take(rows)`, which kept its states.

        If others are compared with them, credit is assigned to all rows, with the forward's model (`compares_beyond`).
        """
        if self.compares_beyond([rows]):
            return self.by_model(forward.causal)
        began = time.perf_counter()
        entropies: Sequence[Tensor] | None = None
        if self.config.reads_entropies:
            with torch.no_grad():
                values = list(forward.logprobs(self.temperature, return_entropy=True)[1])
            entropies = self._whole(rows, values)
        self._assign(rows, TrainingForward(forward), entropies)
        self.seconds += time.perf_counter() - began

    def by_model(
        self,
        model: nn.Module | ModelAccess,
        entropies: Sequence[Tensor] | None = None,
        rows: Sequence[int] | None = None,
    ) -> None:
        """Assign credit to `rows`, default all, with `model`.

        `entropies`, one row for each of `rows`, are computed with the model if they are read and not given.
        """
        began = time.perf_counter()
        rows = range(len(self.rows)) if rows is None else rows
        if self.config.reads_entropies and entropies is None:
            assert isinstance(model, nn.Module)
            read = [b for b, some in zip(rows, self.reads(rows), strict=True) if some] or rows[:1]
            values = token_entropies(
                model, self.rows.take(read), temperature=self.temperature, token_budget=self.config.token_budget
            )
            known = dict(zip(read, values, strict=True))
            entropies = self._whole(rows, [known.get(b, torch.zeros(0)) for b in rows])
        self._assign(rows, model, entropies)
        self.seconds += time.perf_counter() - began

    def _whole(self, rows: Sequence[int], values: Sequence[Tensor]) -> list[Tensor]:
        """Extend values of the first tokens of `rows` by 0 to all of them: what was not computed is not read."""
        return [functional.pad(row, (0, self.rows.lengths[b] - len(row))) for b, row in zip(rows, values, strict=True)]

    def _assign(self, rows: Sequence[int], model: nn.Module | ModelAccess, entropies: Sequence[Tensor] | None) -> None:
        rows = list(rows)
        (before, assignment), self._prepared = self._prepared or (None, None), None
        if assignment is not None and before == rows and isinstance(model, TrainingForward):
            assignment.access = model
            credit = assignment.credit(assignment.estimate())
        else:
            some = model.forward.rows if isinstance(model, TrainingForward) else self.rows.take(rows)
            columns = {name: None if column is None else _some(column, rows) for name, column in self._columns.items()}
            credit = counterfactual_credit(
                model, self.tokenizer, some, config=self.config, seed=self._seed, entropies=entropies,
                gather=self._gather, **columns,
            )  # fmt: skip
        for i, b in enumerate(rows if self.factors is not None else ()):
            factors = self.factors[b].to(credit.weights[i])  # type: ignore[index]
            weights = credit.weights[i] * factors
            # Weights that remain are normalised if some were taken away; if none remain, there is no credit.
            partly = not factors.all() and weights.any()
            own = None if self.mask is None else self.mask[b]
            credit.weights[i] = normalized_weights(weights, self.config.normalize, own) if partly else weights
        self.parts.append((rows, credit))
        self._place |= {b: (credit, i) for i, b in enumerate(rows)}

    def weights(self, rows: Sequence[int]) -> list[Tensor]:
        """Return the weights (T_b,) of `rows`, which must have credit."""
        return [self._place[b][0].weights[self._place[b][1]] for b in rows]

    def signed(self, rows: Sequence[int]) -> Tensor | list[Tensor]:
        """Return the advantages of `rows` that weights multiply: the caller's or, for signed credit, its own."""
        places = [self._place[b] for b in rows]
        if any(credit.advantages is not None for credit, _ in places):
            return [credit.advantages[i] for credit, i in places]  # type: ignore[index]
        return _some(self.advantages, rows)

    def credited(self, rows: Sequence[int]) -> Tensor | list[Tensor]:
        """Return the advantages to train `rows` on: (b,) as given if credit changes nothing, else b tensors (T_b,)."""
        return multiplied(self.signed(rows), self.weights(rows))

    def finished(self) -> Credit | None:
        """Join the credit of all rows, in their order, at the first call after all is assigned; else None."""
        if self._is_reported or self.is_due(range(len(self.rows))):
            return None
        self._is_reported = True
        return Credit.joined(self.rows.lengths, self.parts)


def _some(column: Tensor | Sequence[Tensor], rows: Sequence[int]) -> Any:
    return column[list(rows)] if isinstance(column, Tensor) else [column[b] for b in rows]


def multiplied(advantages: Tensor | Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor | list[Tensor]:
    """Multiply advantages, (B,) or B tensors (T_b,), by weights (T_b,); as they are if every weight is 1."""
    # As weighing each token's clipped loss: min(r * A, clip(r) * A) * w = min(r * A * w, clip(r) * A * w) for w >= 0.
    if isinstance(advantages, Tensor) and all((row == 1).all() for row in weights):
        return advantages
    return [own * row.to(own) for own, row in zip(advantages, weights, strict=True)]


def credited_advantages(advantages: Tensor | Sequence[Tensor], credit: Credit) -> Tensor | list[Tensor]:
    """Multiply `advantages`, (B,) or B tensors (T_b,), by the weights, or replace them by signed credit; same dtype.

    Returns B tensors (T_b,), or `advantages` as they are if every weight is 1. Raises `ValueError` for a dtype that is
    not floating point.
    """
    check_columns(credit.weights, advantages=advantages)
    check_floating("advantages", advantages)
    if credit.advantages is None:
        return multiplied(advantages, credit.weights)
    signed = zip(credit.advantages, credit.weights, advantages, strict=True)
    return [(row * weights).to(own) for row, weights, own in signed]


def token_entropies(
    model: nn.Module, rows: Rows, *, temperature: float = 1.0, token_budget: int | None = None
) -> list[Tensor]:
    """Compute the entropy (nats) that each token was drawn with, B tensors (T_b,) on the host, in evaluation mode.

    Arguments as in `packed_logprobs`.
    """
    with evaluation_mode(causal_lm(model)), torch.no_grad():
        _, entropies = packed_logprobs(
            model, rows, temperature=temperature, return_entropy=True, token_budget=token_budget
        )
    return [row.cpu() for row in entropies]
