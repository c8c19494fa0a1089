"""Training with credit on two processes of DDP is training on one."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny import tiny_model, tiny_tokenizer

pytest.importorskip("cfa_kernels.integrations.trl", reason="TRL is not installed", exc_type=ImportError)

from datasets import Dataset
from trl import GRPOConfig

from cfa_kernels.integrations.trl import CounterfactualGRPOTrainer
from tests.support.trl_training import LORA, PROMPT, packs, parameters, same_rollouts, seven


def first_half(completions: list[Any], trainer_state: Any, **kwargs: object) -> list[float]:
    """No advantage for the second half of eight: the mean is theirs."""
    first = int(os.environ.get("RANK", 0)) * len(completions)
    return [(1.0, 0.0, 0.5)[i % 2 if i < 4 else 2] for i in range(first, first + len(completions))]


# by name: arguments of the trainer
LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": {"packed_loss": True},
    "packed, LoRA": {"packed_loss": True, "peft_config": LORA},
    "packed, nothing to feed in one": {
        "packed_loss": True, "log_entropy": False, "reward_funcs": first_half, "peft_config": LORA,
    },
}  # fmt: skip


def train_part(processes: int, out: Path) -> dict[str, Any]:
    """What one of `processes` does, and what came of it, by loss."""
    arguments = GRPOConfig(
        str(out), use_cpu=True, bf16=False, per_device_train_batch_size=8 // processes, num_generations=8,
        max_completion_length=16, max_steps=2, report_to=[], logging_steps=1, save_strategy="no", learning_rate=1e-2,
        disable_tqdm=True, shuffle_dataset=False, optim="sgd",
    )  # fmt: skip
    results = {}
    for loss, given in LOSSES.items():
        trainer = CounterfactualGRPOTrainer(
            model=tiny_model(), args=arguments, processing_class=tiny_tokenizer(),
            train_dataset=Dataset.from_dict({"prompt": [PROMPT] * 8}), rollout_func=same_rollouts,
            **{"reward_funcs": seven} | given,
        )  # fmt: skip
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "credit/tokens_fed" in entry]
        drawn = trainer.accelerator.gather(torch.rand(1, generator=trainer._draws.of(0)))
        results[loss] = {"state": parameters(trainer), "log": log, "processes": len(drawn), "drawn": drawn}
    return results


def train_as_one_of_two(rank: int, port: int, out: Path) -> None:
    """What process `rank` does; the first one saves what came of it."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    results = train_part(2, out)
    if rank == 0:
        torch.save(results, out / "two.pt")


@packs
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_processes_train_as_one(processes, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        processes.Process(target=train_as_one_of_two, args=(rank, port, tmp_path), daemon=True) for rank in range(2)
    ]
    for process in started:
        process.start()
    alone = train_part(1, tmp_path)
    for process in started:
        process.join(timeout=600)
        process.kill()  # one that has ended keeps its exit code
    assert [process.exitcode for process in started] == [0, 0]
    together = torch.load(tmp_path / "two.pt", weights_only=False)
    for loss in LOSSES:
        one, two = alone[loss], together[loss]
        assert (one["processes"], two["processes"]) == (1, 2)
        assert two["drawn"].unique().numel() == 2  # random weights differ from process to process
        for name, value in one["state"].items():
            torch.testing.assert_close(two["state"][name], value, rtol=1e-3, atol=1e-6, msg=f"{loss}: {name}")
        for a, b in zip(one["log"], two["log"], strict=True):
            assert float(b["loss"]) == pytest.approx(float(a["loss"]), rel=1e-3, abs=1e-6)
            assert float(b["credit/drop_min"]) == pytest.approx(float(a["credit/drop_min"]), rel=1e-3)
            idle = loss == "packed, nothing to feed in one"
            assert float(b["credit/forwards"]) == (2 - idle) * float(a["credit/forwards"])  # each scores its own rows
            if "packed" in loss:  # each feeds the prompt, but one whose rows need nothing feeds a single token
                more = float(b["packed/tokens_fed"]) - float(a["packed/tokens_fed"])
                assert more == 1 if idle else more > len(PROMPT.split())
