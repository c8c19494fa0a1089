"""Define what estimators of credit compute, by a full forward or backward for every number.

`cost_runs.py` checks what it times against these, and times some of them as what a user would run instead.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.harness.counting import counted
from benchmarks.harness.race import WrongAnswer
from benchmarks.harness.workloads import Job
from cfa_kernels import Span

ALLOWANCE = 4
"""Times the definition's own rounding error, found in float64 on some of the numbers, that a result may be off."""


@dataclass
class Forwards:
    """Full forwards of one completion, all of one length, some of them run and the others as long."""

    wanted: int
    run: int = 0
    seconds: float = 0.0
    tokens_fed: int = 0
    flops: float = 0.0
    logits: list[Tensor] = field(default_factory=list)  # (A, V) each: the completion as sampled, then masked

    def of_all(self, figure: float) -> float:
        """Extrapolate `seconds`, `tokens_fed` or `flops` from the forwards that ran to all of them."""
        return figure * self.wanted / self.run


@torch.no_grad()
def full_forwards(
    model: PreTrainedModel, job: Job, b: int, units: Sequence[Span], *, wanted: int, every_row: bool = True
) -> Forwards:
    """One forward of completion `b` as sampled and one for each of `units` masked, up to the last row that matters.

    With `every_row` the head sees all rows, as it does in a model that is called as it comes; else only those that
    predict the answer. `wanted`: how many units there are.
    """
    done = Forwards(1 + wanted)
    prompt, answer = job.prompts[b], job.answers[b]
    count = answer.end - answer.start
    for unit in [None, *units]:
        ids = torch.cat([prompt, job.completions[b][: answer.end - 1]])
        if unit is not None:
            ids[len(prompt) + unit.start : len(prompt) + unit.end] = job.placeholder_id
        with counted(model) as work:
            start = time.process_time()
            logits = model(ids[None], use_cache=False, logits_to_keep=0 if every_row else count).logits[0, -count:]
            done.seconds += time.process_time() - start
        done.run += 1
        done.tokens_fed += work.tokens_fed
        done.flops += work.flops
        done.logits.append(logits.clone())
    return done


def masking_importance(base: Tensor, masked: Tensor, targets: Tensor, outcome: str) -> float:
    """Minus the drop of an outcome, float64, from (A, V) logits that predict the answer's tokens (A,)."""
    base, masked = base.double(), masked.double()
    if outcome == "logprob":
        drop = (masked.log_softmax(-1) - base.log_softmax(-1)).gather(-1, targets[:, None]).sum()
        return -float(drop)
    p, q = (rows.mean(0) if outcome == "mean" else rows[0] for rows in (base, masked))
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


def masking_importances(done: Forwards, job: Job, b: int, outcome: str) -> Tensor:
    """Importances of the units of `full_forwards`, float64."""
    targets = job.completions[b][job.answers[b].start : job.answers[b].end]
    base, *masked = done.logits
    return torch.tensor([masking_importance(base, row, targets, outcome) for row in masked], dtype=torch.float64)


def gradient_importances(model: PreTrainedModel, job: Job, b: int, units: Sequence[Span]) -> Tensor:
    """Absolute gradient times input of the mean answer log-prob, summed over each unit, in the model's dtype."""
    prompt, answer = job.prompts[b], job.answers[b]
    ids = torch.cat([prompt, job.completions[b][: answer.end - 1]])
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    count = answer.end - answer.start
    logits = model(inputs_embeds=embedded[None], use_cache=False, logits_to_keep=count).logits[0]
    targets = job.completions[b][answer.start : answer.end]
    (slope,) = torch.autograd.grad(logits.log_softmax(-1).gather(-1, targets[:, None]).mean(), embedded)
    each = (slope * embedded).detach().sum(-1).abs()[len(prompt) :].double()
    return torch.stack([each[unit.start : unit.end].sum() for unit in units])


@torch.no_grad()
def prefix_gains(model: PreTrainedModel, job: Job, b: int) -> Tensor:
    """Change of exp(mean log-prob) of the answer, right behind its marker, from the first span's start over spans."""
    prompt, answer, spans = job.prompts[b], job.answers[b], job.spans[b]
    probe = job.completions[b][answer.start - 1 : answer.end]
    values = []
    for end in [spans[0].start, *(span.end for span in spans)]:
        ids = torch.cat([prompt, job.completions[b][:end], probe[:-1]])[None]
        logits = model(ids, use_cache=False, logits_to_keep=len(probe) - 1).logits[0]
        values.append(logits.log_softmax(-1).gather(-1, probe[1:, None]).mean().exp())
    return torch.stack(values).diff()


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model in a precision that rounds less."""
    return copy.deepcopy(model).double()


def answer_nats(done: Forwards, job: Job, b: int, outcome: str) -> float:
    """Largest number that a drop of the outcome is a difference of: minus a log-prob of the answer, or their sum."""
    targets = job.completions[b][job.answers[b].start : job.answers[b].end]
    each = torch.stack([rows.log_softmax(-1).gather(-1, targets[:, None])[:, 0] for rows in done.logits]).abs()
    return float((each.sum(1) if outcome == "logprob" else each).max())


def held_to(name: str, found: Tensor, definition: Tensor, own_error: float, scale: float) -> float:
    """The largest gap between two (N,) tensors of nats that are differences of float32 numbers of size `scale`.

    Raises:
        WrongAnswer: it is over `ALLOWANCE * (own_error + eps * scale)`, eps that of float32.
    """
    gap = float((found.double() - definition).abs().max())
    allowed = ALLOWANCE * (own_error + torch.finfo(torch.float32).eps * scale)
    if not gap <= allowed:
        raise WrongAnswer(f"{name}: off by {gap:.3g}, allowed are {allowed:.3g}")
    return gap
