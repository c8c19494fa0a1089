"""Runs of the training program on the tiny model that are disturbed: killed, interrupted, out of space."""

import contextlib
import io
import json
import os
import random
import signal
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.forking import server
from tests.support.tiny import tiny_model, tiny_tokenizer
from trainer import __main__ as program
from trainer.cli import parse, refusing
from trainer.config import TrainConfig

SECONDS = 120
DISTURBANCES: list[Callable[[int], None]] = []
"""Called by `reward` with the number of the call: one a step. A test puts in what goes wrong."""
_CALLS = [0]


def reward(completions: list[str], **_: Any) -> list[float]:
    """A reward that draws from the global random states, and under which every group has advantages."""
    _CALLS[0] += 1
    for disturb in DISTURBANCES:
        disturb(_CALLS[0])
    noise = random.random() + np.random.random() + torch.rand(()).item()
    return [i % 2 + 0.1 * noise * (i % 3) for i in range(len(completions))]


def flags(model: Path, folder: Path | None, *more: str) -> list[str]:
    """Six steps of two optimizer steps each, all weights of the tiny model; an evaluation and checkpoints between."""
    if not model.exists():
        tiny_model().save_pretrained(model)
        tiny_tokenizer().save_pretrained(model)
    return [
        f"--model={model}", "--device=cpu", "--train_problems=6", "--eval_problems=2", "--no_use_peft",
        "--generation_batch_size=8", "--num_generations=4", "--max_steps=6",
        "--save_steps=2", "--eval_steps=3", "--num_iterations=2", "--learning_rate=1e-3", "--log_completions=2",
        "--max_completion_length=8", "--no_mask_truncated_completions", f"--reward_funcs={__name__}:reward",
        "--estimator=masking",
        *([] if folder is None else [f"--output_dir={folder}"]), *more,
    ]  # fmt: skip


def config(*argv: str) -> TrainConfig:
    """Check flags as the program does; credit is by masking, the class default, unless they name another."""
    named = any(flag.startswith(("--config", "--credit", "--estimator")) for flag in argv)
    prog, masking = "python -m trainer", [] if named else ["--estimator=masking"]
    with refusing(prog):
        return TrainConfig(**vars(parse([*masking, *argv], prog=prog)))


def main(argv: list[str], *disturbances: Callable[[int], None]) -> tuple[int, str, str]:
    """Run the program in this process; gives exit code, stdout and stderr."""
    DISTURBANCES[:], _CALLS[0] = disturbances, 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = program.main(argv)
        finally:
            DISTURBANCES.clear()
    return code, " ".join(out.getvalue().split()), err.getvalue()


def child(work: Callable[..., Any], *args: Any, deadline: float = SECONDS) -> tuple[int, Any]:
    """Do `work` in a process forked from one that has imported everything; gives its exit code and what it returned."""
    context = server()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_in_child, args=(theirs, work, args), daemon=True)
    process.start()
    theirs.close()
    ours.recv()
    answer = None
    if wait([ours, process.sentinel], deadline):  # an answer of more than a pipe holds is read before the process ends
        with contextlib.suppress(EOFError):
            answer = ours.recv() if ours.poll() else None
        process.join(SECONDS)
    if process.is_alive():
        process.kill()
        raise TimeoutError(f"a run did not end in {deadline} seconds")
    assert process.exitcode is not None
    return process.exitcode, answer


def _in_child(connection: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    connection.send("started")
    connection.send(work(*args))


def printed(main: Callable[[list[str]], int], argv: list[str]) -> tuple[int, str]:
    """What a program's `main` returns and prints in a process of its own, or minus the signal that killed it."""
    ended, answer = child(_printed, main, argv, deadline=600)
    return answer or (ended, "")


def _printed(main: Callable[[list[str]], int], argv: list[str]) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return int(main(argv)), out.getvalue()


def kill_at(moment: int, argv: list[str], of: str = "") -> None:
    """Run, and be killed at a moment: before or after a wait for the disk, in a reward, before an update of weights.

    With `of` only moments of one kind are counted: "disk", "reward" or "update".
    """
    seen = [0]

    def counted(kind: str) -> None:
        seen[0] += of in ("", kind)
        if seen[0] == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    sync, step = os.fsync, torch.optim.AdamW.step

    def counted_sync(file: int) -> None:
        counted("disk")
        sync(file)
        counted("disk")

    def counted_step(optimizer: Any, *args: Any, **options: Any) -> Any:
        counted("update")
        return step(optimizer, *args, **options)

    os.fsync, torch.optim.AdamW.step = counted_sync, counted_step  # type: ignore[method-assign]
    main(argv, lambda _: counted("reward"))
    raise AssertionError(f"a run has only {seen[0]} moments")


def timeless(folder: Path) -> list[dict[str, float]]:
    """What a run measured, but for times."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [{k: v for k, v in entry.items() if k != "step_time" and not k.startswith("time/")} for entry in entries]


def outcome(folder: Path, trained: str = "checkpoint/model.safetensors") -> dict[str, Any]:
    """All that a run leaves behind but for times: weights to the byte, metrics, samples, summary, optimizer."""
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    last = max((folder / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step-")))
    return {
        "weights": (folder / trained).read_bytes(),
        "optimizer": bits(torch.load(last / "state.pt", weights_only=True)["optimizer"]), "metrics": timeless(folder),
        "completions": (folder / "completions.jsonl").read_text("utf-8"),
        "summary": summary | {"seconds": None, "made_by": None},
        "files": sorted(path.name for path in folder.iterdir()), "last": last.name,
    }  # fmt: skip


def bits(value: Any) -> Any:
    """Plain values as they are, tensors by their bytes."""
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    return value.numpy().tobytes() if isinstance(value, torch.Tensor) else value
