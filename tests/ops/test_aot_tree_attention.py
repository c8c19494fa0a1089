"""Ahead of time: the attention kernel as shipped compiles for every target, without spills, with tensor cores."""

import pytest
import torch

from cfa_kernels.ops.tree_attention import launch_options
from tests.ops.aot import AotCase, compile_cases

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
STRIDES = [f"stride_{tensor}{axis}" for tensor in "qkvo" for axis in "th"]


def case(architecture: str, dtype: torch.dtype, head_dim: int, group: int = 2, **features: bool) -> AotCase:
    """One shipped configuration, with the alignment that real tensors have."""
    options = launch_options(architecture, dtype, head_dim, group, **features)
    compiler = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    signature = {f"p_{name}": f"*{NAMES[dtype]}:16" for name in ("q", "k", "v", "out")}
    signature |= dict.fromkeys(("p_work", "p_segments", "p_context"), "*i32:16")
    signature |= dict.fromkeys(STRIDES, "i32:16") | {"scale": "fp32", "softcap": "fp32", "window": "i32"}
    name = f"{NAMES[dtype]} d{head_dim} group {group} {' '.join(features)} for {architecture}"
    target = "gfx942" if architecture == "hip" else architecture
    return AotCase(
        name, "cfa_kernels.ops.tree_attention:tree_attention_kernel", signature, options, compiler, (target,)
    )


CASES = [
    case(architecture, dtype, head_dim)
    for architecture in ("sm_80", "sm_90", "sm_100", "hip")
    for dtype, head_dims in ((torch.bfloat16, (64, 128, 256)), (torch.float32, (128, 256)))
    for head_dim in head_dims
] + [
    case("sm_90", torch.bfloat16, 96),
    case("sm_90", torch.bfloat16, 128, group=8),
    case("sm_90", torch.bfloat16, 256, sliding_window=True, softcap=True),
]


@pytest.fixture(scope="module")
def reports():
    return compile_cases(CASES)


def test_every_configuration_fits_its_target_without_spills(reports):
    assert len(reports) == sum(len(c.targets) for c in CASES)
    print(*(report.summary() for report in reports.values()), sep="\n")
    for report in reports.values():
        report.assert_fits()


def test_hopper_builds_use_its_matrix_instructions(reports):
    for (name, target), report in reports.items():
        if target == "sm_90" and "bf16" in name:
            assert report.has_wgmma, name


def test_keys_and_values_are_loaded_sixteen_bytes_at_a_time(reports):
    """Gathered rows must not have cost the wide asynchronous copies."""
    for (name, target), report in reports.items():
        if target == "sm_90" and "bf16" in name:
            assert "cp.async.cg.shared.global" in report.asm["ptx"], name
