"""Measure what a device can do at most: copy bandwidth and matrix-product rate."""

import timeit
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.harness.race import Budget, Contender, race, spread


@triton.jit
def _nothing_kernel(p_x):
    tl.store(p_x, 1.0)


def launch_microseconds(device: torch.device, count: int) -> dict[str, float]:
    """What a launch costs the host, by PyTorch and by Triton: the least of three rows of `count` without a wait."""
    x = torch.zeros(16, device=device)
    ways: dict[str, Callable[[], Any]] = {"aten add": lambda: torch.add(x, x)}
    if device.type == "cuda":
        ways["triton launch"] = lambda: _nothing_kernel[(1,)](x)
    for way in ways.values():  # compiled
        way()
    return {name: min(timeit.repeat(way, number=count, repeat=3)) / count * 1e6 for name, way in ways.items()}


def measure_ceilings(device: torch.device, *, smoke: bool = False) -> dict[str, Any]:
    """GB/s of a large copy within the device (bytes read plus written), TFLOP/s of a large matrix product, launches.

    On a GPU: 4 GiB and bf16 8192 x 8192 x 8192. On a CPU: 256 MiB and fp32 2048 x 2048 x 2048, on the threads torch
    uses. Operands are random: zeros run faster. `smoke`: far smaller, no ceiling at all.
    """
    on_gpu = device.type == "cuda"
    count, side, dtype = (1 << 30, 8192, torch.bfloat16) if on_gpu else (1 << 26, 2048, torch.float32)
    if smoke:
        count, side = 1 << 16, 256
    torch.manual_seed(0)
    source = torch.randn(count, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty(side, side, device=device, dtype=dtype)
    jobs = {"copy": lambda: target.copy_(source), "gemm": lambda: torch.mm(a, b, out=product)}
    contenders = [Contender(name, job, lambda _: None) for name, job in jobs.items()]
    laps = race(contenders, device=device, budget=Budget(seconds=5.0, min_rounds=10), clock="device")
    copied, flops = 2.0 * source.numel() * source.element_size(), 2.0 * side**3
    return {
        "copy_gb_per_s": copied / laps["copy"].median / 1e9,
        "copy_seconds": spread(laps["copy"].seconds),
        "copy_bytes": copied,
        "gemm_tflop_per_s": flops / laps["gemm"].median / 1e12,
        "gemm_seconds": spread(laps["gemm"].seconds),
        "gemm": f"{side} x {side} x {side} {str(dtype).removeprefix('torch.')}",
        "launch_microseconds": launch_microseconds(device, 200 if smoke else 2000),
    }
