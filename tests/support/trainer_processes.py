"""What each of several processes does in `tests/trainer/test_processes.py`: train as `python -m trainer` does."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.embedded import SMALL, run, settings
from tests.support.runs import main
from trainer import processes
from trainer.checkpoints.run_folder import open_run
from trainer.processes import PeerError, describe_failure, gather
from trainer.run import set_up
from trainer.state import Trainer
from trainer.step import training_step

FEW = [
    "--num_generations=4", "--max_completion_length=64", "--no_mask_truncated_completions", "--temperature=1.2",
    "--token_budget=1", "--log_completions=16", "--seed=10", f"--reward_funcs={__name__}:for_some",
]  # fmt: skip
"""Four groups a step, each a micro-batch. Of two processes the second has none with an advantage in the first step, and
in the second step two have advantages in the first process, one in the second."""


def for_some(*, prompts: Sequence[str], **_: Any) -> list[float]:
    """Reward every other completion, but of a third of all problems none: their groups have no advantage."""
    return [float(i % 2 and sum(map(ord, prompt)) % 3 > 0) for i, prompt in enumerate(prompts)]


def infinite_in_second(*, prompts: Sequence[str], **_: Any) -> list[float]:
    """Give what is no reward, in the second process only."""
    return [float("inf") if processes.rank() == 1 else 0.0 for _ in prompts]


def trained(rank: int, folder: Path, cases: Mapping[str, Sequence[str]], *argv: str) -> None:
    """Train by the settings of each case; of all processes the first writes, to a folder of the case's name."""
    for name, case in cases.items():
        run(folder / name, *FEW, *case, *argv)


def failing(rank: int) -> None:
    """What one process cannot do ends all, in the same words."""
    trainer = set_up(settings(*FEW, "--max_completion_length=12"))
    weight = trainer.policy.model.norm.weight
    before = weight.detach().clone()
    poison = weight.register_hook(lambda gradient: gradient * torch.nan) if rank == 0 else None
    with pytest.raises(FloatingPointError, match=r"^samples \[0, 1, 2, 3\]: gradient of model.norm.weight is not"):
        training_step(trainer, 1, [4, 13, 9, 12])  # the second process has no advantage: all find what one has
    assert torch.equal(weight, before)
    if poison is not None:
        poison.remove()
    assert describe_failure(ValueError("no such file")) == "no such file"  # the same everywhere
    assert describe_failure(ValueError(f"no such file {rank}")) == "rank 0: no such file 0; rank 1: no such file 1"
    trainer.rewards = {"infinite": infinite_in_second}
    kind = PeerError if rank == 0 else FloatingPointError
    with pytest.raises(kind, match=rf"^{'' if rank else 'rank 1: '}sample 0 \(.*\): reward infinite is inf") as raised:
        training_step(trainer, 1, [4, 13, 9, 12])
    assert describe_failure(raised.value).startswith("rank 1: sample 0 (")
    assert gather(rank) == [0, 1]  # all are in step again


def left_while_sampling(rank: int, folder: Path, parallel: str) -> None:
    """The process that is left where the other dies while it samples says so in one line."""

    def dies(*_: Any, **__: Any) -> None:
        os._exit(0)

    if rank == 1:
        Trainer.sample = dies  # type: ignore[method-assign]
    argv = [*SMALL, *FEW, "--max_completion_length=12", f"--parallel={parallel}", f"--output_dir={folder / 'run'}"]
    code, _, said = main(argv)
    assert code == 1
    assert re.fullmatch(r"error: rank 0: another process has ended or does not answer \(.*\)\n", said)
    os._exit(0)  # nobody is left to part from


def checkpointed(rank: int, folder: Path, parallel: str) -> None:
    """A run of several processes goes on from its checkpoint with the same bits; leaves what it had then."""
    argv = [*FEW, "--max_completion_length=12", f"--parallel={parallel}", f"--output_dir={folder / 'run'}"]
    trainer = set_up(settings(*argv))
    weights, after = [*trainer.policy.parameters()], []

    def own_pieces() -> list[torch.Tensor]:
        return [(w.to_local() if hasattr(w, "to_local") else w).detach().clone() for w in weights]

    with open_run(trainer.config) as run_folder:
        assert run_folder.begin(trainer) == (0, {})
        training_step(trainer, 1, [4, 13, 9, 12])
        run_folder.save(trainer, 1, lambda: {"bytes": {}, "rank": rank})
        for _ in range(2):
            training_step(trainer, 2, [1, 15, 11, 7])
            after.append(own_pieces())
            assert run_folder.begin(trainer) == (1, {"bytes": {}, "rank": 0})
        assert all(map(torch.equal, *after))
        assert not all(map(torch.equal, after[0], own_pieces()))
        nan = torch.nan if rank == 0 else 1.0
        with torch.no_grad():
            weights[0].mul_(nan)
        with pytest.raises(FloatingPointError, match=r"^model: parameter model\.\S+ is not finite"):
            run_folder.save(trainer, 2, lambda: {})
