"""First light runs every kernel there is, refuses wrong ones, and reads what Triton's driver says of a build."""

import contextlib
from dataclasses import replace

import pytest
import torch

from benchmarks.harness.race import WrongAnswer
from benchmarks.speed import bench_first_light as benchmark
from benchmarks.speed.builds import kernels, op_modules
from tests.support.as_on_gpu import AsOnGpu

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
CHOSEN = (
    "attention, D 16, group 2, both ways",
    "log-probs, bias, softcap, entropy",
    "loss from hidden states, sequence ratios",
    "loss from logits",
)


def test_a_few_lights_launch_every_kernel(monkeypatch):
    """All but the sum over parts, for which a tree has to be too large for the interpreter."""
    monkeypatch.setattr(AsOnGpu, "active", False)  # the lights are made where their generator is
    shipped = kernels(op_modules())
    names, launched = {id(kernel): name for name, kernel in shipped.items()}, set()
    kind = type(shipped["tree_attention_kernel"])
    launch = kind.__getitem__

    def noted(kernel, grid):
        launched.add(names.get(id(kernel)))
        return launch(kernel, grid)

    monkeypatch.setattr(kind, "__getitem__", noted)
    for name in CHOSEN:
        shares = benchmark.shine(benchmark.lights("cpu")[name], benchmark.SIZES["cpu"], CPU)
        assert max(shares.values()) <= 1
    assert launched == set(shipped) - {"sum_parts_kernel"}


@pytest.mark.parametrize("precise", [True, False])
def test_adapters_of_float32_beside_halves_pass_and_those_rounded_to_halves_are_refused(precise, monkeypatch):
    light = benchmark.lights("cpu")["linear layers with adapters, both ways"]
    size = replace(benchmark.SIZES["cpu"], dtype=torch.bfloat16, hidden=256, rows=64)
    if not precise:
        own = benchmark.adapted_linear

        def rounded(x, layers, scale):
            return own(x, [one._replace(down=one.down.bfloat16(), up=one.up.bfloat16()) for one in layers], scale)

        monkeypatch.setattr(benchmark, "adapted_linear", rounded)
    with contextlib.nullcontext() if precise else pytest.raises(WrongAnswer, match="by adapter"):
        assert max(benchmark.shine(light, size, CPU).values()) <= 1


def test_a_wrong_kernel_is_refused(monkeypatch):
    light = benchmark.lights("cpu")["attention, D 16, group 2, forward"]
    right = benchmark.tree_attention

    def wrong(*args, backend, **options):
        out = right(*args, backend="torch", **options)
        return out.roll(1, 0) if backend == "triton" else out

    monkeypatch.setattr(benchmark, "tree_attention", wrong)
    with pytest.raises(WrongAnswer, match="out is off by"):
        benchmark.shine(light, benchmark.SIZES["cpu"], CPU)
