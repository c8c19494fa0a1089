"""Exchange values between the processes of a run, one per device, as `torchrun` or `accelerate launch` starts them.

All have the same settings, problems and order of steps. Each samples, rewards and trains on whole groups, its
`own_share`; what all must know goes through `gather`. Rank 0 writes. Without a launcher there is one process.
"""

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cfa_kernels.model.parts import backbone, causal_lm
from cfa_kernels.model.sharded.fsdp import give_back, holds_pieces, is_fsdp2

if TYPE_CHECKING:
    from .config import TrainConfig

_Value = TypeVar("_Value")
_Items = TypeVar("_Items", bound=Sequence[Any])


class PeerError(ConnectionError):
    """Another process cannot continue, so this one does not; the message has its rank and the reason."""


def start(config: "TrainConfig") -> None:
    """Join the processes that a launcher has started; raises `ValueError` naming a setting that they cannot follow."""
    if (processes := int(os.environ.get("WORLD_SIZE", 1))) == 1:
        return
    config.refuse(processes)
    if not dist.is_initialized():
        backend = {} if config.precision.device.type == "cpu" else {"backend": "cpu:gloo,cuda:nccl"}
        PartialState(cpu=not backend, timeout=datetime.timedelta(minutes=30), **backend)


def end() -> None:
    """Leave the other processes once all have come here: the launcher ends those that are left when one has failed."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError, PeerError):  # one has ended already
            gather(None)
        dist.destroy_process_group()


def count() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def own_share(items: _Items) -> _Items:
    """Pick this process's share of what all see in the same order; shares, by rank, are side by side."""
    # Contiguous, so that the completions of a group stay in one process.
    first, end = (len(items) * share // count() for share in (rank(), rank() + 1))
    return items[first:end]  # type: ignore[return-value]


def gather(value: _Value, problem: str | None = None) -> list[_Value]:
    """Return the values of all processes, by rank; each brings one, on the host, and all come here equally often.

    Raises `PeerError` where a process brought a `problem`.
    """
    if count() == 1:
        return [value]
    pairs: list[Any] = [None] * count()
    dist.all_gather_object(pairs, (value, problem))
    values, problems = zip(*pairs, strict=True)
    if named := [f"rank {i}: {one}" for i, one in enumerate(problems) if one is not None]:
        raise PeerError("; ".join(named) if len({*problems}) > 1 else problem)  # the same everywhere has no rank
    return [*values]


def on_first(make: Callable[[], _Value]) -> _Value:
    """Return to every process what `make()` gives the first one, or raise what it raises there; all call this."""
    outcome: tuple[Any, Exception | None] = None, None
    if rank() == 0:
        try:
            outcome = make(), None
        except Exception as raised:
            outcome = None, raised
    result, problem = gather(outcome)[0]
    if problem is not None:
        raise problem
    return result  # type: ignore[no-any-return]


def describe_failure(problem: BaseException) -> str:
    """Say what ended the run, after telling the other processes at their next `gather` what ends this one."""
    if count() > 1 and not isinstance(problem, PeerError):
        try:
            gather(None, str(problem))
        except PeerError as failures:
            return str(failures)
    return str(problem)


def sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sum the gradients of replicas over the processes, in place; where one has none it counts as 0."""
    anywhere = map(any, zip(*gather([p.grad is not None for p in parameters]), strict=True))
    for parameter in [p for p, some in zip(parameters, anywhere, strict=True) if some]:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)


def distribute(model: nn.Module, config: "TrainConfig") -> None:
    """Give all processes the first one's weights, and let each keep a piece of them only if `parallel` says so."""
    if count() == 1:
        return
    gather(None)  # none has failed before this
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), 0)
    if config.parallel == "fsdp2":
        mesh = init_device_mesh(config.precision.device.type, (count(),))
        for layer in getattr(backbone(causal_lm(model)), "layers", ()):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)


@contextlib.contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Inside, each process holds all weights of `model` and may run it as often as it likes, without gradient."""
    units: list[Any] = [module for module in model.modules() if is_fsdp2(module)] if holds_pieces(model) else []
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units[1:]:  # the outermost one keeps its weights until the backward
            unit.set_reshard_after_forward(True, recurse=False)
        if units:
            give_back(model)
