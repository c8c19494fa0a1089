"""What each of several processes does in `tests/trainer/test_processes.py`: train as `python -m trainer` does."""

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tests.support.embedded import run, settings
from trainer import processes
from trainer.processes import OtherProcessFailed, failed, gathered
from trainer.run import set_up
from trainer.step import training_step

FEW = [
    "--num_generations=4", "--max_completion_length=64", "--no_mask_truncated_completions", "--temperature=1.2",
    "--token_budget=1", "--log_completions=16", "--seed=1", f"--reward_funcs={__name__}:for_some",
]  # fmt: skip
"""Four groups a step, each a micro-batch. Of two processes the second has none with an advantage in the first step, and
in the second step two have advantages in the first process, one in the second."""


def for_some(*, prompts: Sequence[str], **_: Any) -> list[float]:
    """Reward every other completion, but of a third of all problems none: their groups have no advantage."""
    return [float(i % 2 and sum(map(ord, prompt)) % 3 > 0) for i, prompt in enumerate(prompts)]


def infinite_in_second(*, prompts: Sequence[str], **_: Any) -> list[float]:
    """Give what is no reward, in the second process only."""
    return [float("inf") if processes.rank() == 1 else 0.0 for _ in prompts]


def dies_in_second(*, prompts: Sequence[str], **_: Any) -> list[float]:
    """End the second process without a word."""
    if processes.rank() == 1:
        os._exit(0)
    return [0.0 for _ in prompts]


def trained(rank: int, folder: Path, cases: Mapping[str, Sequence[str]], *argv: str) -> None:
    """Train by the settings of each case; of all processes the first writes, to a folder of the case's name."""
    for name, case in cases.items():
        run(folder / name, *FEW, *case, *argv)


def failing(rank: int) -> None:
    """What one process cannot do ends all, in the same words; what dies leaves none waiting."""
    trainer = set_up(settings(*FEW, "--max_completion_length=12"))
    weight = trainer.policy.model.norm.weight
    before = weight.detach().clone()
    poison = weight.register_hook(lambda gradient: gradient * torch.nan) if rank == 0 else None
    with pytest.raises(FloatingPointError, match=r"^samples \[0, 1, 2, 3\]: gradient of model.norm.weight is not"):
        training_step(trainer, 1, [4, 9, 13, 12])  # the second process has no advantage: all find what one has
    assert torch.equal(weight, before)
    if poison is not None:
        poison.remove()
    assert failed(ValueError("no such file")) == "no such file"  # the same everywhere
    assert failed(ValueError(f"no such file {rank}")) == "rank 0: no such file 0; rank 1: no such file 1"
    trainer.rewards = {"infinite": infinite_in_second}
    kind = OtherProcessFailed if rank == 0 else FloatingPointError
    with pytest.raises(kind, match=rf"^{'' if rank else 'rank 1: '}sample 0 \(.*\): reward infinite is inf") as raised:
        training_step(trainer, 1, [4, 9, 13, 12])
    assert failed(raised.value).startswith("rank 1: sample 0 (")
    assert gathered(rank) == [0, 1]  # all are in step again
    trainer.rewards = {"dies": dies_in_second}
    with pytest.raises(OtherProcessFailed, match=r"^rank 0: another process has ended or does not answer"):
        training_step(trainer, 1, [4, 9, 13, 12])
    os._exit(0)  # nobody is left to part from


def kept(rank: int) -> None:
    """Model and optimizer in pieces, kept as a whole, make the same step again when they come back."""
    trainer = set_up(settings(*FEW, "--max_completion_length=12", "--parallel=fsdp2"))
    training_step(trainer, 1, [4, 9, 13, 12])
    model, optimizer = trainer.policy, trainer.optimizer
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = copy.deepcopy(
        get_state_dict(model, optimizer, options=whole)
    )  # some of it is the optimizer's own
    assert bool(weights) == bool(moments) == (rank == 0)  # on the first process only
    after, back = [], StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for _ in range(2):
        training_step(trainer, 2, [1, 15, 11, 7])
        after.append([weight.to_local().clone() for weight in model.parameters()])
        set_model_state_dict(model, {**weights}, options=back)  # not `set_state_dict`: it takes {} for no model
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(moments), options=back)  # which writes to it
    restored = [weight.to_local() for weight in model.parameters()]
    assert all(map(torch.equal, *after))
    assert not all(map(torch.equal, after[0], restored))
