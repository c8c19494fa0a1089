"""Profile a job: on the device kernels by class and idle time, by `torch.profiler`; on the host functions."""

import contextlib
import cProfile
import itertools
import pstats
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

CLASSES = (
    ("attention", r"attention|query_gradient|key_gradient|sum_parts|flash|fmha|attn"),
    ("fused by the compiler", r"^triton_(poi|per|red|tem)_"),
    ("head and loss", r"tile_statistics|merge_tiles|row_logprobs|row_gradients|policy_rows|scale_rows|softmax|entropy"),
    ("norms, rotary, gates", r"rms|layer_?norm|rope|rotary|swiglu|geglu|silu"),
    ("matrix products", r"gemm|nvjet|cutlass|xmma|cublas|matmul|wgmma|splitk|aten::(mm|addmm|bmm|linear|einsum)"),
    ("copies", r"memcpy|memset|copy|catarray|aten::(cat|to|clone|contiguous)|index|gather|scatter|embedding|fill"),
    ("reductions", r"reduce|aten::(sum|mean|norm|cumsum)|scan"),
    ("element-wise", r"elementwise|vectorized|aten::\w+"),
)
"""A kernel belongs to the first class whose pattern is found in its name, else to "other"."""

LISTED = 40
"""Kernels or functions listed by name, those that take most first."""

MARKER = "erfinv"
"""In the name of the operator that marks where a part begins and ends: no step calls it."""


class Event(NamedTuple):
    """Something a device did, from one microsecond to another."""

    name: str
    start: float
    end: float


def kernel_class(name: str) -> str:
    """The class of a kernel."""
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE)), "other")


def busy_microseconds(events: Iterable[Event]) -> float:
    """Microseconds in which at least one event was under way."""
    busy, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        busy += max(event.end - max(event.start, until), 0.0)
        until = max(until, event.end)
    return busy


def summarize(events: Sequence[Event], seconds: float) -> dict[str, Any]:
    """Sum a step's events.

    Args:
        events: everything that the device did.
        seconds: what the step takes without a profiler, which slows the host and not the device.

    Returns:
        `seconds_unprofiled`, `busy_seconds`, `idle_share` of the former, `launches`, and by `class` and by kernel
        name the seconds, launches and the share of all kernels' seconds.
    """
    busy = busy_microseconds(events) / 1e6
    return {
        "seconds_unprofiled": seconds,
        "busy_seconds": busy,
        "idle_share": max(1 - busy / seconds, 0.0),
        "launches": len(events),
        "classes": _sums(events, lambda event: kernel_class(event.name)),
        "kernels": _sums(events, lambda event: event.name)[:LISTED],
    }


def _sums(events: Sequence[Event], key: Callable[[Event], str]) -> list[dict[str, Any]]:
    seconds, launches = defaultdict[str, float](float), defaultdict[str, int](int)
    for event in events:
        seconds[key(event)] += (event.end - event.start) / 1e6
        launches[key(event)] += 1
    total = sum(seconds.values()) or 1.0
    ordered = sorted(seconds, key=lambda name: -seconds[name])
    return [
        {"name": name, "seconds": seconds[name], "launches": launches[name], "share": seconds[name] / total}
        for name in ordered
    ]


def marked_part(device: torch.device) -> Callable[[str], contextlib.AbstractContextManager[None]]:
    """Make a context of a stopwatch's parts that marks both ends in the device's queue.

    Annotations of the host would miss the kernels of a backward, which a thread of its own launches.
    """
    mark = torch.zeros(1, device=device)

    @contextlib.contextmanager
    def part(name: str) -> Iterator[None]:
        mark.erfinv_()
        yield
        mark.erfinv_()

    return part


def busy_by_part(events: Sequence[Event], parts: Sequence[str | None]) -> dict[str, float]:
    """Seconds in which the device was busy with each part; nothing if it has not as many marks as `parts`."""
    ordered, busy = sorted(events, key=lambda event: event.start), defaultdict[str, float](float)
    marks = [i for i, event in enumerate(ordered) if MARKER in event.name]
    if len(marks) != len(parts):
        return {}
    for part, (begin, end) in zip(parts, itertools.pairwise([*marks, len(ordered)]), strict=True):
        if part is not None:
            busy[part] += busy_microseconds(ordered[begin + 1 : end]) / 1e6
    return dict(busy)


def host_functions(profiler: cProfile.Profile) -> list[dict[str, Any]]:
    """The functions in which the host spent most: those with most seconds of their own, and those with most in all."""
    rows = [
        {"function": f"{'/'.join(Path(file).parts[-3:])}:{line}({name})", "calls": calls, "own": own, "in_all": in_all}
        for (file, line, name), (_, calls, own, in_all, _) in pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
    ]
    most = [sorted(rows, key=lambda row: -row[key])[:LISTED] for key in ("own", "in_all")]
    return [*most[0], *(row for row in most[1] if row not in most[0])]


def device_events(run: Callable[[], Any], device: torch.device) -> list[Event]:
    """Run once under `torch.profiler` and return what the device did; on a CPU, the operators that it called."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        run()
        if on_gpu:
            torch.cuda.synchronize(device)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    return [
        Event(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == kind
        and not getattr(event, "is_user_annotation", False)
        and (on_gpu or (event.cpu_parent is None and event.name.startswith("aten::")))
    ]
