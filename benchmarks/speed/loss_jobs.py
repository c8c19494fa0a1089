"""Inputs and references of the loss benchmark: one training step's loss from hidden states, or from logits.

The loss is the weighted, clipped, token-level (dapo) one. A `LossReference` is float64's result with an error budget.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.race import WrongAnswer
from benchmarks.harness.workloads import HEADS, SEED
from benchmarks.speed.reference import ErrorBudget, max_error
from cfa_kernels.losses.policy import logits_policy_loss, policy_loss

EPSILON, EPSILON_HIGH = 0.2, 0.28
SEQUENCES = 8

Result = tuple[Tensor, ...]
"""The loss, then a gradient for each input that trains."""


@dataclass(frozen=True)
class Shape:
    """Tokens, hidden size, vocabulary, whether the head trains, and by what factors ours is to beat which peers."""

    tokens: int
    hidden: int
    vocabulary: int
    dtype: torch.dtype
    head_trains: bool = True
    fastest_peer: float | None = None
    """Floor of the fastest peer's time over ours."""

    @property
    def gemms(self) -> int:
        return 3 if self.head_trains else 2

    @property
    def flops(self) -> float:
        return 2.0 * self.gemms * self.tokens * self.hidden * self.vocabulary


_TRAINS = {"head trains": True, "head frozen": False}

LINEAR: dict[str, dict[str, Shape]] = {
    "smoke": {f"tiny, {how}": Shape(48, 24, 160, torch.float32, trains) for how, trains in _TRAINS.items()},
    "cpu": {
        f"1k tokens, H 256, V 16k, {how}": Shape(1024, 256, 16_384, torch.float32, trains)
        for how, trains in _TRAINS.items()
    },
    "cuda": {
        f"{model} {tokens // 1024}k tokens, {how}": Shape(
            tokens, *sizes, torch.bfloat16, trains, (1.5 if trains else 2.0) if tokens >= 8192 else None
        )
        for model, sizes in HEADS.items()
        for tokens in (2048, 8192, 32_768)
        for how, trains in _TRAINS.items()
    },
}

LOGITS: dict[str, dict[str, Shape]] = {
    "smoke": {"smoke": Shape(48, 0, 160, torch.float32)},
    "cpu": {"512 tokens, V 16k": Shape(512, 0, 16_384, torch.float32)},
    "cuda": {
        f"{tokens // 1024}k tokens, V {vocabulary}": Shape(tokens, 0, vocabulary, torch.bfloat16)
        for vocabulary in (128_256, 151_936)
        for tokens in (2048, 8192, 32_768)
    },
}


@dataclass(frozen=True)
class LossJob:
    """Input of one step. hidden (B, T, H), head (V, H) or logits (B, T + 1, V); the rest (B, T), advantages (B,).

    Ratios keep clear of the clips' edges, so that rounding decides nothing.
    """

    shape: Shape
    hidden: Tensor
    head: Tensor
    targets: Tensor
    old: Tensor | None
    advantages: Tensor
    mask: Tensor
    weights: Tensor

    @property
    def flat(self) -> Tensor:
        return self.hidden.flatten(0, 1)

    def loss(self, logprobs: Tensor) -> Tensor:
        """The loss from log-probs (N,), for peers that stop there."""
        return policy_loss(
            logprobs.view(self.targets.shape), self.old, self.advantages, self.mask, weights=self.weights,
            epsilon=EPSILON, epsilon_high=EPSILON_HIGH, validate=False,
        )[0]  # fmt: skip

    def gradients(self, loss: Tensor, hidden: Tensor, head: Tensor) -> Result:
        wanted = [hidden, head] if self.shape.head_trains else [hidden]
        return (loss.detach(), *torch.autograd.grad(loss, wanted))

    def leaves(self) -> tuple[Tensor, Tensor]:
        """Hidden states and head as leaves of a graph of their own."""
        return self.hidden.detach().requires_grad_(), self.head.detach().requires_grad_(self.shape.head_trains)


def make_job(shape: Shape, device: torch.device) -> LossJob:
    generator = torch.Generator(device).manual_seed(SEED)
    options = {"generator": generator, "device": device}
    b, t = SEQUENCES, shape.tokens // SEQUENCES
    hidden = torch.randn(b, t, shape.hidden, **options).to(shape.dtype)
    head = (2 * torch.randn(shape.vocabulary, shape.hidden, **options) / shape.hidden**0.5).to(shape.dtype)
    targets = torch.randint(shape.vocabulary, (b, t), **options)
    shift = torch.tensor([-0.6, -0.05, 0.05, 0.6], device=device)[torch.randint(4, (b, t), **options)]
    job = LossJob(
        shape, hidden, head, targets, None, torch.randn(b, **options), torch.ones(b, t, device=device),
        4 * torch.rand(b, t, **options),
    )  # fmt: skip
    logprobs = torch.cat([chunk.log_softmax(-1).gather(-1, ids[:, None])[:, 0] for chunk, ids in _logits64(job)])
    return replace(job, old=(logprobs.view(b, t) - shift).float())


def _logits64(job: LossJob) -> Iterator[tuple[Tensor, Tensor]]:
    head = job.head.double()
    for hidden, ids in zip(job.flat.split(1024), job.targets.flatten().split(1024), strict=True):
        yield hidden.double() @ head.T, ids


# The reference


def chunked(job: LossJob, dtype: torch.dtype, chunk: int) -> Result:
    """Loss and gradients chunk by chunk, with three GEMMs (two with a frozen head), in plain PyTorch.

    In float64 it is the truth; in the job's dtype, with float32 sums over chunks, the same maths in low precision,
    and what a careful user would write.
    """
    wide = torch.promote_types(dtype, torch.float32)
    hidden, head, targets = job.flat.to(dtype), job.head.to(dtype), job.targets.flatten()
    old, mask, weights = (tensor.flatten().to(wide) for tensor in (job.old, job.mask, job.weights))
    advantages = job.advantages.to(wide).repeat_interleave(job.targets.size(1)) * weights
    by_hidden = torch.empty_like(hidden)
    by_head = torch.zeros(head.shape, dtype=wide, device=head.device) if job.shape.head_trains else None
    loss = torch.zeros((), dtype=wide, device=head.device)
    for part in torch.arange(len(hidden), device=head.device).split(chunk):
        logp = (hidden[part] @ head.T).to(wide).log_softmax(-1)
        chosen = logp.gather(1, targets[part, None])[:, 0]
        ratio, a = (chosen - old[part]).exp(), advantages[part]
        clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON_HIGH)
        surrogate = torch.minimum(ratio * a, clipped * a)
        loss -= (surrogate * mask[part]).sum()
        slope = torch.where(ratio * a <= clipped * a, -ratio * a, 0) * mask[part]
        by_logits = logp.exp_().mul_(-slope[:, None])
        by_logits.scatter_add_(1, targets[part, None], slope[:, None])
        by_logits = by_logits.to(dtype)
        by_hidden[part] = by_logits @ head
        if by_head is not None:
            by_head += by_logits.T @ hidden[part]
    total = mask.sum()
    gradients = [(by_hidden / total).view(job.hidden.shape)]
    if by_head is not None:
        gradients.append((by_head / total).to(dtype))
    return (loss / total, *gradients)


@dataclass(frozen=True)
class LossReference:
    """An error budget for the loss and one for each gradient."""

    budgets: tuple[ErrorBudget, ...]

    @staticmethod
    def of(truth: Result, low: Result, dtype: torch.dtype) -> "LossReference":
        eps = torch.finfo(dtype).eps
        pairs = zip(low, truth, strict=True)
        return LossReference(tuple(ErrorBudget(exact, max_error(mine, exact), eps) for mine, exact in pairs))

    def check(self, result: Result) -> dict[str, float]:
        """Hold a result to its budgets; returns the largest share of one."""
        if len(result) != len(self.budgets):
            raise WrongAnswer(f"{len(self.budgets)} tensors expected, got {len(result)}")
        shares = []
        for name, ours, budget in zip(("loss", "by input", "by head"), result, self.budgets, strict=False):
            slack = 1e-4 if name == "loss" else 0.0  # a sum of terms of both signs
            shares.append(budget.check(ours, name, slack)["error_over_budget"])
        return {"error_over_budget": max(shares)}


def linear_reference(job: LossJob) -> LossReference:
    return LossReference.of(chunked(job, torch.float64, 1024), chunked(job, job.shape.dtype, 1024), job.shape.dtype)


@dataclass(frozen=True)
class LogitsJob:
    """Input of one step from logits (B, T + 1, V), whose last position predicts nothing; on-policy.

    On-policy, no row is ever clipped: so a contender that writes the gradient over its logits has the same work to
    do in the next round, on whatever stands there.
    """

    logits: Tensor
    targets: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor

    def loss(self, logits: Tensor, **options: Any) -> Tensor:
        return logits_policy_loss(
            logits[:, :-1], self.targets, None, self.advantages, self.mask, weights=self.weights, validate=False,
            **options,
        )[0]  # fmt: skip

    def own_logits(self) -> Tensor:
        return self.logits.clone().requires_grad_()


def make_logits_job(shape: Shape, device: torch.device) -> LogitsJob:
    options = {"generator": torch.Generator(device).manual_seed(SEED), "device": device}
    b, t = SEQUENCES, shape.tokens // SEQUENCES
    logits = torch.empty(b, t + 1, shape.vocabulary, dtype=shape.dtype, device=device).normal_(
        std=2, generator=options["generator"]
    )
    return LogitsJob(
        logits, torch.randint(shape.vocabulary, (b, t), **options), 0.5 + torch.rand(b, **options),
        torch.ones(b, t, device=device), 0.1 + torch.rand(b, t, **options),
    )  # fmt: skip


def logits_truth(job: LogitsJob, dtype: torch.dtype) -> Result:
    """Loss and gradient (B, T, V) by autograd in `dtype`; a float64 gradient is kept in float32, to fit."""
    losses = []
    b, t, v = job.logits[:, :-1].shape
    chosen_rows = torch.float32 if dtype == torch.float64 else dtype
    gradients = torch.empty(b, t, v, dtype=chosen_rows, device=job.logits.device)
    count = job.mask.sum()
    for row in range(b):  # one sequence at a time: float64 logits are large
        logits = job.logits[row, :-1].detach().to(dtype).requires_grad_()
        wide = logits.to(torch.promote_types(dtype, torch.float32))
        logprobs = wide.log_softmax(-1).gather(-1, job.targets[row, :, None])[:, 0]
        loss = -(torch.exp(logprobs - logprobs.detach()) * job.advantages[row] * job.weights[row]).sum() / count
        losses.append(loss.detach())
        gradients[row] = torch.autograd.grad(loss, logits)[0]
    return torch.stack(losses).sum(), gradients
