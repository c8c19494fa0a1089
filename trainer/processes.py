"""Train on several devices: one process each, as `torchrun` or `accelerate launch` starts them.

All processes have the same settings, problems and order of steps. Each samples, rewards and trains on whole groups, its
share (`own`); in between they exchange what all must know (`gathered`), so that all come to the same verdicts. The
first one writes. Without a launcher there is one process, and nothing here does anything.
"""

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn

from cfa_kernels.hf.fsdp import give_back, holds_pieces, is_fsdp2
from cfa_kernels.hf.model import backbone, causal_lm
from cfa_kernels.scoring.access import GRADIENTS

if TYPE_CHECKING:
    from trainer.config import TrainConfig

_Value = TypeVar("_Value")
_Items = TypeVar("_Items", bound=Sequence[Any])


class OtherProcessFailed(ConnectionError):
    """Another process cannot go on, so this one does not; the message names it by its rank and says why."""


def start(config: "TrainConfig") -> None:
    """Join the processes that a launcher has started, each with the GPU of its place; do nothing without one.

    Raises:
        ValueError: settings that several processes cannot follow, by name.
        ConnectionError: they do not find each other.
    """
    if (processes := int(os.environ.get("WORLD_SIZE", 1))) == 1:
        return
    _require_possible(config, processes)
    if dist.is_initialized():
        return
    try:
        backend = {} if config.precision.device.type == "cpu" else {"backend": "cpu:gloo,cuda:nccl"}
        PartialState(cpu=not backend, timeout=datetime.timedelta(minutes=30), **backend)
    except (ValueError, RuntimeError) as problem:
        raise ConnectionError(f"{processes} processes were to be started, and do not meet: {problem}") from problem


def end() -> None:
    """Leave the other processes once all have come here: the launcher ends those that are left when one has failed."""
    if dist.is_initialized():
        with contextlib.suppress(OtherProcessFailed):  # one has ended already
            gathered(None)
        dist.destroy_process_group()


def count() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Whether this process is the one that writes to console and files."""
    return rank() == 0


def own(items: _Items) -> _Items:
    """Pick this process's share of what all see in the same order; shares, by rank, are side by side."""
    first, end = (len(items) * share // count() for share in (rank(), rank() + 1))
    return items[first:end]  # type: ignore[return-value]


def gathered(value: _Value) -> list[_Value]:
    """Return the values of all processes, by rank; each brings one, on the host, and all come here equally often.

    Raises:
        OtherProcessFailed: one has failed (`failed`), or does not answer.
    """
    return [value] if count() == 1 else _meet(value, None)


def of_first(make: Callable[[], _Value]) -> _Value:
    """Return to every process what `make()` gives the first one, or raise what it raises there; all call this."""
    made: Any = None
    problem: Exception | None = None
    if is_first():
        try:
            made = make()
        except Exception as raised:
            problem = raised
    made, problem = gathered((made, problem))[0]
    if problem is not None:
        raise problem
    return made  # type: ignore[no-any-return]


def failed(problem: BaseException) -> str:
    """Tell the other processes, at their next `gathered`, what ends this one; return that of all that failed."""
    if count() > 1 and not isinstance(problem, OtherProcessFailed):
        try:
            _meet(None, str(problem))
        except OtherProcessFailed as of_all:
            return str(of_all)
    return str(problem)


def _meet(value: _Value, problem: str | None) -> list[_Value]:
    brought: list[Any] = [None] * count()
    try:
        dist.all_gather_object(brought, (value, problem))
    except RuntimeError as broken:
        raise OtherProcessFailed(f"rank {rank()}: {problem}" if problem else silence(broken)) from broken
    problems = {said: f"rank {i}: {said}" for i, (_, said) in reversed([*enumerate(brought)]) if said is not None}
    if len(problems) == 1 and all(said is not None for _, said in brought):  # the same everywhere
        raise OtherProcessFailed(next(iter(problems)))
    if problems:
        raise OtherProcessFailed("; ".join(reversed(problems.values())))
    return [one for one, _ in brought]


def is_silence(problem: Exception) -> bool:
    """Whether an error is of torch's talk between processes: another one has ended or does not answer."""
    ours = isinstance(problem, dist.DistError) or "gloo/" in str(problem)
    return count() > 1 and isinstance(problem, RuntimeError) and ours


def silence(problem: Exception) -> str:
    """Say in one line what `is_silence` means."""
    return f"rank {rank()}: another process has ended or does not answer ({str(problem).splitlines()[0]})"


def sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sum the gradients of replicas over the processes, in place; where one has none it counts as 0."""
    anywhere = map(any, zip(*gathered([p.grad is not None for p in parameters]), strict=True))
    for parameter in [p for p, some in zip(parameters, anywhere, strict=True) if some]:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)


def distribute(model: nn.Module, config: "TrainConfig") -> None:
    """Give all processes the first one's weights, and let each keep a piece of them only if `parallel` says so."""
    if count() == 1:
        return
    gathered(None)  # none has failed before this
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), 0)
    if config.parallel == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(config.precision.device.type, (count(),))
        for layer in getattr(backbone(causal_lm(model)), "layers", ()):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)


@contextlib.contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Inside, each process holds all weights of `model` and may run it as often as it likes, without gradient."""
    units: list[Any] = [module for module in model.modules() if is_fsdp2(module)] if count() > 1 else []
    if not units or not holds_pieces(model):
        yield
        return
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units[1:]:  # the outermost one keeps its weights until the backward
            unit.set_reshard_after_forward(True, recurse=False)
        give_back(model)


def whole_state(model: nn.Module) -> dict[str, Tensor] | None:
    """Gather what trains of a model in pieces, on the host of the first process; None for a model that is whole."""
    if not holds_pieces(model):
        return None
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    adapters = hasattr(model, "peft_config")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapters)
    state = get_model_state_dict(model, options=options)
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(model.named_parameters()).keys()
    return {name: value for name, value in state.items() if name not in tied}  # type: ignore[misc]


def _require_possible(config: "TrainConfig", processes: int) -> None:
    """Refuse settings, by name, that several processes cannot follow."""
    problems, device = config.generation_batch_size // config.num_generations, config.precision.device
    place, present = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    gpu, pieces = device.type == "cuda", config.parallel == "fsdp2"
    refusals = {
        f"generation_batch_size must give each of {processes} processes as many problems; it is "
        f"{config.generation_batch_size} completions of {problems} problems": problems % processes != 0,
        f"rollout_engine: {config.rollout_engine} serves one process, and there are {processes}; take transformers": (
            config.rollout_engine != "transformers"
        ),
        f"compare_and_correct: runs in one process, and there are {processes}": config.compare_and_correct > 0,
        f"device: {device} is one GPU, and there are {processes} processes; leave it out or say cuda": (
            gpu and device.index is not None
        ),
        f"device: process {place} of this machine has no GPU; it has {present}; start {present}": (
            gpu and place >= present
        ),
        f"estimator: {config.estimator} takes gradients through a model that is whole in one process, which "
        "parallel=fsdp2 does not keep; take parallel=ddp": pieces and GRADIENTS in config.counterfactual().needs,
    }
    for refusal, holds in refusals.items():
        if holds:
            raise ValueError(refusal)
