"""Credit one generation batch of TRL: with the model, at once, or from the training forward of each micro-batch.

A training forward has fed the completions already, so only masked branches are fed for credit. `trl.py` decides which
way is taken; nothing here imports TRL.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import CounterfactualConfig, Credit, counterfactual_credit
from ..estimators.base import ENTROPIES, OwnFunction
from ..scoring.access import CAPABILITIES, ModelAccess, TrainingForward
from ..scoring.training_forward import PackedForward
from .credit import credited_advantages, padded_entropies, token_entropies, weighed_text

ROW = "credit_row"
"""Name, among the inputs of the loss, of the (b,) places of a micro-batch's rows in their generation batch."""


def asks_model(config: CounterfactualConfig) -> bool:
    """Whether assigning credit feeds anything to the model."""
    return bool(config.needs & {*CAPABILITIES, ENTROPIES}) or isinstance(config.estimator, OwnFunction)


def why_at_once(config: CounterfactualConfig, micro_batches: int, one_update: bool) -> str | None:
    """Say why credit cannot be assigned from training forwards; None if it can.

    Args:
        config: how credit is to be assigned.
        micro_batches: into how many training forwards a generation batch is split.
        one_update: whether the policy changes only after all of them.
    """
    if not (config.continues or config.reads_entropies):
        return f"{config.asked_for} reads nothing that a training forward has fed"
    if not one_update:
        return (
            "the policy changes between training forwards over one generation batch (gradient_accumulation_steps is no "
            "multiple of steps_per_generation * num_iterations), and credit is that of the policy before"
        )
    if config.control == "random":
        return "control='random' draws for one completion after the other, in the order of the generation batch"
    if micro_batches > 1 and config.compares_rows:
        return (
            f"{config.asked_for} with weights={getattr(config.weights, 'name', None)!r} compares completions of the "
            f"whole generation batch, and training forwards hold a {micro_batches}th of it each (steps_per_generation)"
        )
    return None


class BatchCredit:
    """Credit of one process's share of a generation batch.

    Args:
        config, tokenizer: as in `counterfactual_credit`.
        output: TRL's batch of B completions of T tokens at most.
        rewards: (B,); nan where no function gave any, which leaves the completion out.
        generator: source of draws, on the CPU. Each micro-batch draws from its present state, so that an estimator
            which takes one seed takes the same for all of them.
        temperature: that of sampling, for entropies.
    """

    def __init__(
        self,
        config: CounterfactualConfig,
        tokenizer: Any,
        output: Mapping[str, Any],
        rewards: Tensor,
        *,
        generator: torch.Generator,
        temperature: float,
    ) -> None:
        self.config, self.tokenizer, self.temperature = config, tokenizer, temperature
        self.seconds = 0.0
        self.loss_mask = loss_mask(output).cpu()
        self._completion_mask = output["completion_mask"].cpu()
        known = (~rewards.isnan()).cpu()  # others have no advantage and are not siblings
        names = ("prompt_ids", "prompt_mask", "completion_ids", "advantages")
        self._columns = {name: output[name].cpu() for name in names} | {
            "completion_mask": self._completion_mask * known[:, None],
            "rewards": rewards.cpu(),
        }
        self._state = generator.get_state()
        self._parts: list[tuple[list[int], Credit]] = []
        self._credited: dict[tuple[int, ...], Tensor] = {}
        self._is_reported = False

    def by_model(self, model: nn.Module) -> Tensor:
        """Assign credit to all completions with `model`; return the advantages to train on, (B,) or (B, T)."""
        entropies = None
        if self.config.reads_entropies:
            names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
            given = {name: self._columns[name] for name in names}
            budget = self.config.token_budget
            entropies = token_entropies(model, **given, temperature=self.temperature, token_budget=budget)  # type: ignore[arg-type]
        return self._assign(torch.arange(len(self.loss_mask)), model, entropies)

    def is_due(self, rows: Tensor) -> bool:
        """Whether the completions `rows`, (b,) places in the batch, have no credit yet."""
        return tuple(rows.tolist()) not in self._credited

    def reads(self, rows: Tensor) -> list[bool]:
        """Say of each of the completions `rows`, (b,), whether assigning credit reads a forward of it, to its end."""
        rows = rows.cpu()
        has_advantage = self._columns["advantages"][rows].reshape(len(rows), -1).any(1)
        return (self._columns["completion_mask"][rows].any(1) & (has_advantage | self.config.compares)).tolist()

    def by_forward(self, rows: Tensor, forward: PackedForward) -> None:
        """Assign credit to the completions `rows`, (b,), from their training forward, which kept its states."""
        began = time.perf_counter()
        entropies = None
        if self.config.reads_entropies:
            with torch.no_grad():
                _, found = forward.logprobs(self.temperature, return_entropy=True)
            assert isinstance(found, list)
            entropies = padded_entropies(found, (len(rows), self.loss_mask.shape[1]))
        self._assign(rows.cpu(), TrainingForward(forward), entropies)
        self.seconds += time.perf_counter() - began

    def advantages(self, rows: Tensor) -> Tensor:
        """Look up the advantages that the completions `rows`, (b,), are trained on: (b,) or (b, T), on the host."""
        return self._credited[tuple(rows.tolist())]

    def _assign(self, rows: Tensor, model: nn.Module | ModelAccess, entropies: Tensor | None) -> Tensor:
        part = {name: column[rows] for name, column in self._columns.items()}
        generator = torch.Generator()
        generator.set_state(self._state)
        credit = counterfactual_credit(
            model, self.tokenizer, config=self.config, generator=generator, entropies=entropies, **part
        )
        self._parts.append((rows.tolist(), credit))
        self._credited[tuple(rows.tolist())] = credited_advantages(part["advantages"], credit)
        return self.advantages(rows)

    def finished(self) -> Credit | None:
        """Put the credit of all completions together, in their order, once all are assigned; None before and again."""
        if self._is_reported or sum(len(rows) for rows, _ in self._parts) < len(self.loss_mask):
            return None
        self._is_reported = True
        return Credit.of_parts(self.loss_mask.shape, self._parts)

    def weighed(self, credit: Credit) -> list[str]:
        """Describe the weighed tokens of each completion, with weights or, for signed credit, advantages."""
        plain = torch.ones(len(credit.weights)) if credit.advantages is None else self._columns["advantages"]
        values = credit.weights if credit.advantages is None else credit.advantages
        real, ids = self._completion_mask.bool(), self._columns["completion_ids"]
        return [
            weighed_text(self.tokenizer, tokens[kept], row[kept], float(usual))
            for tokens, kept, row, usual in zip(ids, real, values, plain, strict=True)
        ]

    def why_nothing(self, credit: Credit) -> str | None:
        """Explain why no completion with an advantage got credit; None if one did, or none was due."""
        due = (self._columns["advantages"] != 0).nonzero().flatten().tolist()
        if not due or not self.config.runs_estimator or any(credit.spans):
            return None
        if any(answer is not None for answer in credit.answers):
            reason = "answers were found, but no span before them; see CounterfactualConfig's detector and units"
        else:
            ids = self._columns["completion_ids"][due[0]][self._completion_mask[due[0]].bool()]
            own = self.config.answers.answer_format
            looked = (
                "Answers are read after ####, in \\boxed{} and after words such as 'the answer is'; for others give "
                "CounterfactualConfig(answer_format=...) or answer_fallback='last_number'"
                if own is None
                else f"Only answer_format={own!r} says what is one"
            )
            ends = self.tokenizer.decode(ids)[-60:]
            reason = f"no answer was found. {looked}. The first of these completions ends with {ends!r}"
        return f"credit/scored_fraction is 0: of {len(due)} completions with an advantage none was judged: {reason}"


def loss_mask(inputs: Mapping[str, Any]) -> Tensor:
    """Return what the loss counts of TRL's completions, (B, T): not a tool's tokens."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
