"""Ahead of time: the attention kernel as shipped compiles for every target, without spills, with tensor cores."""

import re

import pytest
import torch

from cfa_kernels.ops.attention_options import AttentionRule
from cfa_kernels.ops.tree_attention import launch_options
from tests.support.aot import AotCase, compile_cases
from tests.support.wgmma import overwritten_inputs

pytestmark = pytest.mark.slow

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
OPTIONS = {
    "window": ("sliding_window", 8),
    "chunk": ("attention_chunk_size", 8),
    "softcap": ("softcap", 8.0),
    "sinks": ("sinks", torch.zeros(1)),
}
STRIDES = [f"stride_{tensor}{axis}" for tensor in "qkvo" for axis in "th"]


def case(
    target: str, dtype: torch.dtype, dims: tuple[int, int], group: int = 2, *, ones: bool = False, **features: bool
) -> AotCase:
    """One shipped configuration, with the alignment that real tensors have.

    `dims` are the widths of keys and values. With `ones` every integer argument is 1, which the launcher hands to
    the compiler as a constant.
    """
    architecture = "hip" if target == "gfx942" else target
    rule = AttentionRule(scale=1.0, **dict(OPTIONS[name] for name in features if name in OPTIONS))
    constexprs = launch_options(architecture, dtype, *dims, group, rule, lse=features.get("lse", False))
    compiler = {name: constexprs.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in constexprs}
    signature = {f"p_{name}": f"*{NAMES[dtype]}:16" for name in ("q", "k", "v", "out")}
    signature |= dict.fromkeys(("p_work", "p_context"), "*i32:16") | {"scale": "fp32", "softcap": "fp32"}
    signature |= {"first_query_row": "i32"}
    if features.get("sinks"):
        signature |= {"p_sinks": "*bf16:16"}
    else:
        constexprs |= {"p_sinks": None}
    if features.get("lse"):
        signature |= {"p_lse": "*fp32:16"}
    else:
        constexprs |= {"p_lse": None}
    wide = all(dim % 16 == 0 for dim in dims)
    constexprs |= {"STRIDE_UNIT": 1 if wide else 8}
    if ones:
        constexprs |= dict.fromkeys([*STRIDES, "span"], 1)
    else:
        signature |= dict.fromkeys(STRIDES, "i32:16" if wide else "i32") | {"span": "i32"}
    extras = " ".join([*features, *(["ones"] if ones else [])])
    name = f"{NAMES[dtype]} {dims[0]}/{dims[1]} group {group} {extras} for {target}"
    return AotCase(
        name, "cfa_kernels.ops.tree_attention:tree_attention_kernel", signature, constexprs, compiler, (target,)
    )


CASES = [
    build
    for target in TARGETS
    for build in (
        *(case(target, torch.bfloat16, (dim, dim)) for dim in (128, 256)),
        *(case(target, torch.float32, (dim, dim)) for dim in (128, 256)),
        case(target, torch.bfloat16, (64, 64), group=8, window=True, sinks=True),  # GPT-OSS
        case(target, torch.bfloat16, (128, 128), group=5, chunk=True),  # Llama 4
        case(target, torch.bfloat16, (192, 128), group=1),  # DeepSeek
        case(target, torch.bfloat16, (16, 16), ones=True, window=True),
    )
] + [
    case("sm_90", torch.bfloat16, (128, 128), lse=True),
    case("sm_90", torch.bfloat16, (128, 128), group=7, lse=True),  # Qwen2.5-7B
    case("sm_90", torch.bfloat16, (128, 128), group=3, window=True, softcap=True, sinks=True, lse=True),
    case("sm_90", torch.bfloat16, (64, 64), group=71),
    case("sm_90", torch.bfloat16, (96, 96), group=3),  # two column blocks each, a group that fills no tile
    *(case("sm_90", torch.bfloat16, (dim, dim)) for dim in (72, 88, 104, 120)),  # strides that 8 divides, 16 not
    case("sm_90", torch.bfloat16, (256, 256), window=True, softcap=True),  # Gemma 2
    case("sm_90", torch.float32, (64, 64), group=71),  # Falcon
    case("sm_90", torch.bfloat16, (16, 16), ones=True, chunk=True),
]


@pytest.fixture(scope="module")
def reports():
    return compile_cases(CASES)


def hopper(reports):
    return [report for (name, target), report in reports.items() if target == "sm_90" and "bf16" in name]


def test_every_configuration_fits_its_target_without_spills(reports):
    assert len(reports) == sum(len(c.targets) for c in CASES)
    print(*(report.summary() for report in reports.values()), sep="\n")
    for report in reports.values():
        if "ones" not in report.name:
            report.assert_fits()


@pytest.mark.parametrize("target", TARGETS)
def test_integers_that_are_one_compile(reports, target):
    """Their rows overlap, so such a build need not be fast; a kernel that calls a method of an integer fails here."""
    (report,) = (r for r in reports.values() if r.target == target and "window ones" in r.name)
    assert not report.overwritten


def test_hopper_builds_use_its_matrix_instructions(reports):
    for report in hopper(reports):
        assert report.has_wgmma, report.name


def test_programs_share_a_hopper_multiprocessor(reports):
    """The products of one run during the softmax of another."""
    expected = {
        "16/16": 5,
        "64/64": 5,
        "64/64 group 71": 2,
        "96/96": 3,
        "72/72": 4,
        "88/88": 3,
        "104/104": 2,
        "120/120": 2,
        "128/128": 2,
        "192/128": 2,
        "256/256": 1,
    }
    for report in hopper(reports):
        dims, _, rest = report.name.removeprefix("bf16 ").partition(" ")
        group = " ".join(rest.split()[:2])
        assert report.blocks >= expected.get(f"{dims} {group}", expected[dims]), report.summary()


def test_keys_and_values_are_loaded_sixteen_bytes_at_a_time(reports):
    """Gathered rows must not have cost the wide asynchronous copies."""
    for report in hopper(reports):
        if "ones" not in report.name:
            assert "cp.async.cg.shared.global" in report.asm["ptx"], report.name
            # 16 columns behind 64 are too few for that, where all warps share them.
            narrow = re.findall(r"cp\.async\.ca\.shared\.global.*?, (0x\w+)(?:, %r\d+)?;", report.asm["ptx"])
            assert set(narrow) <= ({"0x8"} if report.name.startswith("bf16 72") else set()), report.name


def test_probabilities_stay_in_registers_until_their_product_is_done(reports):
    """What `assert_fits` found nothing against is there to be looked at, and is seen once the waits are gone."""
    for report in hopper(reports):
        assert report.register_inputs >= 2, report.name
        without_waits = re.sub(r".*WARPGROUP\.DEPBAR.*\n", "", report.asm["sass"])
        assert overwritten_inputs(without_waits), report.name
