"""The training program on several processes: the run of one, and no process waits for ever."""

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import set_seed

from tests.support import sharded
from tests.support.embedded import COMPARING, metrics_of, run, samples_of, settings
from tests.support.tiny import jsonl, write_tiny
from trainer import processes
from trainer import run as program_run
from trainer.checkpoints import open_run
from trainer.policy import load_policy
from trainer.processes import PeerError, describe_failure, gather, own_share
from trainer.run import seed_all, set_up
from trainer.state import Trainer
from trainer.step import problem_batches, training_step


def for_some(*, paid: Sequence[bool], **_: Any) -> list[float]:
    """Reward every other completion, but of a third of all problems none: their groups have no advantage."""
    return [float(i % 2 and one) for i, one in enumerate(paid)]


def test_rewards_draw_other_numbers_in_each_process_and_the_first_ones_are_those_of_one(monkeypatch) -> None:
    draws = []
    for rank, stream in ((0, 0), (1, 0), (0, 1), (1, 1)):
        monkeypatch.setattr(processes, "rank", lambda rank=rank: rank)
        seed_all(3, 5, stream)
        draws.append((torch.rand(1).item(), np.random.random(), random.random()))
    assert len({*draws}) == 4
    set_seed(int(np.random.SeedSequence((3, 5)).generate_state(1)[0]))
    assert draws[0] == (torch.rand(1).item(), np.random.random(), random.random())


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> list[str]:
    """Flags of runs of a tiny model on 14 problems: four groups a step, each a micro-batch.

    Of two processes the second has no group with an advantage in the first step; in the second step two groups have
    one in the first process, and one in the second.
    """
    folder = write_tiny(tmp_path_factory.mktemp("tiny"))
    ends = itertools.islice(itertools.product(("", " Add"), ("", " and", " halve"), ("", " 3", " 4")), 16)
    rows = [{"question": f"What is 3 + 4 ?{''.join(end)}", "answer": "7", "paid": bool(end[2])} for end in ends]
    (folder / "rows.jsonl").write_text(jsonl(*rows))
    return [
        f"--model={folder / 'model'}", f"--dataset={folder / 'rows.jsonl'}", "--no_use_peft", "--eval_problems=2",
        "--num_generations=4", "--max_completion_length=12", "--no_mask_truncated_completions", "--temperature=1.2",
        "--token_budget=1", "--log_completions=16", "--instruction=", "--seed=14",
        f"--reward_funcs={__name__}:for_some",
    ]  # fmt: skip


def batch_of(trainer: Trainer) -> list[int]:
    """Four problems, of which the first two have advantages."""
    order = sorted(range(len(trainer.rows)), key=lambda i: not trainer.rows[i]["paid"])
    return [*order[:2], *order[-2:]]


def infinite_in_second(*, prompts: Sequence[str], **_: Any) -> list[float]:
    return [float("inf") if processes.rank() == 1 else 0.0 for _ in prompts]


def trained(rank: int, folder: Path, cases: Mapping[str, Sequence[str]], *argv: str) -> None:
    """Train by the settings of each case; of all processes the first writes, to a folder of the case's name."""
    for name, case in cases.items():
        run(folder / name, *argv, *case)


def failing(rank: int, few: Sequence[str]) -> None:
    def other_weights(*args: Any, **options: Any) -> torch.nn.Module:
        policy = load_policy(*args, **options)
        policy.model.norm.weight.data += rank
        return policy

    program_run.load_policy = other_weights
    trainer = set_up(settings(*few))
    assert trainer.policy.model.norm.weight.eq(1).all()  # all have the first one's
    batch = batch_of(trainer)
    weight = trainer.policy.model.norm.weight
    before = weight.detach().clone()
    poison = weight.register_hook(lambda gradient: gradient * torch.nan) if rank == 0 else None
    with pytest.raises(FloatingPointError, match=r"^samples \[0, 1, 2, 3\]: gradient of model.norm.weight is not"):
        training_step(trainer, 1, batch)  # the second process has no advantage: all find what one has
    assert torch.equal(weight, before)
    if poison is not None:
        poison.remove()
    assert describe_failure(ValueError("no such file")) == "no such file"  # the same everywhere
    assert describe_failure(ValueError(f"no such file {rank}")) == "rank 0: no such file 0; rank 1: no such file 1"
    trainer.rewards = {"infinite": infinite_in_second}
    kind = PeerError if rank == 0 else FloatingPointError
    with pytest.raises(kind, match=rf"^{'' if rank else 'rank 1: '}sample 0 \(.*\): reward infinite is inf") as raised:
        training_step(trainer, 1, batch)
    assert describe_failure(raised.value).startswith("rank 1: sample 0 (")
    assert gather(rank) == [0, 1]  # all are in step again


def checkpointed(rank: int, folder: Path, parallel: str, few: Sequence[str]) -> None:
    """A run of several processes goes on from its checkpoint with the same bits; leaves what it had then."""
    trainer = set_up(settings(*few, f"--parallel={parallel}", f"--output_dir={folder / 'run'}"))
    weights, after = [*trainer.policy.parameters()], []

    def own_pieces() -> list[torch.Tensor]:
        return [(w.to_local() if hasattr(w, "to_local") else w).detach().clone() for w in weights]

    with open_run(trainer.config) as run_folder:
        assert run_folder.begin(trainer) == (0, {})
        training_step(trainer, 1, batch_of(trainer))
        run_folder.save(trainer, 1, lambda: {"bytes": {}, "evaluations": [0], "rank": rank})
        for _ in range(2):
            training_step(trainer, 2, [1, 7, 11, 13])
            after.append(own_pieces())
            assert run_folder.begin(trainer) == (1, {"bytes": {}, "evaluations": [0], "rank": 0})
        assert all(map(torch.equal, *after))
        assert not all(map(torch.equal, after[0], own_pieces()))
        nan = torch.nan if rank == 0 else 1.0
        with torch.no_grad():
            weights[0].mul_(nan)
        with pytest.raises(FloatingPointError, match=r"^model: parameter model\.\S+ is not finite"):
            run_folder.save(trainer, 2, lambda: {})


LEARNING_RATE = 1e-3
COMMON = [f"--learning_rate={LEARNING_RATE}", "--num_iterations=2", "--beta=0.05"]
CASES = {
    "all": ["--no_use_peft", "--scale_rewards=batch", "--importance_sampling_clip_max=3", *COMMON],
    "adapters": ["--use_peft", "--dtype=float32", "--lora_r=4", "--loss_type=grpo", *COMMON],
    "top": COMPARING["top of entropies"],
}
UNDER = {"ddp": ("all", "top"), "fsdp2": ("all", "adapters")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, few) -> Path:
    """Runs of one process, "all" in one micro-batch a step."""
    folder = tmp_path_factory.mktemp("alone")
    trained(0, folder, CASES | {"all": [*CASES["all"], "--token_budget=100000"]}, *few)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("parallel", UNDER)
def test_two_processes_train_as_one(alone, few, tmp_path, parallel) -> None:
    cases = {name: CASES[name] for name in UNDER[parallel]}
    sharded.run(2, trained, tmp_path, cases, *few, f"--parallel={parallel}")
    for name in UNDER[parallel]:
        expected, actual = metrics_of(alone / name), metrics_of(tmp_path / name)
        assert len(actual) == len(expected) == 4
        for theirs, ours in zip(expected, actual, strict=True):
            assert ours.keys() == theirs.keys()
            for key in ours:
                # Work depends on how completions are packed; gaps of log-probs are rounding and nothing else.
                if "time" not in key and key not in ("credit/tokens_fed", "credit/forwards"):
                    atol = 1e-4 if key.startswith("sampling/") else 1e-5
                    assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=atol), (name, ours["step"], key)
        same_samples(samples_of(tmp_path / name), samples_of(alone / name))
        same_weights(tmp_path / name, alone / name)


def same_samples(actual: list[dict], expected: list[dict]) -> None:
    """Hold what was sampled to the token, and what tokens weigh; see that the case is what it says it is."""
    assert [sample["tokens"] for sample in actual] == [sample["tokens"] for sample in expected]
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours["weights"] == pytest.approx(theirs["weights"], abs=2e-3)
    batches = problem_batches(14, 4, seed=14)
    for step, groups in ((1, [2, 0]), (2, [2, 1])):  # with an advantage, in each process
        unequal = {sample["problem"] for sample in actual if sample["step"] == step and sample["advantage"]}
        batch = next(batches)
        assert [len(unequal & {*batch[:2]}), len(unequal & {*batch[2:]})] == groups


def same_weights(folder: Path, other: Path) -> None:
    """Hold saved weights to each other, in the mean square: a step of AdamW moves each by about the learning rate.

    Rounding may turn the sign of a gradient that is nearly 0, and with it a whole step of that weight.
    """
    (path,) = (path for path in folder.rglob("*.safetensors") if "checkpoints" not in path.parts)
    actual, expected = load_file(path), load_file(other / path.relative_to(folder))
    assert actual.keys() == expected.keys()
    apart = torch.cat([(actual[name] - expected[name]).flatten() for name in expected])
    assert apart.square().mean().sqrt() < LEARNING_RATE / 20


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_checkpoint_of_two_processes_is_gone_on_from_by_two_and_by_one(few, tmp_path, parallel) -> None:
    sharded.run(2, checkpointed, tmp_path, parallel, few)
    trainer = set_up(settings(*few, f"--output_dir={tmp_path / 'run'}"))
    with open_run(trainer.config) as folder:
        assert folder.begin(trainer) == (1, {"bytes": {}, "evaluations": [0], "rank": 0})
    saved = torch.load(tmp_path / "run" / "checkpoints" / "step-1" / "state.pt", weights_only=True)["weights"]
    own = dict(trainer.policy.named_parameters())
    assert saved.keys() == own.keys()
    assert all(torch.equal(saved[name], own[name]) for name in saved)
    assert len(trainer.optimizer.state) == len(own)
    assert trainer.scheduler.last_epoch == 1


@pytest.mark.slow
def test_what_one_process_cannot_do_ends_all(few) -> None:
    sharded.run(2, failing, few)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--generation_batch_size=8"], "^generation_batch_size: 2 processes cannot share"),
        (["--rollout_engine=vllm", "--eval_problems=1"], "^eval_problems=1: with a vLLM server each of 2 processes"),
        (["--shaping_func=math:gcd"], "^shaping_func: runs in one process, and there are 2"),
        (["--parallel=fsdp2", "--estimator=gradient"], "^estimator: it takes gradients or merges adapters"),
        (["--device=cuda:0"], "^device: cuda:0 is one GPU, and there are 2 processes"),
    ],
)
def test_what_several_processes_cannot_do_is_refused_before_they_join(argv, named, monkeypatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=named):
        processes.start(settings(*argv))


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
def test_shares_make_up_the_whole_in_its_order(processes, monkeypatch) -> None:
    monkeypatch.setattr("trainer.processes.count", lambda: processes)
    shares = []
    for rank in range(processes):
        monkeypatch.setattr("trainer.processes.rank", lambda rank=rank: rank)
        shares.append(own_share(list(range(10))))
    assert [*itertools.chain.from_iterable(shares)] == list(range(10))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
