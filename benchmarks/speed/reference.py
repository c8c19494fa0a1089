"""Compute references in float64, and the error budget of a result."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.harness.race import WrongAnswer, release_memory
from benchmarks.harness.workloads import Job
from benchmarks.speed.peers import Observed, Peer, per_span, per_span_logits_to_keep


@dataclass(frozen=True)
class Reference:
    """Reference results and their error budget.

    The budget is the error that the definition itself makes in the model's precision, measured against the same
    in the next higher one, doubled: `2 * (max |per_span - truth| + eps * max |truth|)` nats per score.
    """

    truth: list[Tensor]  # float64
    error: float

    @staticmethod
    def of(model: PreTrainedModel, job: Job) -> "Reference":
        """Run the definition in the model's dtype and in the next higher one."""
        dtype = next(model.parameters()).dtype
        higher = torch.float64 if dtype == torch.float32 else torch.float32
        exact = copy.deepcopy(model)
        nn.Module.to(exact, higher)
        truth = [scores.double().cpu() for scores in per_span_logits_to_keep(exact, job)]
        del exact
        release_memory(job.prompts[0].device)
        low = per_span(model, job)
        error = max(float((a.double().cpu() - b).abs().max()) for a, b in zip(low, truth, strict=True))
        return Reference(truth, error)

    def tolerance(self, eps: float) -> float:
        """Nats that one score may be off, its own rounding step being `eps`."""
        return 2 * (self.error + eps * max(float(scores.abs().max()) for scores in self.truth))

    def check(self, peer: Peer, job: Job, observed: Observed, dtype: torch.dtype) -> dict[str, float]:
        """Raise `WrongAnswer` unless every observation is within the budget; return how close it was.

        For a peer that observes something other than log-probs the budget goes through its view to first order:
        the sum, over the scores, of how far the view moves when one score moves by the tolerance.
        """
        tolerance = self.tolerance(torch.finfo(dtype if peer.scores_in_model_dtype else torch.float32).eps)
        worst, largest = 0.0, 0.0
        for b, (scores, seen) in enumerate(zip(self.truth, observed, strict=True)):
            expected = peer.view(scores, job, b).double()
            seen = seen.double().cpu()
            if seen.shape != expected.shape:
                raise WrongAnswer(f"completion {b}: {tuple(seen.shape)} values, {tuple(expected.shape)} are expected")
            allowed = torch.zeros_like(expected)
            for step in tolerance * torch.eye(len(scores), dtype=torch.float64):
                allowed += (peer.view(scores + step, job, b) - expected).abs()
            error = (seen - expected).abs()
            # Not `error > allowed`: a nan must be refused.
            if not bool((error <= allowed + 1e-12).all()):
                at = int((error - allowed).nan_to_num(torch.inf).argmax())
                raise WrongAnswer(
                    f"completion {b}, value {at}: {float(seen[at]):.6g}, expected {float(expected[at]):.6g} "
                    f"within {float(allowed[at]):.2g}"
                )
            worst = max(worst, float((error / allowed.clamp_min(1e-12)).max()))
            largest = max(largest, float(error.max()))
        return {"error_over_budget": worst, "max_error": largest, "tolerance_nats": tolerance}

    def sharpness(self) -> float:
        """Median |drop| over the fp32 tolerance: far above 1, or the check would see nothing."""
        drops = torch.cat([(scores[1:] - scores[0]).abs() for scores in self.truth])
        return float(drops.median()) / self.tolerance(torch.finfo(torch.float32).eps)


@dataclass(frozen=True)
class ErrorBudget:
    """Reference of a tensor, and how far the same maths in the inputs' precision is from it."""

    truth: Tensor  # of float64 arithmetic
    low_error: float
    eps: float

    @staticmethod
    def of(reference: Callable[..., Tensor], *inputs: Tensor) -> "ErrorBudget":
        """Run `reference` in float64 and in the dtype of `inputs`."""
        truth = reference(*(x.double() for x in inputs))
        return ErrorBudget(truth, max_error(reference(*inputs), truth), torch.finfo(inputs[0].dtype).eps)

    def check(self, result: Tensor, name: str = "result", slack: float = 0.0) -> dict[str, float]:
        """Hold a result to `2 * (low_error + eps * max |truth|) + slack`; returns its share of that budget."""
        allowed = 2 * (self.low_error + self.eps * self.truth.abs().max().item()) + slack
        error = max_error(result, self.truth)
        if not error <= allowed:
            raise WrongAnswer(f"{name} is off by {error:.3g}, allowed are {allowed:.3g}")
        return {"error_over_budget": error / allowed}


@dataclass(frozen=True)
class ErrorBudgets:
    """An error budget for each tensor of a result, by name."""

    budgets: dict[str, ErrorBudget]

    @staticmethod
    def of(truth: Sequence[Tensor], low: Sequence[Tensor], dtype: torch.dtype, names: Sequence[str]) -> "ErrorBudgets":
        """From float64's result and from `dtype`'s."""
        eps, pairs = torch.finfo(dtype).eps, zip(truth, low, strict=True)
        named = zip(names, pairs, strict=False)
        return ErrorBudgets({name: ErrorBudget(exact, max_error(mine, exact), eps) for name, (exact, mine) in named})

    def check(self, result: Sequence[Tensor]) -> dict[str, float]:
        """Hold a result to its budgets; returns the largest share of one."""
        if len(result) != len(self.budgets):
            raise WrongAnswer(f"{len(self.budgets)} tensors expected, got {len(result)}")
        shares = []
        for (name, budget), ours in zip(self.budgets.items(), result, strict=True):
            slack = 1e-4 if name == "loss" else 0.0  # a sum of terms of both signs
            shares.append(budget.check(ours, name, slack)["error_over_budget"])
        return {"error_over_budget": max(shares)}


def max_error(ours: Tensor, exact: Tensor) -> float:
    """Largest absolute difference; `WrongAnswer` for another shape."""
    if ours.shape != exact.shape:
        raise WrongAnswer(f"shape {tuple(exact.shape)} expected, got {tuple(ours.shape)}")
    if not exact.dim():
        return (ours.double() - exact).abs().item()
    # A part at a time: float64 copies of all logits would not fit.
    rows = max(2**27 // max(exact[0].numel(), 1), 1)
    parts = zip(ours.split(rows), exact.split(rows), strict=True)
    return max((mine.double() - right).abs().max().item() for mine, right in parts)
