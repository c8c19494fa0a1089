"""`python -m benchmarks speed ab`: race variants of one model in turns, in one process, in minutes of a GPU.

Two machines of a kind may differ by a factor of two in how fast the host launches, so only what takes turns in one
process compares. Each block has a limit in seconds and is skipped when the budget ends. The result file is written
again after each block, with the reason of each failure.
"""

import argparse
import contextlib
import functools
import gc
import itertools
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import is_liger_kernel_available

from benchmarks.harness.ceilings import measure_ceilings
from benchmarks.harness.environment import describe_environment
from benchmarks.harness.figures import page
from benchmarks.harness.race import Budget, Contender, race, release_memory, spread
from benchmarks.harness.results import RESULTS, write_json
from benchmarks.harness.workloads import MODELS, JobRollouts, policy, shaped_rollouts
from benchmarks.speed.profiles import device_events, summarize
from benchmarks.speed.replay import Replay, Stopwatch
from benchmarks.speed.step_peers import EXACT, PLAIN, STEP_PEERS, TRL, VARLEN, WHOLE
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

LEAST = 5.0
"""Seconds of the budget without which no block begins."""


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
        self._ends = time.monotonic() + budget
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
        return self._ends - time.monotonic()

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


# Races


def race_steps(bench: Bench, load: str, contenders: Mapping[str, "Step"], rounds: int) -> Any:
    """Time steps in turns; compare the gradient and weights of each with those of the first of its kind."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    parts: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {name: [] for name in contenders}
    facts: dict[str, dict[str, Any]] = {name: {} for name in contenders}
    first: dict[str, Outcome] = {}  # by kind, of the first run
    running = dict(contenders)
    for i in range(-2, rounds):
        order = list(running)
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
            facts[name]["allocator"] = {key: value - stats[key] for key, value in allocator(bench.device).items()}
        if bench.seconds_left < 3:
            break
    return [
        {
            "group": load, "name": name, "seconds": spread(times) if (times := seconds[name]) else None,
            "parts": medians([one for one, _ in parts[name]]), "host_parts": medians([one for _, one in parts[name]]),
            **facts[name],
        } for name in contenders
    ]  # fmt: skip


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


# Blocks


def host(bench: Bench) -> dict[str, Any]:
    """The device's ceilings and what a launch costs the host; rates of the layer's products."""
    device = bench.device
    result: dict[str, Any] = {"ceilings": measure_ceilings(device, smoke=bench.smoke)}
    config, products = MODELS[bench.name], list[dict[str, Any]]()
    width, inner = config.hidden_size, config.intermediate_size
    for rows in (64,) if bench.smoke else (7448, 24432):
        for columns, depth in ((2 * width, width), (inner, width), (width, inner)):
            a, b = (torch.randn(n, depth, device=device, dtype=bench.dtype) for n in (rows, columns))
            flops = 2.0 * rows * columns * depth
            line = {"rows": rows, "columns": columns, "depth": depth}
            one = Contender("product", functools.partial(torch.matmul, a, b.t()), lambda _: None)
            seconds = race([one], device=device, budget=Budget(0.0, 10, 10), clock="device")["product"].median
            line["tflop_per_s"] = flops / seconds / 1e12
            products.append(line)
    return result | {"products": products}


def liger(bench: Bench) -> Any:
    """Plain and counterfactual steps with the model's own norms, rotary embeddings and gates, and with Liger's."""
    variants = (AS_RACED, LIGER) if bench.has_liger else (AS_RACED,)
    return race_steps(bench, "4x8", steps_of(bench, "4x8", (PLAIN, EXACT), variants), bench.rounds)


def compiled(bench: Bench) -> Any:
    """The same with compiled layers; what compiling takes; graphs over packs of other sizes."""
    began = time.perf_counter()
    kinds = bench.compile()
    facts = {"kinds": kinds, "compile_seconds": time.perf_counter() - began}
    variants = (LIGER, COMPILED) if bench.has_liger else (AS_RACED,)
    lines = race_steps(bench, "4x8", steps_of(bench, "4x8", (PLAIN, EXACT), variants), bench.rounds)
    counts = [graphs()]
    lines += race_steps(bench, "8x8", steps_of(bench, "8x8", (PLAIN, EXACT), variants[:2]), max(bench.rounds // 2, 1))
    return {**facts, "graphs": [*counts, graphs()], "figures": lines}


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def profile(bench: Bench) -> Any:
    """One step of each variant under the profiler: kernels by class, launches, idle share."""
    variants, lines = list(dict.fromkeys([AS_RACED, *[LIGER] * bench.has_liger, bench.best])), list[Any]()
    for name, step in steps_of(bench, "4x8", (PLAIN, EXACT), variants).items():

        def run(step: Step = step) -> float:
            watch = Stopwatch(bench.device)
            step(watch)
            taken_gradients(step.replay.policy)
            return sum(watch.seconds().values())

        with step.variant():
            run()
            seconds = statistics.median(run() for _ in range(2))
            lines.append({"group": "4x8", "name": name, **summarize(device_events(run, bench.device), seconds)})
    return lines


def trl(bench: Bench) -> Any:
    """TRL's step with all rows at a time, with and without its own Liger, next to ours, also with merged adapters."""
    contenders = {WHOLE: trl_step(bench, "4x8")}
    if bench.has_liger:
        contenders[TRL_LIGER] = trl_step(bench, "4x8", liger=True)
    contenders |= steps_of(bench, "4x8", (PLAIN, EXACT), [bench.best])
    contenders |= steps_of(bench, "4x8", (EXACT,), [bench.best + MERGED])
    lines = race_steps(bench, "4x8", contenders, bench.rounds)
    contenders.clear()
    release_memory(bench.device)
    ours = steps_of(bench, "8x8", (PLAIN, EXACT), [bench.best])
    ours |= steps_of(bench, "8x8", (EXACT,), [bench.best + MERGED])
    return lines + race_steps(bench, "8x8", ours, max(bench.rounds // 2, 1))


def long(bench: Bench) -> Any:
    """Prompts of 2,048 tokens: TRL by as many rows as fit, padding-free varlen, ours."""
    shared, lines = bench.replay("long"), list[Any]()
    ours = steps_of(bench, "long", (PLAIN, EXACT), [bench.best])
    plain = LIGER if bench.has_liger else AS_RACED  # compiled layers are those of packed forwards only
    ours[f"{VARLEN}, {plain}"] = Step(shared, VARLEN, functools.partial(bench.variant, plain))
    lines += race_steps(bench, "long", ours, max(bench.rounds // 4, 1))
    for rows in (8, 4, 2) if not bench.smoke else (2,):
        name = f"TRL, {rows} rows at a time{', use_liger_kernel' * bench.has_liger}"
        (line,) = race_steps(bench, "long", {name: trl_step(bench, "long", rows=rows, liger=bench.has_liger)}, 1)
        lines.append(line)
        release_memory(bench.device)
        if line["seconds"] is not None:
            break
    own, _, varlen, *_ = (line["seconds"] and line["seconds"]["median"] for line in lines)
    for name, seconds in ((TRL, lines[-1]["seconds"] and lines[-1]["seconds"]["median"]), (VARLEN, varlen)):
        ratio = own / seconds if own and seconds else None
        lines.append({"group": "long", "name": f"{PLAIN}, of {name}", "ratio": ratio})
    return lines


def trainer(bench: Bench) -> Any:
    """Steps of the training program by its stages: masking, also with merged adapters, and the gain of prefixes."""
    from benchmarks.speed import program_step as program

    load = program.LOADS["smoke" if bench.smoke else "cuda"]
    made = program.make_trainer(load, bench.device)
    release_memory(bench.device)
    gc.freeze()
    began = time.perf_counter()
    kinds = compile_layers(made.policy) if bench.device.type == "cuda" else []
    facts = {"kinds": kinds, "compile_seconds": time.perf_counter() - began}
    steppers = {preset: program.stepper(load, made, preset) for preset in program.CREDITED}
    steppers["cf, merged"] = program.stepper(load, made, "cf", merge_adapters=True)
    lines, warm_up = list[Any](), 1 if bench.smoke else 2
    for i in range(warm_up + bench.rounds):
        for preset, step in steppers.items():
            metrics = step()
            if i >= warm_up:
                lines.append({"group": "trainer", "name": preset, **metrics})
    gc.unfreeze()
    del made, steppers
    release_memory(bench.device)
    return {**facts, "figures": stages_of(lines)}


def stages_of(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Medians of the stages of each preset's steps."""
    result = []
    for name, group in itertools.groupby(sorted(lines, key=lambda line: line["name"]), key=lambda line: line["name"]):
        steps = list(group)
        keys = [key for key in steps[0] if key.startswith("time/") or key in ("step_time", "credit/tokens_fed")]
        result.append({"group": "trainer", "name": name, "steps": len(steps)})
        result[-1] |= {key: statistics.median(step[key] for step in steps) for key in keys}
    return result


BLOCKS: dict[str, tuple[Callable[[Bench], Any], float]] = {
    "host": (host, 25), "liger": (liger, 60), "compile": (compiled, 200), "profile": (profile, 50),
    "trl": (trl, 120), "long": (long, 90), "trainer": (trainer, 150),
}  # fmt: skip
"""Function and limit in seconds of each block, in the order in which they decide."""


class TooLong(Exception):
    """A block has run for longer than it may."""


def main(argv: list[str] | None = None) -> int:
    """Run the blocks; 0 if all of them ran."""
    options = parse_options(argv)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA or HIP device here: nothing was run (--device cpu --smoke tries every block)", file=sys.stderr)
        return 2
    bench = Bench(device, smoke=options.smoke, budget=options.budget, rounds=options.rounds)
    words = [word if word != str(options.into) else options.into.name for word in argv or sys.argv[2:]]
    document = {
        "schema": 1, "environment": describe_environment(device, options.commit),
        "command": " ".join(["python -m benchmarks speed ab", *words]), "parts": {},
    }  # fmt: skip
    part, failed = dict[str, Any](), list[str]()
    for name in options.blocks.split(","):
        run, limit = BLOCKS[name]
        began, limit = time.monotonic(), min(limit, bench.seconds_left)
        print(f"== {name}, at most {limit:.0f} s", flush=True)
        try:
            if limit < LEAST:
                raise TooLong(f"{bench.seconds_left:.0f} s of the budget were left")
            with at_most(0 if options.smoke else limit):
                part = {"result": run(bench)}
        except TooLong as error:
            part = {"skipped": str(error)}
            print(f"== {name} is skipped: {error}", flush=True)
        except Exception as error:
            part = {"failed": f"{type(error).__name__}: {str(error)[:2000]}"}
            print(traceback.format_exc(limit=12)[-4000:], flush=True)
        if "result" not in part:
            failed.append(name)
            release_memory(device)
        document["parts"][name] = part | {"took": time.monotonic() - began}
        write_json(options.into, document)
        print(page({name: document["parts"][name]}), flush=True)
    if failed:
        print(f"failed or skipped: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `TooLong` in the main thread after so many seconds; 0 is no limit."""

    def end(*_: object) -> None:
        raise TooLong(f"the block ran for more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks speed ab", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--blocks", default=",".join(BLOCKS), help="comma-separated; default: %(default)s")
    parser.add_argument("--budget", type=float, default=525.0, help="seconds for all of them; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=8, help="of each race; default: %(default)s")
    parser.add_argument("--smoke", action="store_true", help="smallest shapes, which show that all runs")
    parser.add_argument("--into", type=Path, default=RESULTS / "ab.json", help="result file; default: %(default)s")
    parser.add_argument("--commit", help="what to record, not what git says")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.blocks.split(",") if name not in BLOCKS]:
        parser.error(f"--blocks: {unknown} are not among {list(BLOCKS)}")
    return options
