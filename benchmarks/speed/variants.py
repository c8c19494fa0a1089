"""Race steps of one model in turns in one process, as variants: the layers that a policy runs with."""

import contextlib
import functools
import gc
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import is_liger_kernel_available

from benchmarks.harness.race import release_memory, spread
from benchmarks.harness.workloads import JobRollouts, policy, shaped_rollouts
from benchmarks.speed.replay import Replay, Stopwatch
from benchmarks.speed.step_peers import STEP_PEERS, TRL
from benchmarks.speed.step_reference import taken_gradients
from cfa_kernels import compile_layers
from cfa_kernels.model.check.verify import check_trainable
from cfa_kernels.model.compiled import EAGER
from cfa_kernels.model.modes import value_of
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.scoring.packed import PackedForward

AS_RACED, LIGER, COMPILED = "HF's layers", "Liger", "compiled"  # Liger's kernels cannot be traced
MERGED = ", merged"  # of a variant: merge_adapters, with the copy that sampling leaves, so that no round makes one
TRL_LIGER = "TRL, all rows at a time, use_liger_kernel"


def _shape(problems: int, group: int, prompt: int, completion: int, spans: int = 6) -> Callable[[], JobRollouts]:
    return functools.partial(shaped_rollouts, problems, group=group, prompt=prompt, completion=completion, spans=spans)


LOADS = {
    "cuda": {"4x8": _shape(4, 8, 110, 220), "8x8": _shape(8, 8, 110, 220), "long": _shape(8, 8, 2048, 220)},
    "smoke": {"4x8": _shape(1, 2, 5, 30, 2), "8x8": _shape(2, 2, 5, 30, 2), "long": _shape(1, 2, 20, 30, 2)},
}


class Bench:
    """The model and its variants, the result document, and the clock of the whole run."""

    def __init__(self, device: torch.device, *, smoke: bool, budget: float, rounds: int) -> None:
        self.device, self.smoke, self.rounds = device, smoke, rounds
        self.loads = LOADS["smoke" if smoke else "cuda"]
        self.name, self.dtype = ("qwen3-tiny", torch.float32) if smoke else ("Qwen3-1.7B", torch.bfloat16)
        self._ends, self.block_ends = time.monotonic() + budget, math.inf
        self.finished: list[dict[str, Any]] = []
        """Figures of the running block, kept where it is stopped."""
        self._replays: dict[str, Replay] = {}
        self._compiled: list[str] | None = None

    @functools.cached_property
    def model(self) -> nn.Module:
        """The policy that all variants of ours share."""
        return self.fresh()

    def fresh(self) -> nn.Module:
        """Make the policy anew, with the same weights."""
        return policy(self.name, lora=True, device=self.device, dtype=self.dtype)

    def replay(self, load: str) -> Replay:
        """The load's rollouts, for the shared policy."""
        if load not in self._replays:
            self._replays[load] = Replay(self.model, self.loads[load]().to(self.device))
        return self._replays[load]

    @contextlib.contextmanager
    def variant(self, name: str) -> Iterator[None]:
        """Run the shared policy as a variant does."""
        layers = name.removesuffix(MERGED)
        with contextlib.ExitStack() as stack:
            if layers.endswith(LIGER):
                stack.enter_context(liger_kernels(causal_lm(self.model)))
            if layers != name:
                merged = functools.partialmethod(PackedForward.score, merge_adapters=True)
                stack.enter_context(mock.patch.object(PackedForward, "score", merged))
            if not layers.startswith(COMPILED):
                stack.enter_context(value_of(EAGER, True))
            yield

    def compile(self) -> list[str]:
        """Compile the shared policy's layers, once; the kinds that run compiled, none on a CPU."""
        if self._compiled is None:
            self._compiled = compile_layers(self.model) if self.device.type == "cuda" else []
        return self._compiled

    @property
    def seconds_left(self) -> float:
        """Seconds of the budget, or of the block if that ends before."""
        return min(self._ends, self.block_ends) - time.monotonic()

    @property
    def has_liger(self) -> bool:
        """Whether Liger's kernels run here."""
        return self.device.type == "cuda" and is_liger_kernel_available()

    @property
    def best(self) -> str:
        """The variant that a user of a GPU would have; compiles the layers where nothing has yet."""
        return COMPILED if self.compile() else LIGER if self.has_liger else AS_RACED


@contextlib.contextmanager
def liger_kernels(model: nn.Module) -> Iterator[None]:
    """Give a model Liger's norms, rotary embeddings and gates inside, as the training program does."""
    modules = sys.modules[type(model).__module__]
    own, code = {module: dict(vars(module)) for module in model.modules()}, dict(vars(modules))
    names = {type(module): type(module).__name__ for module in own}
    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    try:
        yield
    finally:
        for module, attributes in own.items():
            vars(module).clear()
            vars(module).update(attributes)
        for kind, name in names.items():
            kind.__name__ = name
        vars(modules).update(code)


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep what is there from the garbage collector, as the program does: a collection takes longer than a step."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@frozen_heap()
def race_steps(bench: Bench, load: str, contenders: Mapping[str, "Step"], rounds: int) -> Any:
    """Time steps in turns; compare the gradient and weights of each with those of the first of its kind."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    parts: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {name: [] for name in contenders}
    facts: dict[str, dict[str, Any]] = {name: {} for name in contenders}
    first: dict[str, Outcome] = {}  # by kind, of the first run
    running = dict(contenders)
    for i in range(-2, rounds):
        round_began, order = time.monotonic(), list(running)
        turn = i % max(len(order), 1)
        for name in order[turn:] + order[:turn]:
            watch = Stopwatch(bench.device)
            stats = allocator(bench.device)
            if i == -1 and bench.device.type == "cuda":
                release_memory(bench.device)
                torch.cuda.reset_peak_memory_stats(bench.device)
                facts[name]["bytes_before"] = torch.cuda.memory_allocated(bench.device)
            try:
                with running[name].variant():
                    began = time.perf_counter()
                    _, weights = running[name](watch)
                    own = watch.seconds()
                    took = time.perf_counter() - began
            except (torch.OutOfMemoryError, RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
                facts[name]["failed"] = f"{type(error).__name__}: {str(error)[:500]}"
                print(traceback.format_exc(limit=6)[-1500:], flush=True)
                del running[name]
                release_memory(bench.device)
                continue
            gradients = taken_gradients(running[name].replay.policy)
            if i == -1:
                if bench.device.type == "cuda":
                    facts[name]["peak_bytes"] = torch.cuda.max_memory_allocated(bench.device)
                outcome = flat(gradients), None if weights is None else torch.cat(weights)
                facts[name] |= compared(outcome, first.setdefault(STEP_PEERS[running[name].peer].kind, outcome))
            if i < 0:
                facts[name][("first_seconds", "second_seconds")[i + 2]] = took
                continue
            seconds[name].append(took)
            parts[name].append((own, watch.host_seconds()))
            for key, value in allocator(bench.device).items():
                facts[name].setdefault(f"{key}_by_round", []).append(value - stats[key])
        if bench.seconds_left < 3 + 1.5 * (time.monotonic() - round_began):
            break
    lines = [
        {
            "group": load, "name": name, "seconds": spread(times) if (times := seconds[name]) else None,
            "parts": medians([one for one, _ in parts[name]]), "host_parts": medians([one for _, one in parts[name]]),
            **facts[name],
        } for name in contenders
    ]  # fmt: skip
    bench.finished += lines
    return lines


def flat(gradients: Mapping[str, Tensor]) -> Tensor:
    """Join gradients by the names of their weights, without those that wrappers add."""
    by_name = {name.replace("base_model.model.", ""): gradient for name, gradient in gradients.items()}
    return torch.cat([by_name[name].flatten().float().cpu() for name in sorted(by_name)])


Outcome = tuple[Tensor, Tensor | None]  # the gradient of all trained weights, flat, float32; weights of credit


def compared(outcome: Outcome, first: Outcome) -> dict[str, float]:
    """How far a step is from the first contender's: share of the gradient's norm, largest difference of a weight."""
    (gradient, weights), (other, others) = outcome, first
    result = {"gradient_norm": gradient.norm().item()}
    if gradient.shape == other.shape:
        result["gradient_off"] = ((gradient - other).norm() / other.norm()).item()
    if weights is not None and others is not None:
        result["weights_off"] = (weights - others).abs().max().item()
    return result


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in (rows[0] if rows else ())}


def allocator(device: torch.device) -> dict[str, int]:
    """Counts of the allocator that a step should not move."""
    stats = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return {name: int(stats.get(name, 0)) for name in ("num_alloc_retries", "num_device_alloc")}


@dataclass
class Step:
    """A step of a peer on a policy, as a variant of it."""

    replay: Replay
    peer: str
    variant: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def __call__(self, watch: Stopwatch) -> Any:
        """Run it, as the variant whose context the caller has entered."""
        return STEP_PEERS[self.peer].run(self.replay, watch)


def trl_step(bench: Bench, load: str, *, rows: int | None = None, liger: bool = False) -> Step:
    """TRL's step on a policy of its own, all rows at a time or `rows`.

    With its own `use_liger_kernel`, which `train` applies to the layers of a trainer that is there.
    """
    rollouts = bench.replay(load).rollouts
    replay = Replay(bench.fresh(), rollouts, rows or len(rollouts.job.completions))
    replay.trl()  # which patches the model for good
    return Step(replay, TRL, functools.partial(liger_kernels, replay.causal) if liger else contextlib.nullcontext)


def steps_of(bench: Bench, load: str, peers: Sequence[str], variants: Sequence[str]) -> dict[str, Step]:
    """Every peer as every variant."""
    replay = bench.replay(load)
    with value_of(EAGER, True):
        check_trainable(replay.causal)
    return {
        f"{peer}, {name}": Step(replay, peer, functools.partial(bench.variant, name))
        for name in variants for peer in peers
    }  # fmt: skip
