"""Assign the credit of a batch, at once or from the training forward of each micro-batch, and keep it by row."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..batch import Batch
from ..model.limits import smallest_budget
from ..model.modes import evaluation_mode
from ..model.parts import causal_lm
from ..ops.kept_tokens import KeptTokens
from ..rows import Rows, row_numbers
from ..scoring.access import ModelAccess
from ..scoring.packed import PackedForward, packed_logprobs
from .assign import Credit, queue_credit
from .config import CounterfactualConfig
from .units import check_needed, credited_rows, written
from .weights import Gather, normalized_weights


class BatchKeys:
    """Keys of batches: the seed, the step and the number of earlier batches of that step.

    A resumed run makes the same keys. With the index of a row a key decides what is drawn for the row, in every host.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self._step, self._before = seed, -1, 0

    def key(self, step: int) -> tuple[int, int, int]:
        """Return the key of the next batch of `step`; call it once for each batch."""
        self._before = self._before + 1 if step == self._step else 0
        self._step = step
        return self.seed, step, self._before


class DeferredCredit:
    """Credit of the rows of a batch, of which `to_score` are to be scored; assigning it took `seconds`.

    If the estimator, a function of the caller's or `weights="top"` compares completions, they are the whole batch's,
    whatever forwards and processes it is split over. Credit is then assigned at once, by `by_model`.

    Args:
        config, tokenizer, seed, gather: as in `counterfactual_credit`.
        batch: rows with advantages and the columns that `counterfactual_credit` reads, except entropies. Its `weights`
            multiply those of credit before they are normalised.
        temperature: that of sampling, for entropies.
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
        check_needed(config, batch)
        self.config, self.tokenizer, self.batch, self.temperature = config, tokenizer, batch, temperature
        self.to_score = credited_rows(batch, config.completions)
        self.parts: list[tuple[list[int], Credit]] = []
        self.seconds = 0.0
        self._gather, self._seed, self._assigned, self._is_reported = gather, seed, set[int](), False
        self._queued: list[tuple[list[int], list[Tensor] | None, Callable[[], Credit]]] = []  # `parts` to be

    def is_due(self, rows: Sequence[int]) -> bool:
        """Whether any of `rows` has no credit yet."""
        return not self._assigned.issuperset(row_numbers(rows, len(self.batch)))

    def reads(self, rows: Sequence[int]) -> list[bool]:
        """Say of each of `rows` whether assigning credit reads a forward of it, to its end."""
        scored, rows = {*self.to_score}, row_numbers(rows, len(self.batch))
        return [b in scored or (self.config.compares and self.batch.rows.lengths[b] > 0) for b in rows]

    def compares_beyond(self, forwards: Sequence[Sequence[int]]) -> bool:
        """Whether credit compares completions that are in different `forwards`, each a list of rows."""
        if not self.config.compares_rows or self._gather is not None:
            return self.config.compares_rows
        others = {*range(len(self.batch))}.difference(*forwards)
        return len(forwards) > 1 or any(self.reads(sorted(others)))

    def by_forward(self, rows: Sequence[int], forward: PackedForward, *, queues: bool = False) -> None:
        """Assign credit to `rows` from their training forward, of `batch.rows.take(rows)`, which kept its states.

        If `queues`, weights may stay on the device until the credit is asked for (`read`); only `columns` gives them.
        If others are compared with them, credit is assigned to all rows, with the forward's model (`compares_beyond`).
        """
        if self.compares_beyond([rows]):
            return self.by_model(forward.model)

        def entropies(batch: Batch) -> Sequence[Tensor]:
            with torch.no_grad():
                values = forward.logprobs(self.temperature, return_entropy=True, kept_tokens=batch.kept_tokens)[1]
            return _whole(list(values), batch.rows)

        queues = queues and forward.device.type != "cpu" and self._gather is None and self.batch.weights is None
        self._assign(rows, forward, entropies, queues)

    def by_model(
        self, model: nn.Module | ModelAccess, entropies: Sequence[Tensor] | None = None,
        rows: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Assign credit to `rows`, default all, with `model`, and with their `entropies`, default computed with it."""
        rows = range(len(self.batch)) if rows is None else rows

        def computed(batch: Batch) -> Sequence[Tensor]:
            assert isinstance(model, nn.Module)
            if not len(batch):
                return []
            read = [i for i, some in enumerate(self.reads(rows)) if some] or [0]
            part = batch.take(read)
            values = token_entropies(
                model, part.rows, temperature=self.temperature, kept_tokens=part.kept_tokens,
                token_budget=smallest_budget(self.config.token_budget, batch.token_budget),
            )  # fmt: skip
            known = dict(zip(read, values, strict=True))
            return _whole([known.get(i, torch.zeros(0)) for i in range(len(batch))], batch.rows)

        self._assign(rows, model, computed if entropies is None else entropies)

    def _assign(
        self,
        rows: Sequence[int],
        model: nn.Module | ModelAccess,
        entropies: Sequence[Tensor] | Callable[[Batch], Sequence[Tensor]],
        queues: bool = False,
    ) -> None:
        began, rows = time.perf_counter(), row_numbers(rows, len(self.batch))
        batch = self.batch if rows == [*range(len(self.batch))] else self.batch.take(rows)
        if not callable(entropies):
            batch = batch.with_columns(entropies=entropies)
        elif self.config.reads_entropies and batch.entropies is None:
            batch = batch.with_columns(entropies=entropies(batch))
        weights, read = queue_credit(
            model, self.tokenizer, lambda: batch,
            config=self.config, seed=self._seed, gather=self._gather, queues=queues,
        )  # fmt: skip
        self._queued.append((rows, weights, read))
        self._assigned.update(rows)
        if weights is None:
            self.read()
        self.seconds += time.perf_counter() - began

    def read(self) -> None:
        """Read the scores that are queued, which waits for the device; raise what they call for, naming the row."""
        given = self.batch.weights
        while self._queued:
            rows, _, read = self._queued[0]
            credit = read()
            for i, factors in enumerate(given[b] for b in rows) if given else ():
                weights = credit.weights[i] * factors.to(credit.weights[i])
                is_scaled = self.config.normalize and credit.advantages is None and (factors != 1).any()
                mask = written(self.batch, rows[i])
                credit.weights[i] = normalized_weights(weights, mask) if is_scaled else weights
            self.parts.append((rows, credit))
            self._queued.pop(0)

    def take(self, rows: Sequence[int]) -> Credit:
        """Return the credit of `rows`, which must be assigned."""
        self.read()
        rows = row_numbers(rows, len(self.batch))
        whole = [credit for own, credit in self.parts if own == rows]  # as a micro-batch asks for its own
        return whole[0] if whole else Credit.joined(self.batch.rows.lengths, self.parts).take(rows)

    def columns(self, rows: Sequence[int]) -> dict[str, Any]:
        """Give the weights of `rows`, perhaps on the device, and the advantages that they multiply, or signed ones."""
        queued = [weights for own, weights, _ in self._queued if own == row_numbers(rows, len(self.batch))]
        if queued:
            return {"weights": queued[0], "advantages": self._advantages(rows)}
        credit = self.take(rows)
        return {"weights": credit.weights, "advantages": credit.advantages or self._advantages(rows)}

    def credited(self, rows: Sequence[int]) -> Tensor | list[Tensor]:
        """Return the advantages to train `rows` on: (b,) as given if credit changes nothing, else b tensors (T_b,)."""
        return self.take(rows).applied_to(self._advantages(rows))

    def _advantages(self, rows: Sequence[int]) -> Any:
        own, rows = self.batch.advantages, row_numbers(rows, len(self.batch))
        return own if own is None else own[rows] if isinstance(own, Tensor) else [own[b] for b in rows]

    def finished(self) -> Credit | None:
        """Join the credit of all rows, in their order, at the first call after all is assigned; else None."""
        if self._is_reported or self.is_due(range(len(self.batch))):
            return None
        self._is_reported = True
        return self.take(range(len(self.batch)))


def _whole(values: Sequence[Tensor], rows: Rows) -> list[Tensor]:
    """Extend values of the first tokens of `rows` by 0 to all of them: what was not computed is not read."""
    return [functional.pad(row, (0, length - len(row))) for row, length in zip(values, rows.lengths, strict=True)]


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
    options: dict[str, Any] = {"kept_tokens": kept_tokens, "token_budget": token_budget}
    with evaluation_mode(causal_lm(model)), torch.no_grad():
        _, entropies = packed_logprobs(model, rows, temperature=temperature, return_entropy=True, **options)
    return [row.cpu() for row in entropies]
