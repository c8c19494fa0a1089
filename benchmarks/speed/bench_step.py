"""Race a training step, credit and update on recorded rollouts, against what trainers do today.

Table 8 of the CF paper, side by side in one run. Every contender replays the same completions with their own rewards
and leaves a gradient, which is held to padded autograd in higher precision before anything is timed. No optimizer
steps, no sampling.
"""

import contextlib
import copy
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel

from benchmarks.harness.race import Absent, Budget, Contender, Lap, Race, race, release_memory
from benchmarks.harness.workloads import JobRollouts, gsm8k_rollouts, policy
from benchmarks.speed.replay import Replay, StepPeer, Stopwatch
from benchmarks.speed.step_peers import EXACT, STEP_PEERS, TRL
from benchmarks.speed.step_reference import StepResult, Truth, taken_gradients
from cfa_kernels.model.check.verify import check_trainable
from cfa_kernels.model.parts import backbone, causal_lm


@dataclass(frozen=True)
class StepWorkload:
    """A model, how it is trained, the rollouts, and what the step is to reach there."""

    model: str
    lora: bool
    rollouts: Callable[[], JobRollouts]
    dtype: torch.dtype
    floors: dict[str, float] = field(default_factory=dict)
    """Least times of contenders, in units of our counterfactual step."""


_FLOORS = {"all mixed": 1 / 0.35, "as they come": 5.0}
"""Promises on a CPU against TRL, with adapters, by whether all groups are mixed."""


def _gsm8k(model: str, problems: int, dtype: torch.dtype, *, promised: bool) -> dict[str, StepWorkload]:
    """Adapters and full training, all groups mixed and groups as they come."""
    return {
        f"{model} {trains}, {problems} x 4, {groups}": StepWorkload(
            model, trains == "LoRA", functools.partial(gsm8k_rollouts, problems, mixed=groups == "all mixed"), dtype,
            {TRL: floor} if promised and trains == "LoRA" else {},
        )
        for trains in ("LoRA", "full") for groups, floor in _FLOORS.items()
    }  # fmt: skip


WORKLOADS: dict[str, dict[str, StepWorkload]] = {
    "smoke": {
        "qwen3-tiny LoRA, 1 x 4": StepWorkload(
            "qwen3-tiny", True, functools.partial(gsm8k_rollouts, 1, mixed=True), torch.float32
        )
    },
    "cpu": _gsm8k("qwen3-40m", 4, torch.float32, promised=True),
    "cuda": _gsm8k("Qwen3-1.7B", 8, torch.bfloat16, promised=False),
}


# Contenders


@dataclass
class Measured:
    """Costs of a contender's runs other than the race's clock, and counts of what the first of them fed."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {"credit": [], "update": []})
    cpu_seconds: dict[str, list[float]] = field(default_factory=lambda: {"credit": [], "update": []})
    fed: dict[str, float] = field(default_factory=dict)


def step_contenders(
    replay: Replay, fresh: Callable[[], nn.Module], names: Sequence[str]
) -> tuple[list[Contender], dict[str, Measured]]:
    """The peers as contenders, each checked against padded autograd in higher precision.

    `fresh` makes the same policy anew. The references are made here, of a policy that TRL has not yet changed.
    """
    if "forward" in vars(replay.causal):
        raise ValueError("replay: its policy's forward has been replaced; references need a fresh policy")
    dtype = next(replay.policy.parameters()).dtype
    check_trainable(replay.causal)  # once per model; not to be counted, nor timed
    exact = copy.deepcopy(replay.policy)
    exact.to(torch.float64 if dtype == torch.float32 else torch.float32)
    truths: dict[str, Truth] = {}
    absent: dict[str, str] = {}
    for kind in dict.fromkeys(STEP_PEERS[name].kind for name in names):
        try:
            truths[kind] = Truth.of(kind, replay.policy, exact, replay.rollouts)
        except Absent as error:
            absent[kind] = str(error)
    del exact
    release_memory(replay.device)
    eps = torch.finfo(dtype).eps
    measured = {name: Measured() for name in names}

    def contender(name: str) -> Contender:
        peer, notes = STEP_PEERS[name], measured[name]
        # Made before anything runs, so that no contender's peak memory includes it.
        own = peer.own_policy and peer.kind not in absent
        used = Replay(fresh(), replay.rollouts) if own else replay

        def run() -> StepResult:
            stopwatch = Stopwatch(replay.device)
            if notes.fed:
                loss, weights = peer.run(used, stopwatch)
                for own, sums in ((notes.seconds, stopwatch.seconds()), (notes.cpu_seconds, stopwatch.cpu_seconds())):
                    own["credit"].append(sums.pop("credit"))
                    own["update"].append(sum(sums.values()))
            else:
                peer.prepare(used)
                with rows_fed(causal_lm(used.policy)) as rows:
                    loss, weights = peer.run(used, stopwatch)
                notes.fed.update(rows | operations(used, peer, rows))
            return StepResult(loss.item(), weights, taken_gradients(used.policy))

        def check(result: StepResult) -> dict[str, Any]:
            return truths[peer.kind].check(result, eps) | notes.fed

        return Contender(name, run, check, absent.get(peer.kind))

    return [contender(name) for name in names], measured


@contextlib.contextmanager
def rows_fed(causal: PreTrainedModel) -> Iterator[dict[str, float]]:
    """Count the rows that go through the model, padding included, with and without gradient.

    By a hook on all modules: one on the model would have its self-check run anew, and count that.
    """
    rows = {"rows_with_gradient": 0, "rows_without_gradient": 0, "head_rows_without_gradient": 0}
    body, head = backbone(causal), causal.get_output_embeddings()

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if module is body:
            ids = args[0] if args else kwargs["input_ids"]
            rows["rows_with_gradient" if torch.is_grad_enabled() else "rows_without_gradient"] += ids.numel()
        elif module is head and not torch.is_grad_enabled():
            rows["head_rows_without_gradient"] += output.numel() // output.shape[-1]

    hook = register_module_forward_hook(count, with_kwargs=True)
    try:
        yield rows
    finally:
        hook.remove()


def operations(replay: Replay, peer: StepPeer, fed: dict[str, float]) -> dict[str, float]:
    """Multiply-adds, twice, in the linear layers: what a step's time should go by. Attention is left out.

    A row with gradient goes through a layer forwards and back, and once more for the weight if that trains.
    """
    causal = replay.causal
    head = causal.get_output_embeddings()
    head_trains = head.weight.requires_grad
    passes_back = 2 if head_trains else 1
    inside = sum(m.weight.numel() for m in backbone(causal).modules() if isinstance(m, nn.Linear))
    job = replay.job
    rows = {
        "active": sum(len(job.completions[b]) for b in replay.rollouts.active),
        "tokens": replay.rollouts.tokens,
        "positions": fed["rows_with_gradient"] if replay.device.type == "cpu" else replay.rollouts.tokens,
    }
    body = fed["rows_without_gradient"] + (1 + passes_back) * fed["rows_with_gradient"]
    through_head = fed["head_rows_without_gradient"] + (peer.head_products + head_trains) * rows[peer.head_rows]
    return {"flops": 2.0 * inside * body + 2.0 * head.weight.numel() * through_head}


@contextlib.contextmanager
def one_pinned_thread() -> Iterator[None]:
    """A single thread that stays on one core."""
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    try:
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {min(cores)})
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def pinned_cpu_seconds(contenders: Sequence[Contender], rounds: int) -> dict[str, list[float]]:
    """The processor's seconds of each contender on one pinned thread, in turns: what other work hardly changes."""
    result: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    with one_pinned_thread():
        for i in range(rounds):
            turn = i % max(len(contenders), 1)
            for contender in [*contenders[turn:], *contenders[:turn]]:
                start = time.process_time()
                contender.run()
                result[contender.name].append(time.process_time() - start)
    return result


# Tests

NAMES = list(STEP_PEERS)
CHOOSES_PEERS = True


@pytest.fixture(scope="module")
def step_race(
    workload: str, chosen: StepWorkload, names: list[str], device: torch.device, budget: Budget
) -> Iterator[Race]:
    fresh = functools.partial(policy, chosen.model, lora=chosen.lora, device=device, dtype=chosen.dtype)
    rollouts = chosen.rollouts().to(device)
    replay = Replay(fresh(), rollouts)
    facts = {**rollouts.describe(), "tokens": rollouts.tokens}
    yield Race(f"step, {workload}", run_race(replay, fresh, names, budget), facts, EXACT, chosen.floors)
    del replay
    release_memory(device)


def run_race(replay: Replay, fresh: Callable[[], nn.Module], names: Sequence[str], budget: Budget) -> dict[str, Lap]:
    """Check and time the step's contenders."""
    contenders, measured = step_contenders(replay, fresh, names)
    laps = race(contenders, device=replay.device, budget=budget)
    timed = [contender for contender in contenders if laps[contender.name].seconds]
    pinned: dict[str, list[float]] = {}
    if replay.device.type == "cpu" and budget.max_rounds > 1:
        pinned = pinned_cpu_seconds(timed, budget.min_rounds)
    for contender in timed:
        lap, notes, on_one_thread = laps[contender.name], measured[contender.name], pinned.get(contender.name, [])
        if on_one_thread:
            lap.facts["cpu_seconds"] = statistics.median(on_one_thread)
        for part in ("credit", "update"):  # the pinned rounds come last, what only warmed up first
            wall = notes.seconds[part][: len(notes.seconds[part]) - len(on_one_thread)]
            lap.facts[f"{part}_seconds"] = statistics.median(wall[-len(lap.seconds) :])
            if on_one_thread:
                lap.facts[f"{part}_cpu_seconds"] = statistics.median(notes.cpu_seconds[part][-len(on_one_thread) :])
    return laps


def test_step(step_race: Race, name: str, report: Callable[..., None]) -> None:
    report(step_race, name)
