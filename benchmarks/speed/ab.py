"""`python -m benchmarks speed ab`: race variants of one model in turns, in one process, in minutes of a GPU.

Two machines of a kind may differ by a factor of two in how fast the host launches, so only what takes turns in one
process compares. Each block has a limit in seconds and is skipped when the budget ends. The result file has what is
predicted before anything runs, and is written again after each block, with the reason of each failure. `decide.sh`
beside this file runs the blocks whose figures decide what is built next.
"""

import argparse
import contextlib
import cProfile
import functools
import itertools
import math
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.ceilings import measure_ceilings
from benchmarks.harness.environment import describe_environment
from benchmarks.harness.race import Budget, Contender, race, release_memory
from benchmarks.harness.results import RESULTS, write_json
from benchmarks.harness.workloads import MODELS
from benchmarks.speed.predictions import PREDICTED, page
from benchmarks.speed.profiles import busy_by_part, device_events, host_functions, marked_part, summarize
from benchmarks.speed.replay import Stopwatch
from benchmarks.speed.step_peers import EXACT, NEAREST, PLAIN, VARLEN, WHOLE
from benchmarks.speed.step_reference import taken_gradients
from benchmarks.speed.variants import (
    AS_RACED,
    COMPILED,
    LIGER,
    MERGED,
    TRL_LIGER,
    Bench,
    Step,
    frozen_heap,
    medians,
    race_steps,
    steps_of,
    trl_step,
)
from cfa_kernels import compile_layers

LEAST = 5.0
"""Seconds of the budget without which no block begins."""

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
    """One step of each kind under the profiler: kernels by class, launches, busy and idle seconds of each part.

    Then the host's functions, by `cProfile`, in a training forward and in the scoring of its spans.
    """
    device, lines = bench.device, list[Any]()
    steps = steps_of(bench, "4x8", (PLAIN, EXACT, NEAREST), [bench.best])
    steps |= steps_of(bench, "4x8", (EXACT,), [bench.best + MERGED])

    def run(step: Step, watch: Stopwatch) -> dict[str, float]:
        step(watch)
        taken_gradients(step.replay.policy)
        return watch.seconds()

    for name, step in steps.items():
        with step.variant():
            run(step, Stopwatch(device))
            parts = medians([run(step, Stopwatch(device)) for _ in range(2)])
            watch = Stopwatch(device, marked_part(device))
            events = device_events(functools.partial(run, step, watch), device)
        busy = busy_by_part(events, watch.parts)
        idle = {part: max(parts[part] - seconds, 0.0) for part, seconds in busy.items()}
        summary = summarize(events, sum(parts.values()))
        lines.append({"group": "4x8", "name": name, "busy_parts": busy, "idle_parts": idle, **summary})
        bench.finished.append(lines[-1])
    profilers = {"forward": cProfile.Profile(), "credit": cProfile.Profile()}
    with steps[f"{EXACT}, {bench.best}"].variant():
        watch = Stopwatch(device, lambda part: profilers.get(part) or contextlib.nullcontext())
        run(steps[f"{EXACT}, {bench.best}"], watch)
    return {"figures": lines, "host": {part: host_functions(one) for part, one in profilers.items()}}


def trl(bench: Bench) -> Any:
    """TRL's step with all rows at a time, with and without its own Liger, next to ours, also with merged adapters."""
    contenders = {WHOLE: trl_step(bench, "4x8")}
    if bench.has_liger:
        contenders[TRL_LIGER] = trl_step(bench, "4x8", liger=True)
    contenders |= steps_of(bench, "4x8", (PLAIN, EXACT, NEAREST), [bench.best])
    contenders |= steps_of(bench, "4x8", (EXACT,), [bench.best + MERGED])
    lines = race_steps(bench, "4x8", contenders, bench.rounds)
    contenders.clear()
    release_memory(bench.device)
    ours = steps_of(bench, "8x8", (PLAIN, EXACT, NEAREST), [bench.best])
    ours |= steps_of(bench, "8x8", (EXACT,), [bench.best + MERGED])
    return with_ratios(lines) + race_steps(bench, "8x8", ours, max(bench.rounds // 2, 1))


def with_ratios(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give each line its ratio to TRL's step, with its own Liger where that ran."""
    named = [line for line in lines if line["name"].startswith("TRL") and line["seconds"]]
    for line in lines if named else ():
        if line["seconds"]:
            line["of_trl"] = line["seconds"]["median"] / named[-1]["seconds"]["median"]
    return [*lines]


def long(bench: Bench) -> Any:
    """Prompts of 2,048 tokens: ours, TRL by as many rows as fit, and padding-free varlen if time is left."""
    rounds, shared = min(bench.rounds, 3), bench.replay("long")
    lines = race_steps(bench, "long", steps_of(bench, "long", (PLAIN, EXACT, NEAREST), [bench.best]), rounds)
    for rows in (32, 16, 8, 4) if not bench.smoke else (2,):
        name = f"TRL, {rows} rows at a time{', use_liger_kernel' * bench.has_liger}"
        step = trl_step(bench, "long", rows=rows, liger=bench.has_liger)
        (line,) = race_steps(bench, "long", {name: step}, rounds)
        lines.append(line)
        del step
        release_memory(bench.device)
        if line["seconds"] is not None:
            break
    if bench.seconds_left > 30:
        plain = LIGER if bench.has_liger else AS_RACED  # compiled layers are those of packed forwards only
        varlen = {f"{VARLEN}, {plain}": Step(shared, VARLEN, functools.partial(bench.variant, plain))}
        lines += race_steps(bench, "long", varlen, 1)
    return with_ratios(lines)


def trainer(bench: Bench) -> Any:
    """Whole steps of the program by their stages, for each kind of credit, sampling 64 tokens and 400.

    Then the same with as many spans as GSM8K's solutions have.
    """
    loads = {"six spans": {64: bench.rounds, 400: max(bench.rounds // 2, 1)}}
    return program_steps(bench, loads | {"GSM8K's spans": {64: max(bench.rounds // 2, 1)}})


def answers(bench: Bench) -> Any:
    """Whole steps on completions of 2,000 tokens with ten spans."""
    return program_steps(bench, {"long answers": {64: max(bench.rounds // 2, 1)}})


@frozen_heap()
def program_steps(bench: Bench, loads: Mapping[str, Mapping[int, int]]) -> Any:
    """Time steps of the program on loads, each with the tokens to sample and the rounds."""
    from benchmarks.speed import program_step as program

    known = program.LOADS["smoke" if bench.smoke else "cuda"]
    made = program.make_trainer(known[next(iter(loads))], bench.device)
    engine = made.engine
    release_memory(bench.device)
    facts = {"kinds": compile_layers(made.policy) if bench.device.type == "cuda" else []}
    lines = list[dict[str, Any]]()
    for load, lengths in loads.items():
        for longest, rounds in lengths.items():
            tokens = longest if not bench.smoke else longest // 8
            steps = program.steppers(known[load], made, engine, tokens)
            warm_up = 2 if not lines and not bench.smoke else 1
            for i in range(warm_up + rounds):
                for name, step in steps.items():
                    metrics = step()
                    if i >= warm_up:
                        lines.append({"group": f"{load}, {longest} tokens sampled", "name": name, **metrics})
                bench.finished = whole_steps(stages_of(lines))
    del made, engine, steps
    release_memory(bench.device)
    return {**facts, "figures": whole_steps(stages_of(lines))}


def stages_of(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Medians of the stages of each kind's steps, and what they take without sampling."""
    by_kind: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for line in lines:
        by_kind.setdefault((line["group"], line["name"]), []).append(line)
    result = []
    for (group, name), steps in by_kind.items():
        keys = [key for key in steps[0] if key.startswith("time/") or key in ("step_time", "credit/tokens_fed")]
        result.append({"group": group, "name": name, "steps": len(steps)})
        result[-1] |= {key: statistics.median(step[key] for step in steps) for key in keys if key in steps[-1]}
        result[-1]["unsampled"] = statistics.median(step["step_time"] - step["time/generate"] for step in steps)
    return result


def whole_steps(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add what credit adds to a whole step, and how sampling's time splits into a fixed part and tokens.

    All kinds of credit sample alike, so a whole step takes the median of their sampling, which varies more than credit
    takes.
    """
    groups = {key: [*lines] for key, lines in itertools.groupby(figures, key=lambda line: line["group"])}
    sampled = {key: statistics.median(line["time/generate"] for line in lines) for key, lines in groups.items()}
    result = [*figures]
    for key, lines in groups.items():
        for line in lines:
            line["whole_step"] = sampled[key] + line["unsampled"]
            line["adds"] = line["whole_step"] / (sampled[key] + lines[0]["unsampled"]) - 1
            line["adds_unsampled"] = line["unsampled"] / lines[0]["unsampled"] - 1
    fewest, most = (next((key for key in sampled if key.endswith(f", {n} tokens sampled")), None) for n in (64, 400))
    if fewest and most:
        per_token = (sampled[most] - sampled[fewest]) / (400 - 64)
        fixed = sampled[fewest] - 64 * per_token
        result.append({"group": "sampling", "name": "fixed and a token", "fixed": fixed, "per_token": per_token})
        for line in groups.get("GSM8K's spans, 64 tokens sampled", ()):
            first = groups["GSM8K's spans, 64 tokens sampled"][0]["unsampled"]
            whole = {"whole_step": sampled[most] + line["unsampled"]}
            whole["adds"] = whole["whole_step"] / (sampled[most] + first) - 1
            result.append({"group": "GSM8K's spans, 400 tokens sampled", "name": line["name"], **whole})
    return result


BLOCKS: dict[str, tuple[Callable[[Bench], Any], float]] = {
    "host": (host, 25), "liger": (liger, 60), "compile": (compiled, 200), "profile": (profile, 50),
    "trl": (trl, 130), "trainer": (trainer, 130), "long": (long, 90), "answers": (answers, 140),
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
        "command": " ".join(["python -m benchmarks speed ab", *words]), "cpp_wrapper": launches_from_cpp(),
        "predicted": [one._asdict() for one in PREDICTED], "parts": {},
    }  # fmt: skip
    options.into.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.into, document)
    part, failed = dict[str, Any](), list[str]()
    for name in options.blocks.split(","):
        run, limit = BLOCKS[name]
        bench.block_ends, bench.finished = math.inf, []
        began, limit = time.monotonic(), min(limit, bench.seconds_left)
        bench.block_ends = math.inf if options.smoke else began + limit
        print(f"== {name}, at most {limit:.0f} s", flush=True)
        try:
            if limit < LEAST:
                raise TooLong(f"{limit:.0f} s of the budget were left")
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
            part["figures"] = bench.finished
            release_memory(device)
        document["parts"][name] = part | {"took": time.monotonic() - began}
        write_json(options.into, document)
        print(page(document, name), flush=True)
    if failed:
        print(f"failed or skipped: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def launches_from_cpp() -> bool:
    return os.environ.get("TORCHINDUCTOR_CPP_WRAPPER") == "1"


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
