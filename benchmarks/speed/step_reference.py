"""Compute what a training step should leave behind, in higher precision, and its error budget."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.harness.race import Absent, WrongAnswer
from benchmarks.harness.workloads import Job, JobRollouts
from benchmarks.speed.peers import Observed, padded_logits_to_keep
from benchmarks.speed.replay import Weights
from cfa_kernels import Span, detect_spans, find_answer, span_weights
from cfa_kernels.model.parts import causal_lm

ROWS = 64
"""Of one forward of the reference: a forward for each span would take longer than all that is timed."""

NEAREST_SPANS = 3
"""Spans that are scored where only those nearest to the answer are."""

SLACK = 4.0
"""How much larger than that of padded autograd in the policy's own precision a contender's error may be."""

Gradients = dict[str, Tensor]
"""By parameter."""


@dataclass
class StepResult:
    """Results that a contender leaves behind."""

    loss: float
    weights: Weights | None
    gradients: Gradients


def padded_autograd(model: nn.Module, rollouts: JobRollouts, weights: Weights | None) -> tuple[float, Gradients]:
    """Loss and gradients by their definition: one padded forward per group, every logit, autograd.

    Sequences are padded behind their ends, which causality hides from them.
    """
    causal, job = causal_lm(model), rollouts.job
    loss_sum = 0.0
    model.zero_grad()
    for first in range(0, len(job.prompts), rollouts.group):
        rows = range(first, first + rollouts.group)
        ids = [torch.cat([job.prompts[b], job.completions[b]]) for b in rows]
        logits = causal(nn.utils.rnn.pad_sequence(ids, batch_first=True), use_cache=False).logits
        loss = torch.zeros((), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
        for line, b in zip(logits, rows, strict=True):
            completion, start = job.completions[b], len(job.prompts[b]) - 1
            lines = line[start : start + len(completion)].to(loss.dtype)
            logprobs = lines.log_softmax(-1).gather(-1, completion[:, None])[:, 0]
            ratio = (logprobs - logprobs.detach()).exp()  # on-policy: 1, and no clip
            weight = ratio.new_ones(()) if weights is None else weights[b].to(ratio)
            loss = loss - (ratio * weight).sum() * rollouts.advantages[b].to(ratio)
        loss = loss / rollouts.tokens
        loss.backward()
        loss_sum += loss.item()
    return loss_sum, taken_gradients(model)


def taken_gradients(model: nn.Module) -> Gradients:
    """Every trainable parameter's gradient, taken off it."""
    result = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            result[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = None
    return result


def answer_scores(kind: str, model: nn.Module, rollouts: JobRollouts) -> Observed | None:
    """Log-probs of answers, of a row and its branches, by padded forwards of whole rows in the model's precision."""
    if kind == "plain":
        return None
    return padded_logits_to_keep(ROWS, causal_lm(model), judged_job(kind, rollouts.job))


def weights_of_scores(kind: str, scores: Observed, rollouts: JobRollouts) -> Weights:
    """The weights that a kind of contender should use, given the log-probs of answers."""
    job = judged_job(kind, rollouts.job)
    drops = [(row[0] - row[1:]).cpu() for row in scores]
    active = set(rollouts.active)
    return [
        span_weights(drops[b], job.spans[b], job.answers[b], len(completion)) if b in active
        else torch.ones(len(completion))
        for b, completion in enumerate(job.completions)
    ]  # fmt: skip


def weight_budgets(kind: str, exact: Observed, low: Observed, rollouts: JobRollouts, eps: float) -> Weights:
    """How far each token's weight may be off: as far as rounding may move the scores, each by itself, that it is of.

    A score may be off by its own last place and by the largest error of any score in the policy's precision; weights
    that divide by the spread of a row's drops may be off by more the smaller that is.
    """
    worst = max((abs(x.double() - y.double()).max().item() for x, y in zip(exact, low, strict=True)), default=0.0)
    shifts = [SLACK * (worst + eps * row.abs().max().item()) for row in exact]
    weights = weights_of_scores(kind, exact, rollouts)
    budgets = [torch.zeros(len(row), dtype=torch.float64) for row in weights]
    for place in range(max(map(len, exact))):
        moved = [row + shift * (torch.arange(len(row)) == place) for row, shift in zip(exact, shifts, strict=True)]
        for budget, row, other in zip(budgets, weights, weights_of_scores(kind, moved, rollouts), strict=True):
            budget += (row.double() - other.double()).abs().cpu()
    return budgets


def judged_job(kind: str, job: Job) -> Job:
    """The job with the spans, and the answers, that a kind of contender scores."""
    if kind == "nearest":
        return replace(job, spans=[row[-NEAREST_SPANS:] for row in job.spans])
    return as_found(job) if kind == "found" else job


def as_found(job: Job) -> Job:
    """The job with the spans and answers that a trainer finds in its text.

    Raises:
        Absent: a completion without an answer or without a span before it, as random words are.
    """
    answers, spans = list[Span](), list[list[Span]]()
    for b, completion in enumerate(job.completions):
        ids = completion.cpu()
        answer = find_answer(ids, job.tokenizer)
        result = [] if answer is None else detect_spans(ids, job.tokenizer, answer=answer)
        if answer is None or not result:
            raise Absent(f"completion {b} has no answer, or no span before it, that could be found")
        answers.append(answer)
        spans.append(result)
    return replace(job, spans=spans, answers=answers)


@dataclass(frozen=True)
class Truth:
    """Loss, weights and gradients of one kind of step in higher precision, and how far the policy's own is off."""

    loss: float
    weights: Weights | None
    gradients: Gradients
    loss_error: float
    weight_budgets: Weights | None
    gradient_error: float  # the worst parameter's
    active: list[int]  # the rows whose weights matter

    @staticmethod
    def of(kind: str, model: nn.Module, exact: nn.Module, rollouts: JobRollouts) -> "Truth":
        """By the definition, in `model`'s precision and with `exact`, the same model in a higher one."""
        scores, low_scores = (answer_scores(kind, m, rollouts) for m in (exact, model))
        weights = low_weights = budgets = None
        if scores is not None and low_scores is not None:
            weights, low_weights = (weights_of_scores(kind, part, rollouts) for part in (scores, low_scores))
            budgets = weight_budgets(kind, scores, low_scores, rollouts, torch.finfo(torch.float32).eps)
        loss, gradients = padded_autograd(exact, rollouts, weights)
        low_loss, low = padded_autograd(model, rollouts, low_weights)
        errors = {name: relative_error(low[name], gradient) for name, gradient in gradients.items()}
        if not max(errors.values()) < 0.5:
            worst = max(errors, key=errors.__getitem__)
            raise ValueError(
                f"the reference is none: gradients of {worst} in two precisions are {errors[worst]:.2g} apart"
            )
        return Truth(loss, weights, gradients, abs(low_loss - loss), budgets, max(errors.values()), rollouts.active)

    def check(self, result: StepResult, eps: float) -> dict[str, float]:
        """Hold a step to this; `eps` is the rounding step of the policy's precision."""
        if result.gradients.keys() != self.gradients.keys():
            raise WrongAnswer(f"gradients of {sorted(self.gradients.keys() ^ result.gradients.keys())[:3]} differ")
        weight_error = largest_difference(result.weights, self.weights, self.active)
        moved = 0.0  # share of a row's mean weight; terms of the loss and of gradients are off by as much
        for b in self.active if weight_error else ():
            if result.weights is None or self.weights is None or self.weight_budgets is None:
                raise WrongAnswer(f"a token weight is off by {weight_error:.2g}")
            off = (result.weights[b].double().cpu() - self.weights[b].double().cpu()).abs()
            excess = (off - self.weight_budgets[b] - 4 * SLACK * eps).max().item()
            if not excess <= 0:
                raise WrongAnswer(f"row {b}: a token weight is off by {excess:.2g} more than rounding accounts for")
            moved = max(moved, off.max().item() / self.weights[b].double().mean().item())
        allowed = SLACK * (self.gradient_error + eps + moved)
        errors = {name: relative_error(result.gradients[name], truth) for name, truth in self.gradients.items()}
        worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else torch.inf)
        if not errors[worst] <= allowed:
            raise WrongAnswer(
                f"gradient of {worst} is off by {errors[worst]:.2g} of its norm, allowed are {allowed:.2g}"
            )
        # A sum of terms of both signs: what it may miss goes by the size of the terms, not by the sum's.
        allowed_loss = SLACK * (self.loss_error + 8 * eps + moved)
        if not abs(result.loss - self.loss) <= allowed_loss:
            raise WrongAnswer(f"loss is {result.loss:.6g}, expected {self.loss:.6g} within {allowed_loss:.2g}")
        return {"gradient_error": errors[worst], "gradient_error_allowed": allowed, "weight_error": weight_error}


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm of the truth; infinite where only the truth is zero."""
    if found.shape != truth.shape:
        raise WrongAnswer(f"shape {tuple(truth.shape)} expected, got {tuple(found.shape)}")
    norm = truth.norm().item()
    off = (found.to(truth.dtype) - truth).norm().item()
    return off / norm if norm else torch.inf if off else 0.0


def largest_difference(found: Weights | None, truth: Weights | None, rows: Sequence[int]) -> float:
    """Between two sets of token weights, in some rows; infinite if one has none."""
    if found is None or truth is None:
        return 0.0 if found is truth else torch.inf
    differences = [(found[b].double().cpu() - truth[b].double().cpu()).abs().max().item() for b in rows]
    return max(differences, default=0.0)
