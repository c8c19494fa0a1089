"""Assign the credit of a batch, at once or from the training forward of each micro-batch, and keep it by row."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from ..batch import Batch
from ..model.limits import smallest_budget
from ..model.modes import evaluation_mode
from ..model.parts import causal_lm, input_device
from ..model.sharded.ranks import inside
from ..model.walk import ModelWalk
from ..ops.kept_tokens import KeptTokens
from ..rows import Rows, traces
from ..scoring.access import InProcess, ModelAccess
from ..scoring.packed import PackedForward, packed_logprobs, stands_alone
from ..tree.prefix_tree import Query
from .assign import Assignment, Credit, counterfactual_credit
from .config import CounterfactualConfig
from .units import check_advantages, check_needed, credited_rows, written
from .weights import Gather, normalized_weights

HOST_BOUND = 10_000
"""Completion tokens of a training forward up to which a GPU waits for its host to launch it.

Rows fed with such a forward fill that time. Behind a larger one the host has time to launch another, which needs no
backward: fed with it, the probes of half of 8 x 8 completions of 220 tokens lengthened an H200's update from 0.286 to
0.369 seconds.
"""


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

    If the estimator, a function of the caller's or `weights="top"` compares completions, or a rollout has several rows,
    they are the whole batch's, whatever forwards and processes it is split over. Credit is then assigned at once, by
    `by_model`.

    Args:
        config, tokenizer, seed: as in `counterfactual_credit`.
        batch: rows with advantages and the columns that `counterfactual_credit` reads, except entropies. Its `weights`
            multiply those of credit before they are normalised.
        gather: as in `counterfactual_credit`, where this process assigns credit to a part of the batch only.
        temperature: that of sampling, for entropies.

    Attributes:
        parts: the credit assigned so far, each with its rows.
        seconds: time that assigning credit took.
    """

    def __init__(
        self,
        config: CounterfactualConfig,
        tokenizer: Any,
        batch: Batch,
        *,
        seed: int | Sequence[int],
        temperature: float = 1.0,
        gather: Gather | None = None,
    ) -> None:
        self.config, self.tokenizer, self.batch, self.temperature = config, tokenizer, batch, temperature
        check_advantages(batch, config.completions)
        check_needed(config, batch)
        self._gather = gather
        self._to_judge = credited_rows(batch, config.completions)
        self.parts: list[tuple[list[int], Credit]] = []
        self.seconds = 0.0
        self._seed = seed
        self._assigned = set[int]()
        self._compares = config.compares_rows or bool(traces(batch.rows))  # of which a token has one credit
        self._is_reported = False
        self._prepared: tuple[list[int], Assignment] | None = None  # for the next forward, of these rows

    def is_due(self, rows: Sequence[int]) -> bool:
        """Whether any of `rows` has no credit yet."""
        return not self._assigned.issuperset(rows)

    def to_judge(self) -> list[int]:
        """List the rows to score, whether or not they have an answer and units."""
        return self._to_judge

    def reads(self, rows: Sequence[int]) -> list[bool]:
        """Say of each of `rows` whether assigning credit reads a forward of it, to its end."""
        judged = {*self._to_judge}
        return [b in judged or (self.config.compares and self.batch.rows.lengths[b] > 0) for b in rows]

    def compares_beyond(self, forwards: Sequence[Sequence[int]]) -> bool:
        """Whether credit compares completions that are in different `forwards`, each a list of rows."""
        if not self._compares or self._gather is not None:
            return self._compares
        others = {*range(len(self.batch))}.difference(*forwards)
        return len(forwards) > 1 or any(self.reads(sorted(others)))

    def foreseen(self, rows: Sequence[int], causal: PreTrainedModel) -> list[list[Query]] | None:
        """List for each of `rows` the queries that its forward can feed so that its credit needs no further forward.

        None for none, and where their backward costs more than another forward: on a CPU, and beyond `HOST_BOUND`. Call
        it before that forward. There no text is looked at yet: the device runs the forward meanwhile.
        """
        config, tokens = self.config, sum(self.batch.rows.lengths[b] for b in rows)
        if not (config.continues and config.estimator.foresees):
            return None
        if input_device(causal).type == "cpu" or tokens > HOST_BOUND:
            return None
        alone = inside(causal) is not None or stands_alone(ModelWalk.of(causal))
        if alone or self._compares or config.reads_entropies:
            return None
        began, rows = time.perf_counter(), list(rows)
        assignment = Assignment.of(self.config, InProcess(causal), self.tokenizer, self.batch.take(rows), self._seed)
        self._prepared, queries = (rows, assignment), assignment.foreseen()
        self.seconds += time.perf_counter() - began
        return queries

    def by_forward(self, rows: Sequence[int], forward: PackedForward) -> None:
        """Assign credit to `rows` from their training forward, of `batch.rows.take(rows)`, which kept its states.

        If others are compared with them, credit is assigned to all rows, with the forward's model (`compares_beyond`).
        """
        if self.compares_beyond([rows]):
            return self.by_model(forward.model)
        began = time.perf_counter()
        entropies = self._given("entropies", rows)
        if self.config.reads_entropies and entropies is None:
            kept = self._given("kept_tokens", rows)
            with torch.no_grad():
                values = list(forward.logprobs(self.temperature, return_entropy=True, kept_tokens=kept)[1])
            entropies = self._whole(rows, values)
        self._assign(rows, forward, entropies)
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
        rows = range(len(self.batch)) if rows is None else rows
        entropies = self._given("entropies", rows) if entropies is None else entropies
        if self.config.reads_entropies and entropies is None:
            assert isinstance(model, nn.Module)
            read = [b for b, some in zip(rows, self.reads(rows), strict=True) if some] or rows[:1]
            values = token_entropies(
                model, self.batch.rows.take(read), temperature=self.temperature,
                kept_tokens=self._given("kept_tokens", read),
                token_budget=smallest_budget(self.config.token_budget, self.batch.token_budget),
            )  # fmt: skip
            known = dict(zip(read, values, strict=True))
            entropies = self._whole(rows, [known.get(b, torch.zeros(0)) for b in rows])
        self._assign(rows, model, entropies)
        self.seconds += time.perf_counter() - began

    def _given(self, column: str, rows: Sequence[int]) -> list[Any] | None:
        """Return what the caller gave in a column for each of `rows`, if there is one."""
        own = getattr(self.batch, column)
        return None if own is None else [own[b] for b in rows]

    def _whole(self, rows: Sequence[int], values: Sequence[Tensor]) -> list[Tensor]:
        """Extend values of the first tokens of `rows` by 0 to all of them: what was not computed is not read."""
        return [
            functional.pad(row, (0, self.batch.rows.lengths[b] - len(row))) for b, row in zip(rows, values, strict=True)
        ]

    def _assign(self, rows: Sequence[int], model: nn.Module | ModelAccess, entropies: Sequence[Tensor] | None) -> None:
        rows = list(rows)
        batch = self.batch if rows == [*range(len(self.batch))] else self.batch.take(rows)
        (before, assignment), self._prepared = self._prepared or (None, None), None
        if assignment is not None and before == rows and isinstance(model, PackedForward):
            assignment.access = model
            credit = assignment.credit(assignment.estimate())
        else:
            credit = counterfactual_credit(
                model, self.tokenizer, batch, config=self.config, seed=self._seed, entropies=entropies,
                gather=self._gather,
            )  # fmt: skip
        for i, b in enumerate(rows if self.batch.weights is not None else ()):
            factors = self.batch.weights[b].to(credit.weights[i])  # type: ignore[index]
            weights = credit.weights[i] * factors
            own = written(self.batch, b)
            scaled = credit.advantages is None and weights[own].any()
            credit.weights[i] = normalized_weights(weights, self.config.normalize, own) if scaled else weights
        self.parts.append((rows, credit))
        self._assigned.update(rows)

    def take(self, rows: Sequence[int]) -> Credit:
        """Return the credit of `rows`, which must be assigned."""
        rows = list(rows)
        whole = [credit for own, credit in self.parts if own == rows]  # as a micro-batch asks for its own
        return whole[0] if whole else Credit.joined(self.batch.rows.lengths, self.parts).take(rows)

    def columns(self, rows: Sequence[int]) -> dict[str, Any]:
        """Give the weights of `rows` and the advantages that they multiply, or those of signed credit."""
        credit = self.take(rows)
        return {"weights": credit.weights, "advantages": credit.advantages or self.batch.take(rows).advantages}

    def credited(self, rows: Sequence[int]) -> Tensor | list[Tensor]:
        """Return the advantages to train `rows` on: (b,) as given if credit changes nothing, else b tensors (T_b,)."""
        return self.take(rows).applied_to(self.batch.take(rows).advantages)

    def finished(self) -> Credit | None:
        """Join the credit of all rows, in their order, at the first call after all is assigned; else None."""
        if self._is_reported or self.is_due(range(len(self.batch))):
            return None
        self._is_reported = True
        return self.take(range(len(self.batch)))


def token_entropies(
    model: nn.Module,
    rows: Rows,
    *,
    temperature: float = 1.0,
    kept_tokens: Sequence[KeptTokens] | None = None,
    token_budget: int | None = None,
) -> list[Tensor]:
    """Compute the entropy (nats) that each token was drawn with, B tensors (T_b,) on the host, in evaluation mode.

    Arguments as in `packed_logprobs`.
    """
    with evaluation_mode(causal_lm(model)), torch.no_grad():
        _, entropies = packed_logprobs(
            model,
            rows,
            temperature=temperature,
            return_entropy=True,
            kept_tokens=kept_tokens,
            token_budget=token_budget,
        )
    return [row.cpu() for row in entropies]
