"""Collect all methods that say which lines or tokens of a completion matter, behind one signature.

A method sees token ids, units and the model, never the truth.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.evidence.cases import Case
from benchmarks.evidence.models import Subject
from cfa_kernels import CounterfactualScores, Importances, ScoredBatch, ScoringWork, Span, score_counterfactuals
from cfa_kernels.estimators.gradient import Gradient
from cfa_kernels.estimators.masking import top_units
from cfa_kernels.estimators.prefix_gain import prefix_gain
from cfa_kernels.estimators.siblings import prefix_tree_values, sibling_edits
from cfa_kernels.estimators.total_effects import total_effects
from cfa_kernels.scoring.access import InProcess
from trainer.rewards.numbers import final_number
from trainer.rollouts import generate


class Siblings(NamedTuple):
    """Completions sampled for the prompts of a question, one prompt after the other, and whether each is right."""

    completions: list[list[int]]
    right: list[bool]


@dataclass(frozen=True)
class Question:
    """Question to a method: how much does each unit of these completions matter?

    Attributes:
        cases: B completions.
        gold: B right answers.
        seed: of whatever the method draws; differs from batch to batch.
        room: most tokens of a sampled sibling.
        siblings: gives the siblings of its cases; they may be known already.
    """

    subject: Subject
    cases: Sequence[Case]
    gold: Sequence[int]
    seed: int
    room: int
    siblings: Callable[["Question"], Siblings]

    @property
    def prompts(self) -> list[Tensor]:
        return [case.prompt for case in self.cases]

    @property
    def completions(self) -> list[Tensor]:
        return [case.completion for case in self.cases]

    @property
    def units(self) -> list[list[Span]]:
        return [case.units for case in self.cases]

    @property
    def answers(self) -> list[Span]:
        return [case.answer for case in self.cases]

    @property
    def placeholder(self) -> int:
        return self.subject.tokenizer.pad_token_id

    @property
    def access(self) -> InProcess:
        return InProcess(self.subject.model)

    def batch(self) -> ScoredBatch:
        batch = ScoredBatch.of(
            self.access.model, self.prompts, self.completions, self.units, self.answers,
            placeholder_id=self.placeholder,
        )  # fmt: skip
        return replace(
            batch,
            reasoning_ends=[self.cases[b].reasoning_end for b in batch.numbers],
            generator=torch.Generator().manual_seed(self.seed),
        )


class Found(NamedTuple):
    """B tensors (K_b,), high = matters, and the tokens that were fed for them (sampled ones included)."""

    values: list[Tensor]
    tokens_fed: int


@dataclass(frozen=True)
class Method:
    """Method that finds importances.

    Attributes:
        run: does it.
        siblings: it reads sampled siblings. It is asked about lines only, and of a model that solves something.
        approximates: the method that it stands in for.
        costly: a forward's worth of tokens per token; it judges fewer problems.
    """

    run: Callable[[Question], Found]
    siblings: bool = False
    approximates: str | None = None
    costly: bool = False


# --- Controls: what numbers say that know nothing of the model --------------------------------------------------


def _position(question: Question) -> Found:
    return Found([torch.arange(len(case.units)).float() for case in question.cases], 0)


def _length(question: Question) -> Found:
    return Found([torch.tensor([float(end - start) for start, end in case.units]) for case in question.cases], 0)


# --- Masking ----------------------------------------------------------------------------------------------------


def _masking(outcome: str) -> Callable[[Question], Found]:
    def run(question: Question) -> Found:
        options = {} if outcome == "logprob" else {"outcome": outcome}
        scores = score_counterfactuals(
            question.subject.model, question.prompts, question.completions, question.units, question.answers,
            placeholder_id=question.placeholder, **options,
        )  # fmt: skip
        return _found([-drop for drop in scores.drop], scores.work)

    return run


def _total_effect(question: Question) -> Found:
    """Mask, with effects that pass through later units."""
    batch = question.batch()
    return _ordered(batch, total_effects(question.access, batch))


def _masked_tokens(outcome: str) -> Callable[[Question], Found]:
    """Mask every token by itself, as OAR-P does; a unit's importance is the mean over its tokens."""

    def run(question: Question) -> Found:
        found = _masking(outcome)(replace(question, cases=[case.by_token() for case in question.cases]))
        return Found(_unit_means(found.values, question.units), found.tokens_fed)

    return run


def _masked_rest(question: Question) -> Found:
    """The reasoning masked from each unit on; a unit's importance is what the answer gains when it is shown too."""
    spans = [[Span(start, case.reasoning_end) for start in case.boundaries[:-1]] for case in question.cases]
    scores = score_counterfactuals(
        question.subject.model, question.prompts, question.completions, spans, question.answers,
        placeholder_id=question.placeholder,
    )  # fmt: skip
    values = [torch.cat([row, base[None]]).diff() for row, base in zip(scores.masked, scores.base, strict=True)]
    return _found(values, scores.work)


# --- Probes, gradients, entropy ---------------------------------------------------------------------------------


def _prefix_gain(measure: str) -> Callable[[Question], Found]:
    def run(question: Question) -> Found:
        batch = question.batch()
        return _ordered(batch, prefix_gain(question.access, batch, measure=measure))

    return run


def _gradient(outcome: str, sigma: float, samples: int = 1) -> Callable[[Question], Found]:
    def run(question: Question) -> Found:
        batch = question.batch()
        found = Gradient(outcome, sigma, samples)(question.access, batch)
        return _ordered(batch, found)

    return run


@torch.no_grad()
def _entropy(question: Question) -> Found:
    """Entropy of the distribution that each token was drawn from; a unit's is the mean over its tokens."""
    entropies, fed = [], 0
    for case in question.cases:
        ids = torch.cat([case.prompt, case.completion])
        rows = question.subject.model(input_ids=ids[None]).logits[0, len(case.prompt) - 1 : -1].float()
        entropies.append(torch.distributions.Categorical(logits=rows).entropy())
        fed += len(ids)
    return Found(_unit_means(entropies, question.units), fed)


# --- Approximations of masking ----------------------------------------------------------------------------------


def _preselected(
    cheap: Callable[[Question], Found], share: float, *, tokens: str | None = None
) -> Callable[[Question], Found]:
    """Only the top share by a cheap estimate is masked: of the units, or of all tokens with the outcome `tokens`."""

    def run(question: Question) -> Found:
        judged = replace(question, cases=[case.by_token() for case in question.cases]) if tokens else question
        first = cheap(judged)
        chosen = [top_units(row.abs(), share) for row in first.values]
        cases = [
            replace(case, units=[case.units[k] for k in row]) for case, row in zip(judged.cases, chosen, strict=True)
        ]
        found = _masking(tokens or "logprob")(replace(judged, cases=cases))
        values = [torch.zeros(len(row)) for row in judged.units]
        for row, numbers, importances in zip(values, chosen, found.values, strict=True):
            row[numbers] = importances
        values = _unit_means(values, question.units) if tokens else values
        return Found(values, first.tokens_fed + found.tokens_fed)

    return run


def _runs(length: int, outcome: str) -> Callable[[Question], Found]:
    """Runs of tokens masked together, in place of single ones."""

    def run(question: Question) -> Found:
        runs = [
            [Span(first, min(first + length, case.reasoning_end)) for first in range(0, case.reasoning_end, length)]
            for case in question.cases
        ]
        cases = [replace(case, units=units) for case, units in zip(question.cases, runs, strict=True)]
        found = _masking(outcome)(replace(question, cases=cases))
        rows = [
            row.repeat_interleave(torch.tensor([end - start for start, end in units]))
            for row, units in zip(found.values, runs, strict=True)
        ]
        return Found(_unit_means(rows, question.units), found.tokens_fed)

    return run


# --- What siblings say ------------------------------------------------------------------------------------------

GROUP = 8


def siblings(question: Question) -> Siblings:
    """Seven completions of each prompt, sampled at temperature 1."""
    prompts = [case.prompt.tolist() for case in question.cases for _ in range(GROUP - 1)]
    keys = [(question.seed, b, g) for b in range(len(question.cases)) for g in range(GROUP - 1)]
    sampled = generate(
        question.subject.model, question.subject.tokenizer, prompts, max_completion_length=question.room, keys=keys
    )
    right = [final_number(text) == question.gold[i // (GROUP - 1)] for i, text in enumerate(sampled.texts)]
    return Siblings(sampled.ids(), right)


def _of_group(values: Callable[[list[Tensor], Tensor, Tensor], list[Tensor]]) -> Callable[[Question], Found]:
    """Token values of each completion among its sampled siblings, averaged over its units."""

    def run(question: Question) -> Found:
        sampled = question.siblings(question)
        completions, groups, correct = [], [], []
        for b, (case, gold) in enumerate(zip(question.cases, question.gold, strict=True)):
            own = slice(b * (GROUP - 1), (b + 1) * (GROUP - 1))
            answer = question.subject.tokenizer.decode(case.completion[case.answer.start : case.answer.end])
            completions += [case.completion, *(torch.tensor(row) for row in sampled.completions[own])]
            correct += [answer.strip() == str(gold), *sampled.right[own]]
            groups += [b] * GROUP
        found = values(completions, torch.tensor(groups), torch.tensor(correct))
        fed = sum(map(len, sampled.completions)) + sum(len(case.prompt) for case in question.cases) * (GROUP - 1)
        return Found(_unit_means(found[::GROUP], question.units), fed)

    return run


def _prefix_tree(completions: list[Tensor], groups: Tensor, correct: Tensor) -> list[Tensor]:
    return prefix_tree_values(completions, groups, correct.float())


# --- Shared by methods ------------------------------------------------------------------------------------------


def _found(values: Sequence[Tensor], work: ScoringWork) -> Found:
    return Found([row.detach().float().cpu() for row in values], work.tokens_fed)


def _ordered(batch: ScoredBatch, found: Importances) -> Found:
    """Importances in the order of the cases."""
    return _found(batch.to_callers_order(found.values), found.work or ScoringWork())


def _of_scores(batch: ScoredBatch, scores: CounterfactualScores) -> Found:
    return _found([-drop for drop in batch.to_callers_order(scores.drop)], scores.work)


def _unit_means(tokens: Sequence[Tensor], units: Sequence[Sequence[Span]]) -> list[Tensor]:
    """Values of the first tokens of each row averaged over its units."""
    means = []
    for row, spans in zip(tokens, units, strict=True):
        sums = np.concatenate([[0.0], np.cumsum(row.double().cpu().numpy())])
        means.append(torch.tensor([(sums[end] - sums[start]) / (end - start) for start, end in spans]).float())
    return means


METHODS: dict[str, Method] = {
    "position": Method(_position),
    "length": Method(_length),
    "CF": Method(_masking("logprob")),
    "CF, total effect": Method(_total_effect),
    "CF, KL of mean": Method(_masking("mean")),
    "CF, KL of last": Method(_masking("last")),
    "masked rest": Method(_masked_rest),
    "OAR-P, mean": Method(_masked_tokens("mean"), costly=True),
    "OAR-P, last": Method(_masked_tokens("last"), costly=True),
    "OAR-P, log-prob": Method(_masked_tokens("logprob"), costly=True),
    "OAR-G, 1 draw": Method(_gradient("mean", 1e-3)),
    "OAR-G, 8 draws": Method(_gradient("mean", 1e-3, 8)),
    "gradient x input": Method(_gradient("mean_logprob", 0.0)),
    "prefix gain": Method(_prefix_gain("probability")),
    "prefix gain, nats": Method(_prefix_gain("mean_logprob")),
    "entropy": Method(_entropy),
    "prefix tree": Method(_of_group(_prefix_tree), siblings=True),
    "sibling edits": Method(_of_group(sibling_edits), siblings=True),
    "CF, half by prefix gain": Method(_preselected(_prefix_gain("probability"), 0.5), approximates="CF"),
    "CF, half by gradient": Method(_preselected(_gradient("mean_logprob", 0.0), 0.5), approximates="CF"),
    "CF, half by position": Method(_preselected(_position, 0.5), approximates="CF"),
    "OAR-P, runs of 4": Method(_runs(4, "mean"), approximates="OAR-P, mean", costly=True),
    "OAR-P, quarter by gradient": Method(
        _preselected(_gradient("mean_logprob", 0.0), 0.25, tokens="mean"), approximates="OAR-P, mean", costly=True
    ),
}
