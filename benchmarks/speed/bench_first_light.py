"""Run every kernel once, in the builds that ship, on 64 rows, against float64; record what the driver loaded.

The first thing to run on a device, in minutes: bfloat16, heads 64 and 128 wide, a vocabulary of 151,936. On a CPU a
reduced form runs in Triton's interpreter.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.harness.race import Figures, WrongAnswer, release_memory
from benchmarks.harness.workloads import SEED
from benchmarks.speed.builds import loaded_builds, op_modules
from benchmarks.speed.command import device_name
from benchmarks.speed.reference import max_error
from cfa_kernels import linear_logprob
from cfa_kernels.losses.policy import linear_policy_loss, logits_policy_loss
from cfa_kernels.ops.adapted_linear import AdaptedLayer, adapted_linear
from cfa_kernels.ops.segment_table import SegmentTable
from cfa_kernels.ops.tree_attention import tree_attention

SEERS = 9216
"""Rows that see one first segment: so many that its gradients are summed in parts."""

Outputs = dict[str, Tensor]
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Light:
    """One way to call an operation.

    Attributes:
        make: `(size, generator)` to inputs; those of a float dtype are rounded to the size's, widened for the truth.
        run: `(inputs, backend)` to outputs, by name.
    """

    make: Callable[["Size", torch.Generator], Inputs]
    run: Callable[[Inputs, str], Outputs]


@dataclass(frozen=True)
class Size:
    """Sizes of the operands."""

    dtype: torch.dtype
    heads: tuple[int, ...]
    """Widths of heads."""
    groups: tuple[int, ...]
    """Query heads for each key head."""
    rows: int
    """Rows of heads and losses; attention's trees have 64, and more."""
    hidden: int
    vocabulary: int
    sums_parts: bool
    """Also a tree of so many rows that gradients of keys are summed in parts: too many for the interpreter."""


SIZES = {
    "cpu": Size(torch.float32, (16,), (2,), 8, 24, 160, False),
    "cuda": Size(torch.bfloat16, (64, 128), (2, 3, 8), 64, 2048, 151_936, True),
}


# Attention


def small_tree() -> SegmentTable:
    """64 rows: a prompt of 20, two completions of 15, in the middle of each a branch of 7."""
    return _tree([20, 15, 15, 7, 7], [[], [(0, 20)], [(0, 20)], [(0, 20), (20, 8)], [(0, 20), (35, 8)]])


def wide_tree() -> SegmentTable:
    """One prompt of 64 rows that 36 completions see."""
    return _tree([64] + [256] * (SEERS // 256), [[]] + [[(0, 64)]] * (SEERS // 256))


def _tree(lengths: list[int], parents: list[list[tuple[int, int]]]) -> SegmentTable:
    """Segments of these lengths, each after the rows `(first, count)` of others."""
    contexts = [[r for first, count in parent for r in range(first, first + count)] for parent in parents]
    ends = np.cumsum(lengths)
    return SegmentTable(
        (ends - lengths).astype(np.int32),
        np.array(lengths, dtype=np.int32),
        np.array([0, *itertools.accumulate(map(len, contexts))][:-1], dtype=np.int32),
        np.array([len(rows) for rows in contexts], dtype=np.int32),
        np.array([row for rows in contexts for row in rows], dtype=np.int32),
    )


@dataclass(frozen=True)
class Heads:
    """Whose attention, along which tree, under which rule."""

    dim: int
    group: int
    rule: dict[str, Any]
    sinks: bool = False
    tree: Callable[[], SegmentTable] = small_tree

    def inputs(self, size: Size, generator: torch.Generator) -> Inputs:
        rows, heads = self.tree().num_rows, 2 * self.group
        made = {
            name: torch.randn(rows, count, self.dim, generator=generator, device=generator.device)
            for name, count in (("q", heads), ("k", 2), ("v", 2), ("by_out", heads))
        }
        return made | ({"sinks": torch.zeros(heads, device=generator.device)} if self.sinks else {})

    def attend(self, inputs: Inputs, backend: str) -> Tensor:
        q, k, v = (inputs[name] for name in "qkv")
        return tree_attention(q, k, v, self.tree(), sinks=inputs.get("sinks"), backend=backend, **self.rule)

    def forward(self, inputs: Inputs, backend: str) -> Outputs:
        with torch.no_grad():
            return {"out": self.attend(inputs, backend)}

    def both_ways(self, inputs: Inputs, backend: str) -> Outputs:
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items() if name != "by_out"}
        out = self.attend(leaves, backend)
        by = torch.autograd.grad(out, list(leaves.values()), inputs["by_out"].to(out.dtype))
        return {"out": out.detach()} | {f"by {name}": x for name, x in zip(leaves, by, strict=True)}


RULES: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 9},
    "chunk": {"attention_chunk_size": 16},
    "softcap": {"softcap": 20.0},
}


def attention_lights(size: Size) -> dict[str, Light]:
    """Every group of plain heads forwards and both ways; window, chunk, cap and sinks both ways."""
    result = {}
    for dim in size.heads:
        for group in size.groups:
            heads, name = Heads(dim, group, {}), f"attention, D {dim}, group {group}"
            result[f"{name}, forward"] = Light(heads.inputs, heads.forward)
            result[f"{name}, both ways"] = Light(heads.inputs, heads.both_ways)
        rules = [(name, rule, False) for name, rule in RULES.items()] + [("window, sinks", RULES["window"], True)]
        for name, rule, sinks in rules:
            heads = Heads(dim, size.groups[0], rule, sinks)
            result[f"attention, D {dim}, {name}, both ways"] = Light(heads.inputs, heads.both_ways)
        if size.sums_parts:
            heads = Heads(dim, size.groups[0], {}, tree=wide_tree)
            result[f"attention, D {dim}, sums in parts, both ways"] = Light(heads.inputs, heads.both_ways)
    return result


# Heads and losses


def _head_inputs(size: Size, generator: torch.Generator) -> Inputs:
    options: dict[str, Any] = {"generator": generator, "device": generator.device}
    return {
        "hidden": torch.randn(size.rows, size.hidden, **options),
        "head": 2 * torch.randn(size.vocabulary, size.hidden, **options) / size.hidden**0.5,
        "bias": torch.randn(size.vocabulary, **options),
        **_tokens(size, options),
    }


def _logits_inputs(size: Size, generator: torch.Generator) -> Inputs:
    options: dict[str, Any] = {"generator": generator, "device": generator.device}
    return {"logits": 2 * torch.randn(4, size.rows // 4, size.vocabulary, **options), **_tokens(size, options)}


def _tokens(size: Size, options: dict[str, Any]) -> Inputs:
    b, t = 4, size.rows // 4
    return {
        "targets": torch.randint(size.vocabulary, (b, t), **options),
        "old": -math.log(size.vocabulary) - torch.rand(b, t, **options),
        "advantages": torch.randn(b, **options),
        "mask": torch.ones(b, t, device=options["device"]),
        "weights": 4 * torch.rand(b, t, **options),
    }


def _logprobs(features: dict[str, Any], inputs: Inputs, backend: str) -> Outputs:
    """Log-probs, or with `return_entropy` both, and the gradients of their sum by hidden states, head and bias."""
    options = dict(features)
    names = ["hidden", "head", *(["bias"] if options.pop("bias", False) else [])]
    leaves = {name: inputs[name].detach().requires_grad_() for name in names}
    targets = inputs["targets"].flatten()
    result = linear_logprob(
        leaves["hidden"], leaves["head"], targets, bias=leaves.get("bias"), backend=backend, **options
    )
    rows = result if isinstance(result, tuple) else (result,)
    by = torch.autograd.grad(sum(row.sum() for row in rows), list(leaves.values()))
    named = dict(zip(("log-probs", "entropy"), (row.detach() for row in rows), strict=False))
    return named | {f"by {name}": x for name, x in zip(names, by, strict=True)}


def _linear_loss(options: dict[str, Any], inputs: Inputs, backend: str) -> Outputs:
    b, t = inputs["targets"].shape
    leaves = {name: inputs[name].detach().requires_grad_() for name in ("hidden", "head")}
    of_sequences = options.get("importance_sampling_level") == "sequence"  # whose weights are one number
    weights = inputs["weights"][:, :1].expand(b, t) if of_sequences else inputs["weights"]
    loss = linear_policy_loss(
        leaves["hidden"].view(b, t, -1), leaves["head"], *_step(inputs), weights=weights, backend=backend, **options
    )[0]
    return _with_gradients(loss, leaves)


def _logits_loss(options: dict[str, Any], inputs: Inputs, backend: str) -> Outputs:
    logits = inputs["logits"].clone().requires_grad_()
    loss = logits_policy_loss(logits, *_step(inputs), weights=inputs["weights"], backend=backend, **options)[0]
    return _with_gradients(2 * loss, {"logits": logits})  # a factor, so that gradients are scaled


def _step(inputs: Inputs) -> tuple[Tensor, ...]:
    return tuple(inputs[name] for name in ("targets", "old", "advantages", "mask"))


def _with_gradients(loss: Tensor, leaves: Inputs) -> Outputs:
    by = torch.autograd.grad(loss, list(leaves.values()))
    return {"loss": loss.detach()} | {f"by {name}": x for name, x in zip(leaves, by, strict=True)}


def _adapter_inputs(size: Size, generator: torch.Generator) -> Inputs:
    """Three layers that share rows, whose adapters count as much as they and stay float32; gradients of about 1."""
    options: dict[str, Any] = {"generator": generator, "device": generator.device}
    rank, inputs = max(size.hidden // 64, 2), {"x": torch.randn(size.rows, size.hidden, **options)}
    for i, width in enumerate((size.hidden, size.hidden // 2, size.hidden // 2)):
        inputs |= {
            f"weight {i}": torch.randn(width, size.hidden, **options) / size.hidden**0.5,
            f"adapter down {i}": torch.randn(rank, size.hidden, **options) / size.hidden**0.5,
            f"adapter up {i}": torch.randn(width, rank, **options) / rank**0.5,
            f"by_out {i}": torch.randn(size.rows, width, **options) * (rank / size.rows / width) ** 0.5,
        }
    return inputs


def _adapters(inputs: Inputs, backend: str) -> Outputs:
    """Layers as the library runs them, or by the formula, and the gradients of rows and adapters."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items() if name == "x" or "adapter" in name}
    x = leaves["x"]
    layers = [
        AdaptedLayer(inputs[f"weight {i}"], None, leaves[f"adapter down {i}"], leaves[f"adapter up {i}"])
        for i in range(3)
    ]
    if backend == "triton":
        outs = adapted_linear(x, layers, 0.5)
    else:
        wide = x.to(layers[0].down.dtype)
        outs = tuple((x @ one.weight.t() + 0.5 * wide @ one.down.t() @ one.up.t()).to(x.dtype) for one in layers)
    by = torch.autograd.grad(outs, list(leaves.values()), [inputs[f"by_out {i}"] for i in range(3)])
    named = {f"out {i}": out.detach() for i, out in enumerate(outs)}
    return named | {f"by {name}": gradient for name, gradient in zip(leaves, by, strict=True)}


EVERYTHING: dict[str, Any] = {"bias": True, "softcap": 30.0, "return_entropy": True}
HEAD_LIGHTS = {
    "log-probs": Light(_head_inputs, functools.partial(_logprobs, {})),
    "log-probs, entropy": Light(_head_inputs, functools.partial(_logprobs, {"return_entropy": True})),
    "log-probs, bias, softcap, entropy": Light(_head_inputs, functools.partial(_logprobs, EVERYTHING)),
    "loss from hidden states": Light(_head_inputs, functools.partial(_linear_loss, {})),
    "loss from hidden states, sequence ratios": Light(
        _head_inputs, functools.partial(_linear_loss, {"importance_sampling_level": "sequence"})
    ),
    "loss from logits": Light(_logits_inputs, functools.partial(_logits_loss, {})),
    "loss from logits, in place": Light(_logits_inputs, functools.partial(_logits_loss, {"inplace": True})),
    "loss from logits, CISPO, entropy": Light(
        _logits_inputs, functools.partial(_logits_loss, {"loss_type": "cispo", "compute_entropy": True})
    ),
}


def lights(kind: str) -> dict[str, Light]:
    """Every light of a device's kind."""
    adapters = {"linear layers with adapters, both ways": Light(_adapter_inputs, _adapters)}
    return adapters | attention_lights(SIZES[kind]) | HEAD_LIGHTS


MULTIPLE = {torch.float32: 8.0, torch.bfloat16: 2.0}
"""Multiple of PyTorch's own error: in float32 that is luck, and a wrong kernel is off by thousands of it."""

TRUNCATION = 1e-3
"""Nats, and losses: tensor cores cut sums off towards zero, by up to 6e-4 at a width of 2,048."""


def shine(light: Light, size: Size, device: torch.device) -> dict[str, float]:
    """Run a light by Triton and hold each output to float64; returns each one's share of its budget.

    The budget is a multiple of what PyTorch's own form misses in the same dtype and of one rounding of the output's;
    float32 outputs of half-precision inputs get `TRUNCATION` on top. `WrongAnswer` beyond it.
    """
    made = light.make(size, torch.Generator(device).manual_seed(SEED))
    single = ("old", "advantages", "mask", "weights", "adapter")  # float32 beside operands of any dtype
    inputs = {
        name: x if not x.is_floating_point() or name.startswith(single) else x.to(size.dtype)
        for name, x in made.items()
    }
    exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    result, low, truth = light.run(inputs, "triton"), light.run(inputs, "torch"), light.run(exact, "torch")
    shares = {}
    for name, right in truth.items():
        dtype = result[name].dtype
        allowed = max_error(low[name], right) + torch.finfo(dtype).eps * right.abs().max().item()
        allowed = MULTIPLE[size.dtype] * allowed + (TRUNCATION if dtype != size.dtype or name == "loss" else 0.0)
        error = max_error(result[name], right)
        if not error <= allowed:
            raise WrongAnswer(f"{name} is off by {error:.3g}, allowed are {allowed:.3g}")
        shares[name] = error / allowed
    return shares


# Tests


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "light" in metafunc.fixturenames:
        metafunc.parametrize("light", list(lights(_kind(metafunc.config))))


def _kind(config: pytest.Config) -> str:
    return device_name(config)


@pytest.fixture
def new_builds(light: str, figures: Figures) -> Iterator[None]:
    """Record what the driver loads meanwhile, whether the light is right or wrong."""
    before = loaded_builds(op_modules())
    yield
    for key, build in loaded_builds(op_modules()).items():
        if key not in before:
            figures.builds.append({"group": light, "build": key, **build})


def test_a_kernel_gives_what_float64_says(
    pytestconfig: pytest.Config, light: str, device: torch.device, figures: Figures, new_builds: None
) -> None:
    kind = _kind(pytestconfig)
    check: dict[str, Any] = {"group": light, "device": kind}
    try:
        check["error_over_budget"] = shine(lights(kind)[light], SIZES[kind], device)
    except WrongAnswer as error:
        check["wrong"] = str(error)
        pytest.fail(str(error), pytrace=False)
    except Exception as error:
        check["wrong"] = f"raised {type(error).__name__}: {error}"
        raise
    finally:
        figures.checks.append(check)
        release_memory(device)


def test_no_build_spills(device: torch.device, figures: Figures) -> None:
    if device.type == "cpu":
        pytest.skip("in the interpreter there are no builds")
    assert figures.builds, "no build was found: has Triton moved `JITFunction.device_caches`?"
    registers = statistics.median(build["registers"] for build in figures.builds)
    print(f"{len(figures.builds)} builds, median {registers:.0f} registers")
    spilled = [f"{b['build']} ({b['group']}): {b['spilled_words']}" for b in figures.builds if b["spilled_words"]]
    assert not spilled, "words of local memory a lane:\n" + "\n".join(spilled)
