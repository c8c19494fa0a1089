"""Exits of two processes that trained with credit; by hand `python -m tests.support.two_process_exits 30 credit`.

The interpreter's end is part of what is watched: the process group of gloo is taken down there, and its threads may
need the interpreter meanwhile. So processes are forked from one that has imported everything, and end as scripts do.
"""

import gc
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from typing import Any

import psutil
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from cfa_kernels.integrations.trl import CounterfactualGRPOTrainer
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.trl_training import PROMPT, same_rollouts, seven

KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "stock": (GRPOTrainer, {}),
    "credit": (CounterfactualGRPOTrainer, {}),
    "packed": (CounterfactualGRPOTrainer, {"packed_loss": True}),
}
PATIENCE = 60  # seconds in which a process neither ends nor uses the processor
LONGEST = 300  # seconds that a process may live


def train_and_save(kind: str, rank: int, port: int, out: str) -> None:
    """What one of two processes does."""
    signal.alarm(LONGEST)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
    os.environ |= {name: str(value) for name, value in (here | {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}).items()}
    cls, given = KINDS[kind]
    arguments = GRPOConfig(
        out, use_cpu=True, bf16=False, per_device_train_batch_size=4, num_generations=8, max_completion_length=16,
        max_steps=1, report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True, shuffle_dataset=False,
    )  # fmt: skip
    trainer = cls(
        model=tiny_model(), args=arguments, processing_class=tiny_tokenizer(), reward_funcs=seven,
        train_dataset=Dataset.from_dict({"prompt": [PROMPT] * 8}), rollout_func=same_rollouts, **given,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(out)


def seconds_used(pid: int) -> float:
    """Processor time of a process; 0 once it has none."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system


def codes_of(started: list[int]) -> list[int | None]:
    """Exit codes; None for processes that stood still, which are killed."""
    codes: dict[int, int | None] = {}
    used, since = -1.0, time.monotonic()
    while len(codes) < len(started):
        left = [pid for pid in started if pid not in codes]
        for pid in left:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid], since = os.waitstatus_to_exitcode(status), time.monotonic()
        now = sum(seconds_used(pid) for pid in left)
        if now != used:
            used, since = now, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            for pid in set(left) - codes.keys():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = None
        time.sleep(0.1)
    return [codes[pid] for pid in started]


def exits(kind: str, count: int) -> list[list[int | None]]:
    """The exit codes of `count` pairs of processes. Children return from here never: they end as a script does."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    found = []
    for _ in range(count):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        out = tempfile.mkdtemp()
        started: list[int] = []
        for rank in range(2):
            pid = os.fork()
            if not pid:
                train_and_save(kind, rank, port, out)
                sys.exit(0)
            started.append(pid)
        found.append(codes_of(started))
        shutil.rmtree(out)
    return found


if __name__ == "__main__":
    ended = exits(sys.argv[2] if len(sys.argv) > 2 else "credit", int(sys.argv[1]))
    wrong = [codes for codes in ended if codes != [0, 0]]
    print(f"{len(ended)} pairs of processes, {len(wrong)} did not end well: {wrong}", flush=True)
    sys.exit(bool(wrong))
