"""Contenders of the loss benchmark: ours, plain PyTorch, and what trainers use.

Every contender returns the loss and its gradients, and is checked against float64 before it is timed.
"""

import functools
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness.race import Absent, Contender
from benchmarks.speed.loss_jobs import EPSILON, EPSILON_HIGH, LossJob, Result, linear_reference
from cfa_kernels.loss.policy import linear_policy_loss, policy_loss

CHUNK = {"cpu": 256, "cuda": 4096}
BOUND, OURS = "bare GEMMs (the bound)", "ours"


def ours(job: LossJob) -> Result:
    hidden, head = job.leaves()
    loss, _ = linear_policy_loss(
        hidden, head, job.targets, job.old, job.advantages, job.mask, weights=job.weights,
        epsilon=EPSILON, epsilon_high=EPSILON_HIGH, drop_inactive=False, validate=False,
    )  # fmt: skip
    return job.gradients(loss, hidden, head)


def _plain_loss(hidden: Tensor, head: Tensor, targets: Tensor, *rest: Tensor) -> Tensor:
    logprobs = (hidden @ head.T).float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    old, advantages, mask, weights = rest
    return policy_loss(
        logprobs, old, advantages, mask, weights=weights, epsilon=EPSILON, epsilon_high=EPSILON_HIGH, validate=False
    )[0]


_compiled_loss = functools.cache(lambda: torch.compile(_plain_loss))


def eager(job: LossJob, loss: Callable[..., Tensor] = _plain_loss) -> Result:
    hidden, head = job.leaves()
    rest = (job.old, job.advantages, job.mask, job.weights)
    return job.gradients(loss(hidden, head, job.targets, *rest), hidden, head)


def compiled(job: LossJob) -> Result:
    return eager(job, _compiled_loss())


def liger_chunked(job: LossJob) -> Result:
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


def trl_chunked(job: LossJob) -> Result:
    try:
        from trl.kernels import ChunkedLogProbFunction
    except ImportError as error:
        raise Absent(f"TRL 1.16 is not installed: {error}") from error
    hidden, head = job.leaves()
    logprobs, *_ = ChunkedLogProbFunction.apply(
        hidden.flatten(0, 1), head, None, job.targets.flatten(), 1.0, 32_768, None, 1.0, ()
    )
    return job.gradients(job.loss(logprobs), hidden, head)


def bare_gemms(job: LossJob) -> Result:
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


PEERS: dict[str, Callable[[LossJob], Result]] = {
    OURS: ours,
    "eager": eager,
    "torch.compile": compiled,
    "Liger chunked": liger_chunked,
    "TRL chunked log-prob": trl_chunked,
}


def linear_contenders(job: LossJob) -> list[Contender]:
    reference = linear_reference(job)
    contenders = [Contender(name, functools.partial(run, job), reference.check) for name, run in PEERS.items()]
    return [*contenders, Contender(BOUND, functools.partial(bare_gemms, job), lambda result: None)]
