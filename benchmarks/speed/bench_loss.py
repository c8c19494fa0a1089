"""Race the weighted policy loss and its gradients, from hidden states and from logits, against other trainers'.

A job is one training step's loss: forward and backward of the weighted, clipped, token-level (dapo) loss. Every
contender returns the loss and its gradients and is checked against float64 before it is timed.
"""

import functools
import gc
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.options import workload_set
from benchmarks.harness.race import (
    Absent,
    Budget,
    Contender,
    Figures,
    Lap,
    WrongAnswer,
    race,
    release_memory,
    replay_clock,
    times_ours,
)
from benchmarks.harness.workloads import HEADS, SEED
from benchmarks.speed.reference import ErrorBudget, max_error
from cfa_kernels.losses.policy import contributing_rows, linear_policy_loss, logits_policy_loss, policy_loss
from cfa_kernels.ops.linear_logprob import linear_logprob

EPSILON, EPSILON_HIGH = 0.2, 0.28
CHUNK = {"cpu": 256, "cuda": 4096}
BOUND, OURS, HALF = "bare GEMMs (the bound)", "ours", "ours, half the groups at zero advantage"
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
class Job:
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


def make_job(shape: Shape, device: torch.device) -> Job:
    generator = torch.Generator(device).manual_seed(SEED)
    options = {"generator": generator, "device": device}
    b, t = SEQUENCES, shape.tokens // SEQUENCES
    hidden = torch.randn(b, t, shape.hidden, **options).to(shape.dtype)
    head = (2 * torch.randn(shape.vocabulary, shape.hidden, **options) / shape.hidden**0.5).to(shape.dtype)
    targets = torch.randint(shape.vocabulary, (b, t), **options)
    shift = torch.tensor([-0.6, -0.05, 0.05, 0.6], device=device)[torch.randint(4, (b, t), **options)]
    job = Job(
        shape, hidden, head, targets, None, torch.randn(b, **options), torch.ones(b, t, device=device),
        4 * torch.rand(b, t, **options),
    )  # fmt: skip
    logprobs = torch.cat([chunk.log_softmax(-1).gather(-1, ids[:, None])[:, 0] for chunk, ids in _logits64(job)])
    return replace(job, old=(logprobs.view(b, t) - shift).float())


def _logits64(job: Job) -> Iterator[tuple[Tensor, Tensor]]:
    head = job.head.double()
    for hidden, ids in zip(job.flat.split(1024), job.targets.flatten().split(1024), strict=True):
        yield hidden.double() @ head.T, ids


# The reference


def chunked(job: Job, dtype: torch.dtype, chunk: int) -> Result:
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
class Reference:
    """An error budget for the loss and one for each gradient."""

    budgets: tuple[ErrorBudget, ...]

    @staticmethod
    def of(truth: Result, low: Result, dtype: torch.dtype) -> "Reference":
        eps = torch.finfo(dtype).eps
        pairs = zip(low, truth, strict=True)
        return Reference(tuple(ErrorBudget(exact, max_error(mine, exact), eps) for mine, exact in pairs))

    def check(self, result: Result) -> dict[str, float]:
        """Hold a result to its budgets; returns the largest share of one."""
        if len(result) != len(self.budgets):
            raise WrongAnswer(f"{len(self.budgets)} tensors expected, got {len(result)}")
        shares = []
        for name, ours, budget in zip(("loss", "by input", "by head"), result, self.budgets, strict=False):
            slack = 1e-4 if name == "loss" else 0.0  # a sum of terms of both signs
            shares.append(budget.check(ours, name, slack)["error_over_budget"])
        return {"error_over_budget": max(shares)}


def linear_reference(job: Job) -> Reference:
    return Reference.of(chunked(job, torch.float64, 1024), chunked(job, job.shape.dtype, 1024), job.shape.dtype)


# From hidden states


def ours(job: Job, rows: Tensor | None = None) -> Result:
    hidden, head = job.leaves()
    loss, _ = linear_policy_loss(
        hidden, head, job.targets, job.old, job.advantages, job.mask, weights=job.weights, rows=rows,
        epsilon=EPSILON, epsilon_high=EPSILON_HIGH, drop_inactive=False, validate=False,
    )  # fmt: skip
    return job.gradients(loss, hidden, head)


def ours_from_logprobs(job: Job) -> Result:
    hidden, head = job.leaves()
    return job.gradients(job.loss(linear_logprob(hidden.flatten(0, 1), head, job.targets.flatten())), hidden, head)


def _eager_loss(job: Job, hidden: Tensor, head: Tensor) -> Tensor:
    logits = (hidden @ head.T).float()
    return job.loss(logits.log_softmax(-1).gather(-1, job.targets[..., None])[..., 0])


def eager(job: Job) -> Result:
    hidden, head = job.leaves()
    return job.gradients(_eager_loss(job, hidden, head), hidden, head)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    def loss_of(hidden: Tensor, head: Tensor, targets: Tensor, *rest: Tensor) -> Tensor:
        logprobs = (hidden @ head.T).float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        old, advantages, mask, weights = rest
        return policy_loss(
            logprobs, old, advantages, mask, weights=weights, epsilon=EPSILON, epsilon_high=EPSILON_HIGH, validate=False
        )[0]

    return torch.compile(loss_of)


def compiled(job: Job) -> Result:
    hidden, head = job.leaves()
    rest = (job.old, job.advantages, job.mask, job.weights)
    return job.gradients(_compiled()(hidden, head, job.targets, *rest), hidden, head)


def chunked_three_gemms(job: Job) -> Result:
    return chunked(job, job.shape.dtype, CHUNK[job.hidden.device.type])


def liger_chunked(job: Job) -> Result:
    if importlib.util.find_spec("liger_kernel") is None:
        raise Absent("liger-kernel is not installed")
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    hidden, head = job.leaves()
    liger = LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=hidden.is_cuda, use_ref_model=False, epsilon_low=EPSILON, epsilon_high=EPSILON_HIGH
    )
    loss, _ = liger(
        hidden, head, job.targets, job.mask, job.advantages, old_per_token_logps=job.old, vllm_is_ratio=job.weights
    )
    return job.gradients(loss, hidden, head)


def trl_chunked(job: Job) -> Result:
    try:
        from trl.kernels import ChunkedLogProbFunction
    except ImportError as error:
        raise Absent(f"TRL 1.16 is not installed: {error}") from error
    hidden, head = job.leaves()
    logprobs, *_ = ChunkedLogProbFunction.apply(
        hidden.flatten(0, 1), head, None, job.targets.flatten(), 1.0, 32_768, None, 1.0, ()
    )
    return job.gradients(job.loss(logprobs), hidden, head)


def torch_linear_cross_entropy(job: Job) -> Result:
    if not hasattr(F, "linear_cross_entropy"):
        raise Absent(f"torch {torch.__version__} has no linear_cross_entropy")
    hidden, head = job.leaves()
    nll = F.linear_cross_entropy(hidden.flatten(0, 1), head, job.targets.flatten(), reduction="none")
    return job.gradients(job.loss(-nll.float()), hidden, head)


def cut_cross_entropy(job: Job) -> Result:
    if importlib.util.find_spec("cut_cross_entropy") is None:
        raise Absent("cut-cross-entropy is not installed")
    if not job.hidden.is_cuda:
        raise Absent("cut-cross-entropy runs on a GPU")
    from cut_cross_entropy import linear_cross_entropy

    hidden, head = job.leaves()
    nll = linear_cross_entropy(hidden.flatten(0, 1), head, job.targets.flatten(), reduction="none", impl="cce_exact")
    return job.gradients(job.loss(-nll.float()), hidden, head)


def verl_kernel(job: Job) -> Result:
    if importlib.util.find_spec("verl") is None:
        raise Absent("verl is not installed")
    if not job.hidden.is_cuda:
        raise Absent("verl's kernel runs on a GPU")
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    hidden, head = job.leaves()
    logprobs, _ = linear_cross_entropy(hidden.flatten(0, 1), head, job.targets.flatten(), 1.0, "none")
    return job.gradients(job.loss(logprobs), hidden, head)


def bare_gemms(job: Job) -> Result:
    """Compute only the products, chunked as ours are: what no exact method can beat."""
    hidden, head = job.flat, job.head
    chunk = CHUNK[hidden.device.type]
    by_hidden = torch.empty_like(hidden)
    by_head = torch.zeros_like(head) if job.shape.head_trains else None
    for start in range(0, len(hidden), chunk):
        rows = hidden[start : start + chunk]
        strip = rows @ head.T
        torch.mm(strip, head, out=by_hidden[start : start + chunk])
        if by_head is not None:
            by_head.addmm_(strip.T, rows)
    return (by_hidden,)


PEERS: dict[str, Callable[[Job], Result]] = {
    OURS: ours,
    "ours, linear_logprob then policy_loss": ours_from_logprobs,
    "eager": eager,
    "torch.compile": compiled,
    "chunked PyTorch, three GEMMs": chunked_three_gemms,
    "Liger chunked": liger_chunked,
    "TRL chunked log-prob": trl_chunked,
    "F.linear_cross_entropy": torch_linear_cross_entropy,
    "cut-cross-entropy, exact": cut_cross_entropy,
    "verl linear_cross_entropy": verl_kernel,
}


def linear_contenders(job: Job) -> list[Contender]:
    reference = linear_reference(job)
    contenders = [Contender(name, functools.partial(run, job), reference.check) for name, run in PEERS.items()]
    half = replace(job, advantages=job.advantages * (torch.arange(SEQUENCES, device=job.mask.device) % 2))
    rows = contributing_rows(half.mask, half.advantages, weights=half.weights)
    contenders.append(Contender(HALF, functools.partial(ours, half, rows), linear_reference(half).check))
    contenders.append(Contender(BOUND, functools.partial(bare_gemms, job), lambda result: None))
    return contenders


# From logits


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
    kept = torch.float32 if dtype == torch.float64 else dtype
    gradients = torch.empty(b, t, v, dtype=kept, device=job.logits.device)
    count = job.mask.sum()
    for row in range(b):  # one sequence at a time: float64 logits are large
        logits = job.logits[row, :-1].detach().to(dtype).requires_grad_()
        wide = logits.to(torch.promote_types(dtype, torch.float32))
        logprobs = wide.log_softmax(-1).gather(-1, job.targets[row, :, None])[:, 0]
        loss = -(torch.exp(logprobs - logprobs.detach()) * job.advantages[row] * job.weights[row]).sum() / count
        losses.append(loss.detach())
        gradients[row] = torch.autograd.grad(loss, logits)[0]
    return torch.stack(losses).sum(), gradients


def ours_in_place(job: LogitsJob, logits: Tensor) -> Result:
    loss = job.loss(logits, inplace=True)
    return loss.detach(), torch.autograd.grad(loss, logits)[0][:, :-1]


def ours_out_of_place(job: LogitsJob, logits: Tensor) -> Result:
    loss = job.loss(logits)
    return loss.detach(), torch.autograd.grad(loss, logits)[0][:, :-1]


def eager_logits(job: LogitsJob, logits: Tensor) -> Result:
    logprobs = logits[:, :-1].float().log_softmax(-1).gather(-1, job.targets[..., None])[..., 0]
    loss, _ = policy_loss(logprobs, None, job.advantages, job.mask, weights=job.weights, validate=False)
    return loss.detach(), torch.autograd.grad(loss, logits)[0][:, :-1]


def liger_logits(job: LogitsJob, logits: Tensor) -> Result:
    if importlib.util.find_spec("liger_kernel") is None:
        raise Absent("liger-kernel is not installed")
    if not logits.is_cuda:
        raise Absent("Liger's logits-level loss runs on a GPU")
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    loss, _ = triton_grpo_loss(
        logits, None, None, job.targets, job.advantages, job.mask, temperature=1.0, beta=0.0, eps_low=EPSILON,
        eps_high=EPSILON_HIGH, inplace=True, loss_type="dapo", reduce=True, vllm_is_ratio=job.weights,
    )  # fmt: skip
    return loss.detach(), torch.autograd.grad(loss, logits)[0][:, :-1]


LOGITS_PEERS: dict[str, Callable[[LogitsJob, Tensor], Result]] = {
    OURS: ours_in_place,
    "ours, out of place": ours_out_of_place,
    "eager": eager_logits,
    "Liger logits-level": liger_logits,
}


def logits_contenders(job: LogitsJob) -> list[Contender]:
    truth, low = logits_truth(job, torch.float64), logits_truth(job, job.logits.dtype)
    reference = Reference.of(truth, low, job.logits.dtype)
    return [
        Contender(name, functools.partial(run, job, job.own_logits()), reference.check)
        for name, run in LOGITS_PEERS.items()
    ]


# Tests


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, shapes in (("linear_workload", LINEAR), ("logits_workload", LOGITS)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, list(shapes[workload_set(metafunc.config)]), scope="module")


def _record(figures: Figures, workload: str, shape: Shape) -> None:
    figures.workloads[workload] = {**vars(shape), "dtype": str(shape.dtype).removeprefix("torch."), "seed": SEED}


def race_from_hidden_states(shape: Shape, device: torch.device, budget: Budget) -> dict[str, Lap]:
    """By the device's clock: 2,048 rows take less time than launches from Python do."""
    return race(linear_contenders(make_job(shape, device)), device=device, budget=budget, clock="device")


def race_from_logits(shape: Shape, device: torch.device, budget: Budget) -> dict[str, Lap]:
    return race(logits_contenders(make_logits_job(shape, device)), device=device, budget=budget, clock="device")


@pytest.fixture(scope="module")
def linear_laps(
    request: pytest.FixtureRequest, linear_workload: str, device: torch.device, budget: Budget, figures: Figures
) -> Iterator[dict[str, Lap]]:
    shape = LINEAR[workload_set(request.config)][linear_workload]
    _record(figures, f"loss from hidden states, {linear_workload}", shape)
    yield race_from_hidden_states(shape, device, budget)
    gc.collect()
    release_memory(device)


@pytest.fixture(scope="module")
def logits_laps(
    request: pytest.FixtureRequest, logits_workload: str, device: torch.device, budget: Budget, figures: Figures
) -> Iterator[dict[str, Lap]]:
    shape = LOGITS[workload_set(request.config)][logits_workload]
    _record(figures, f"loss from logits, {logits_workload}", shape)
    yield race_from_logits(shape, device, budget)
    gc.collect()
    release_memory(device)


@pytest.mark.benchmark(timer=replay_clock)
@pytest.mark.parametrize("name", [*PEERS, HALF, BOUND])
def test_time_from_hidden_states(
    pytestconfig: pytest.Config,
    linear_laps: dict[str, Lap],
    linear_workload: str,
    name: str,
    report: Callable[..., None],
) -> None:
    shape = LINEAR[workload_set(pytestconfig)][linear_workload]
    report(linear_laps[name], group=f"loss from hidden states, {linear_workload}", flops=shape.flops)


@pytest.mark.benchmark(timer=replay_clock)
@pytest.mark.parametrize("name", list(LOGITS_PEERS))
def test_time_from_logits(
    pytestconfig: pytest.Config,
    logits_laps: dict[str, Lap],
    logits_workload: str,
    name: str,
    report: Callable[..., None],
) -> None:
    shape = LOGITS[workload_set(pytestconfig)][logits_workload]
    # Counted for all: the logits read once and the gradient written once. A second read is the contender's own.
    moved = 2.0 * shape.tokens * shape.vocabulary * shape.dtype.itemsize
    report(logits_laps[name], group=f"loss from logits, {logits_workload}", bytes=moved)


def test_ours_beats_its_peers_from_hidden_states(
    pytestconfig: pytest.Config, linear_laps: dict[str, Lap], linear_workload: str, hold: Callable[..., None]
) -> None:
    factor = LINEAR[workload_set(pytestconfig)][linear_workload].fastest_peer
    ratios, floors, short = times_ours(linear_laps), {}, []
    if factor is not None:
        floors = {name: factor for name in PEERS if not name.startswith(OURS)} | {BOUND: 0.88}
        gain = 1 / ratios[HALF] if HALF in ratios else None
        short = [f"{HALF}: {gain:.2f} x faster, promised 1.8"] if gain is not None and gain < 1.8 else []
    hold(f"loss from hidden states, {linear_workload}", ratios, floors, short)


def test_ours_beats_its_peers_from_logits(
    pytestconfig: pytest.Config, logits_laps: dict[str, Lap], logits_workload: str, hold: Callable[..., None]
) -> None:
    floors = {"Liger logits-level": 1.3} if workload_set(pytestconfig) == "cuda" else {}
    hold(f"loss from logits, {logits_workload}", times_ours(logits_laps), floors)
