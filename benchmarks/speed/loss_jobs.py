"""Inputs and references of the loss benchmark: one training step's loss from hidden states.

The loss is the weighted, clipped, token-level (dapo) one. Its reference is float64's result with error budgets.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.harness.workloads import HEADS, SEED
from benchmarks.speed.reference import ErrorBudgets
from cfa_kernels.loss.policy import policy_loss

EPSILON, EPSILON_HIGH = 0.2, 0.28
SEQUENCES = 8

Result = tuple[Tensor, ...]
"""The loss, then a gradient for each input that trains."""


@dataclass(frozen=True)
class Shape:
    """Tokens, hidden size, vocabulary, and whether the head trains."""

    tokens: int
    hidden: int
    vocabulary: int
    dtype: torch.dtype
    head_trains: bool = True

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
        f"{model} {tokens // 1024}k tokens, {how}": Shape(tokens, *sizes, torch.bfloat16, trains)
        for model, sizes in HEADS.items()
        for tokens in (2048, 8192, 32_768)
        for how, trains in _TRAINS.items()
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


def linear_reference(job: LossJob) -> ErrorBudgets:
    truth, low = chunked(job, torch.float64, 1024), chunked(job, job.shape.dtype, 1024)
    return ErrorBudgets.of(truth, low, job.shape.dtype, ("loss", "by input", "by head"))
