"""Rates of GPUs and of the host that feeds them, each with its source."""

from dataclasses import dataclass, replace
from typing import Any

import torch

MATMUL_SHARE, COPY_SHARE = 0.73, 0.90
"""Shares of a data sheet's matrix products and bandwidth that large products and copies reach.

Taken for every GPU: 0.72 PFLOP/s and 4.3 TB/s on an H200, which is also what `benchmarks/first_hour.py` predicts with.
`measured` replaces them by what the GPU at hand reaches.
"""


@dataclass(frozen=True)
class Rates:
    """What a GPU does per second, as reached by large products and copies.

    Attributes:
        name: of the GPU.
        halves: multiply-adds, twice, per second, of bfloat16 matrix products.
        float32: the same of float32 ones without TF32.
        bandwidth: bytes read and written per second.
        memory: bytes.
        attention, attention_backward: share of `halves` that tree attention reaches at completions of some 200 tokens.
            From the timing model of its machine code on sm_90: 223 to 253 TFLOP/s forward, 152 backward, of 720.
        launch: seconds that the shortest kernel keeps the device busy, also within a CUDA graph.
        source: where the rates come from.
    """

    name: str
    halves: float
    float32: float
    bandwidth: float
    memory: float
    source: str
    attention: float = 0.32
    attention_backward: float = 0.21
    launch: float = 2e-6

    def seconds(self, flops: float, moved: float, dtype: torch.dtype, share: float = 1.0) -> float:
        """Roofline of one operator: the longest of its products, its bytes and a launch."""
        return max(self.products(flops, dtype, share), moved / self.bandwidth, self.launch)

    def products(self, flops: float, dtype: torch.dtype, share: float = 1.0) -> float:
        """Seconds of matrix products only."""
        return flops / ((self.float32 if dtype in (torch.float32, torch.float64) else self.halves) * share)


def _of_data_sheet(name: str, halves: float, float32: float, bandwidth: float, memory: float, sheet: str) -> Rates:
    """Take TFLOP/s, TB/s and GB of a data sheet times the shares that are reached."""
    return Rates(
        name, halves * MATMUL_SHARE * 1e12, float32 * MATMUL_SHARE * 1e12, bandwidth * COPY_SHARE * 1e12, memory * 1e9,
        f"{sheet}, times {MATMUL_SHARE} for products and {COPY_SHARE} for bytes",
    )  # fmt: skip


GPUS = {
    rates.name: rates
    for rates in (
        _of_data_sheet("H200", 989, 67, 4.8, 141, "NVIDIA H200 data sheet, SXM, dense"),
        _of_data_sheet("H100", 989, 67, 3.35, 80, "NVIDIA H100 data sheet, SXM, dense"),
        _of_data_sheet("A100", 312, 19.5, 2.039, 80, "NVIDIA A100 data sheet, SXM 80 GB, dense"),
        _of_data_sheet("L40S", 362, 91.6, 0.864, 48, "NVIDIA L40S data sheet, dense"),
        _of_data_sheet("MI300X", 1307.4, 163.4, 5.3, 192, "AMD Instinct MI300X data sheet, dense"),
    )
}
"""By name. Data sheets give products with sparsity at twice these rates where they give them at all."""


@dataclass(frozen=True)
class Host:
    """Seconds of the host, by what it does; from runs of Qwen3-1.7B's 28 layers with LoRA on one quiet core of a CPU.

    Attributes:
        forward: of a launch from Python through modules: 61 ms for the 1,624 of a forward with Liger's modules.
        backward: of a launch by autograd's engine: 25 ms for 2,430.
        visit: of one module that a walk over the model passes: 245 ms for 25 walks over 2,387 modules.
        replay: of what `generate` does between two replays of a CUDA graph, when the device waits; an estimate.
    """

    forward: float = 37e-6
    backward: float = 10e-6
    visit: float = 4.1e-6
    replay: float = 1e-3


HOST = Host()


def measured(rates: Rates, ceilings: dict[str, Any], name: str) -> Rates:
    """Replace products of halves and bandwidth by those of `measure_ceilings`, and scale float32 products alike."""
    halves = ceilings["gemm_tflop_per_s"] * 1e12
    return replace(
        rates,
        name=name,
        halves=halves,
        float32=rates.float32 * halves / rates.halves,
        bandwidth=ceilings["copy_gb_per_s"] * 1e9,
        source=f"measured on this {name}: {ceilings['gemm']} products and a copy",
    )
