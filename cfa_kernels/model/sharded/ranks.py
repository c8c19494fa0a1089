"""Keep the processes that share a model in step while all of them are inside its outermost module.

Weights of a sharded model are gathered layer by layer, so each process must run every layer as often as the others.
One whose work is done feeds idle packs until all are done, and if one fails all raise.
"""

import builtins
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from .fsdp import gather_zero3


class PeerFailed(BaseException):
    """Another process could not do its part: ends the body of one that could, and never leaves `run_inside`."""


class _Met(NamedTuple):
    """Numbers that processes exchange; the largest of each counts."""

    forward: float = 0  # 1: about to run a forward
    working: float = 0  # 1: not done with its work
    failed: float = 0  # 1: could not do it
    number: float = 0  # to compare


class Ranks:
    """Processes of a `group` that share a causal model by sharding it; `idle` runs a forward of one token as theirs."""

    checked = False  # whether all have checked the model, after which each goes its own way

    def __init__(self, model: nn.Module, group: Any, idle: Callable[[], object]) -> None:
        self.model, self._control, self._idle = model, _control_group(group), idle

    def before_forward(self) -> None:
        """Wait until every process is about to run a forward or has done its work; raise if one has failed."""
        if self._meet(_Met(forward=1, working=1)).failed:
            raise PeerFailed

    def largest(self, number: float) -> float:
        """Return the largest `number` of all processes, which all call this; raise if one has failed."""
        met = self._meet(_Met(working=1, number=number))
        if met.failed:
            raise PeerFailed
        if met.forward:
            self._idle()
            raise RuntimeError("processes that share a model are not at the same place: one waits, one runs a forward")
        return met.number

    def forwards(self, count: int) -> int:
        """Return how many forwards with gradient each process must run, where this one has `count` to do."""
        return int(self.largest(count))

    def differ(self, number: float) -> bool:
        """Whether processes, which all call this, have different numbers."""
        return self.largest(number) != -self.largest(-number)

    def finish(self, failed: bool) -> tuple[bool, Exception | None]:
        """Feed idle packs until all are done or one has failed; return whether one has, and this process's error."""
        problem = None
        while True:
            met = self._meet(_Met(failed=failed))
            failed = failed or bool(met.failed)
            if not met.working:
                return failed, problem
            if met.forward and not met.failed:
                try:
                    self._idle()
                except Exception as error:
                    problem, failed = error, True

    def agree(self, problem: Exception | None) -> None:
        """Raise on all processes if one has a problem: its own there, that of the first by rank elsewhere."""
        if not self._meet(_Met(failed=problem is not None)).failed:
            return
        problems: list[Any] = [None] * dist.get_world_size(self._control)
        dist.all_gather_object(problems, problem and (type(problem).__name__, str(problem)), self._control)
        if problem is not None:
            raise problem
        raise next(raised_by(rank, *one) for rank, one in enumerate(problems) if one is not None)

    def _meet(self, met: _Met) -> _Met:
        numbers = torch.tensor(met, dtype=torch.float64)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, self._control)
        return _Met(*numbers.tolist())


def raised_by(rank: int, kind: str, text: str) -> Exception:
    """Make an error that tells what a process raised: of the same type if that is an ordinary built-in one."""
    if kind in ("ValueError", "TypeError", "NotImplementedError", "FloatingPointError", "RuntimeError"):
        return getattr(builtins, kind)(f"rank {rank}: {text}")  # type: ignore[no-any-return]
    return RuntimeError(f"rank {rank}: {kind}: {text}")


class Replicas:
    """Processes that hold a whole model each and share its gradients: a backward of one needs one of all."""

    checked = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def before_forward(self) -> None:
        """Wait for nothing."""

    def largest(self, number: float) -> float:
        """Return `number`: models are equal."""
        return number

    def forwards(self, count: int) -> int:
        """Return `count`, at least 1."""
        return max(count, 1)


class HeldForward:
    """The `forward` of a layer of a model that processes share: an error is held back, and the input handed on.

    With `gathers` the weights of that module are gathered before: ZeRO-3 would those of each part, of which one may
    fail.
    """

    def __init__(self, forward: Callable[..., Any], errors: list[Exception], gathers: nn.Module | None) -> None:
        self.forward, self._errors, self._gathers = forward, errors, gathers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward`, unless a layer before has failed."""
        with ExitStack() as gathered:
            if self._gathers is not None:
                gather_zero3(self._gathers.modules(), gathered)
            try:
                if not self._errors:
                    return self.forward(*args, **kwargs)
            except Exception as error:
                self._errors.append(error)
        return args[0] if args else kwargs["hidden_states"]


_CONTROL: dict[Any, Any] = {}


def _control_group(group: Any) -> Any:
    """Make a gloo group of the same processes, once: what they exchange must not wait for a device."""
    if group not in _CONTROL:
        members = dist.get_process_group_ranks(group)
        _CONTROL[group] = dist.new_group(members, backend="gloo", use_local_synchronization=True)
    return _CONTROL[group]


INSIDE: ContextVar[Ranks | Replicas | None] = ContextVar("cfa_ranks", default=None)


def inside(model: nn.Module) -> Ranks | Replicas | None:
    """Return the processes that share a causal model whose outermost module is running; None for any other model."""
    ranks = INSIDE.get()
    return ranks if ranks is not None and ranks.model is model else None
