"""Time contenders: they are checked, then take turns, so that drift of the machine affects all alike.

A benchmark builds `Contender` values that do the same job, calls `race` and reports each lap of the `Race` with the
`report` fixture of `benchmarks/conftest.py`. A contender with a wrong answer, or that raises, is refused: it gets no
time and its test fails. One that cannot run here (a package is missing) is absent: its test is skipped.
"""

import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

CACHE_BYTES = 256 << 20
"""Read before each device-clocked round: more than the L2 cache of any GPU so far."""

SPIN_CYCLES, MAX_SPIN_CYCLES = 4_000_000, 400_000_000
"""How long a device spins before a round, at least and at most: some 2 and 200 ms."""


class WrongAnswer(AssertionError):
    """A contender's result differs from the reference by more than the error budget."""


class Absent(Exception):
    """A contender cannot run here; the message says why."""


@dataclass(frozen=True)
class Contender:
    """Contender: one way to do the job.

    Attributes:
        name: how results call it.
        run: does the whole job once and returns its result.
        check: raises `WrongAnswer` on a wrong result; may return facts to record (numbers or strings by name).
        absent: why it cannot run here; then `run` is never called.
    """

    name: str
    run: Callable[[], Any]
    check: Callable[[Any], dict[str, Any] | None]
    absent: str | None = None


@dataclass
class Lap:
    """Result of one contender: seconds of each round, or the reason for having none."""

    name: str
    seconds: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    peak_extra_bytes: int | None = None
    """Most device memory above what was allocated before, in the checking run; None on a CPU."""
    refused: str | None = None
    absent: str | None = None
    check_seconds: float = 0.0
    """Seconds of the first run, one-time work and counting included."""

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Race:
    """Laps of the contenders for one workload.

    Attributes:
        group: what the contenders have in common.
        facts: numbers of the workload, with their units in their names.
        ours: the contender that the others are compared with.
        floors: promises: least times of contenders, in units of ours.
    """

    group: str
    laps: dict[str, Lap]
    facts: dict[str, Any]
    ours: str = "ours"
    floors: dict[str, float] = field(default_factory=dict)

    def ratio(self, name: str) -> float | None:
        """What a contender costs in units of ours; None where ours has no time. By the processor where it counted."""
        ours, lap = self.laps.get(self.ours), self.laps[name]
        if ours is None or not ours.seconds:
            return None
        return lap.facts.get("cpu_seconds", lap.median) / ours.facts.get("cpu_seconds", ours.median)


@dataclass(frozen=True)
class Budget:
    """Number of rounds of a race: as many as fit in `seconds`, between two bounds."""

    seconds: float = 60.0
    min_rounds: int = 5
    max_rounds: int = 30

    def rounds(self, seconds_per_round: float) -> int:
        return int(min(max(self.seconds / max(seconds_per_round, 1e-9), self.min_rounds), self.max_rounds))


def race(
    contenders: Sequence[Contender], *, device: torch.device, budget: Budget, clock: Literal["wall", "device"] = "wall"
) -> dict[str, Lap]:
    """Check every contender once, then time the sound ones in rounds, each round starting one further along.

    `clock="wall"` times what a caller waits for: launches and work, to the last synchronisation.
    `clock="device"` times only the device, see `DeviceClock`, whose facts a lap then has; on a CPU it is the wall
    clock.
    """
    if len({contender.name for contender in contenders}) != len(contenders):
        raise ValueError(f"contenders must differ by name, got {[contender.name for contender in contenders]}")
    laps = {contender.name: _checked(contender, device) for contender in contenders}
    running = [c for c in contenders if laps[c.name].absent is None and laps[c.name].refused is None]
    if not running:
        return laps
    clocks: dict[str, Callable[[Callable[[], Any]], float]] = {
        c.name: DeviceClock(device) if clock == "device" and device.type == "cuda" else partial(wall_seconds, device)
        for c in running
    }
    per_round = sum(laps[contender.name].check_seconds for contender in running)
    if device.type == "cuda" or per_round < budget.seconds / 10:
        # The first run compiled and loaded; a second that does not count shows what a round really takes.
        per_round = sum(clocks[contender.name](contender.run) for contender in running)
    for i in range(budget.rounds(per_round)):
        turn = i % len(running)
        for contender in running[turn:] + running[:turn]:
            laps[contender.name].seconds.append(clocks[contender.name](contender.run))
    for name, timed in clocks.items():
        if isinstance(timed, DeviceClock):
            laps[name].facts |= timed.facts(len(laps[name].seconds))
    return laps


def _checked(contender: Contender, device: torch.device) -> Lap:
    lap = Lap(contender.name, absent=contender.absent)
    if lap.absent is not None:
        return lap
    release_memory(device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    start = time.perf_counter()
    try:
        result = contender.run()
        lap.check_seconds = time.perf_counter() - start
        if on_gpu:
            torch.cuda.synchronize(device)
            lap.peak_extra_bytes = torch.cuda.max_memory_allocated(device) - before
        lap.facts = dict(contender.check(result) or {})
    except WrongAnswer as error:
        lap.refused = str(error)
    except Absent as error:
        lap.absent = str(error)
    except torch.OutOfMemoryError:
        lap.absent = "does not fit in the device's memory"
    except Exception as error:  # perhaps of another package: the others still get their time
        lap.refused = f"raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return lap


def release_memory(device: torch.device) -> None:
    """Hand unused memory back, so that one contender's peak is not another's."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def wall_seconds(device: torch.device, run: Callable[[], Any]) -> float:
    """Seconds that a caller waits for one run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    del result  # freed outside the timed region
    return seconds


class DeviceClock:
    """Seconds that a device takes for one contender's job, by events, with a cold L2 cache.

    Events around launches that are slower than their kernels would time the host. So the device spins until the host
    has launched the whole job, and each round shows that it did: a round whose spin was too short is run again with a
    longer one. A job that waits for the device itself outlasts any spin; its time includes what the host then adds,
    and `facts` counts its rounds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cycles = SPIN_CYCLES
        self._host: list[float] = []
        self._exposed: list[bool] = []

    def __call__(self, run: Callable[[], Any]) -> float:
        """Clock one round."""
        before = self._cycles
        seconds, spun, host = self._round(run)
        if host > spun:
            self._cycles = min(int(before * 2 * host / spun), MAX_SPIN_CYCLES)
            seconds, spun, host = self._round(run)
        if host > spun:
            self._cycles = before
        self._host.append(host)
        self._exposed.append(host > spun)
        return seconds

    def facts(self, rounds: int) -> dict[str, float]:
        """Summarize the last `rounds`: the median host time, and the number of rounds in which it was not hidden."""
        return {
            "host_seconds": statistics.median(self._host[-rounds:]),
            "rounds_with_host_exposed": sum(self._exposed[-rounds:]),
        }

    def _round(self, run: Callable[[], Any]) -> tuple[float, float, float]:
        """Seconds of the job and of the spin on the device, and of the launches of both on the host."""
        spin, start, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        _clear_cache(self._device)
        launched = time.perf_counter()
        spin.record()
        torch.cuda._sleep(self._cycles)
        start.record()
        result = run()
        end.record()
        host = time.perf_counter() - launched
        torch.cuda.synchronize(self._device)
        del result
        return start.elapsed_time(end) / 1e3, spin.elapsed_time(start) / 1e3, host


def _clear_cache(device: torch.device) -> None:
    """Fill the L2 cache with unneeded data, by reading: written lines would be written back in the timed round."""
    _cache_filler(device, CACHE_BYTES).max()


@functools.cache
def _cache_filler(device: torch.device, size: int) -> Tensor:
    return torch.zeros(size // 4, dtype=torch.int32, device=device)


def spread(seconds: Sequence[float]) -> dict[str, float | int]:
    """Median and spread of the rounds, in seconds."""
    least, first, median, third, most = np.quantile(seconds, (0, 0.25, 0.5, 0.75, 1)).tolist()
    mean, rounds = statistics.fmean(seconds), len(seconds)
    return {"median": median, "iqr": third - first, "min": least, "max": most, "mean": mean, "rounds": rounds}
