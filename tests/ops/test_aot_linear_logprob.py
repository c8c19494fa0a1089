"""Ahead of time: the log-prob kernels as shipped compile for every target, without spills, with tensor cores."""

import re

import pytest
import torch

from cfa_kernels.ops.linear_logprob import MERGE_OPTIONS, launch_options
from tests.support.aot import TARGETS, AotCase, compile_cases
from tests.support.specialization import with_ones

pytestmark = pytest.mark.slow

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
EVERY_FEATURE = ("bias", "softcap", "entropy")


def statistics_case(target: str, dtype: torch.dtype, features: tuple[str, ...] = (), aligned: bool = True) -> AotCase:
    """One launch of the tiles' kernel, with the alignment that the launcher finds in real tensors."""
    options = launch_options("hip" if target == "gfx942" else target, dtype, aligned=aligned)
    compiler = {name: options.pop(name) for name in ("num_warps", "num_stages", "waves_per_eu") if name in options}
    constants = options | {
        "HAS_BIAS": "bias" in features,
        "HAS_SOFTCAP": "softcap" in features,
        "WITH_ENTROPY": "entropy" in features,
    }
    kind = NAMES[dtype]
    arguments = {"p_tiles": "*fp32:16", "n_rows": "i32"}
    arguments |= {"inner": "fp32", "outer": "fp32", "group": "i32"}
    sizes = ("vocabulary", "width", "stride_h", "stride_w")
    arguments |= dict.fromkeys(sizes, "i32:16" if aligned else "i32")
    if options["TMA"]:
        arguments["hidden"] = f"tensordesc<{kind}[{options['BLOCK_M']}, {options['BLOCK_K']}]>"
        arguments["lm_head"] = f"tensordesc<{kind}[{options['BLOCK_N']}, {options['BLOCK_K']}]>"
    else:
        arguments["hidden"] = arguments["lm_head"] = f"*{kind}:16" if aligned else f"*{kind}"
    if "bias" in features:
        arguments["p_bias"] = f"*{kind}:16"
    else:
        constants["p_bias"] = None
    name = f"{target} {kind} {'aligned' if aligned else 'unaligned'} {' '.join(features)}".strip()
    return AotCase(
        name, "cfa_kernels.ops.linear_logprob:tile_statistics_kernel", arguments, constants, compiler, (target,)
    )


def merge_case(targets: tuple[str, ...] = tuple(TARGETS)) -> AotCase:
    constants = dict(MERGE_OPTIONS)
    compiler = {"num_warps": constants.pop("num_warps")}
    arguments = {"p_tiles": "*fp32:16", "p_targets": "*i64:16", "p_out": "*fp32", "inner": "fp32", "outer": "fp32"}
    arguments |= dict.fromkeys(("p_hidden", "p_head", "p_bias"), "*bf16:16")
    arguments |= dict.fromkeys(("n_rows", "n_out", "n_tiles", "vocabulary"), "i32")
    arguments |= dict.fromkeys(("width", "stride_h", "stride_w"), "i32:16")
    return AotCase(
        "merge",
        "cfa_kernels.ops.linear_logprob:merge_tiles_kernel",
        arguments,
        constants | dict.fromkeys(("HAS_BIAS", "HAS_SOFTCAP", "WITH_ENTROPY"), True),
        compiler,
        targets,
    )


CASES = [
    statistics_case(target, dtype, features, aligned)
    for target in TARGETS
    for dtype, features, aligned in (
        (torch.bfloat16, EVERY_FEATURE, True),
        (torch.bfloat16, EVERY_FEATURE, False),
        (torch.float32, EVERY_FEATURE, True),
    )
]
CASES += [statistics_case("sm_90", dtype) for dtype in (torch.bfloat16, torch.float16)] + [merge_case()]
ONES = [
    with_ones(statistics_case("sm_90", torch.bfloat16)),
    with_ones(statistics_case("sm_90", torch.bfloat16, EVERY_FEATURE, aligned=False)),
    with_ones(merge_case(("sm_90",))),
]
CASES += ONES
"""A vocabulary, a width or a number of tiles of 1 builds the kernels anew."""


@pytest.fixture(scope="module")
def reports():
    return compile_cases(CASES)


def test_every_configuration_fits_its_target_without_spills(reports):
    assert len(reports) == sum(len(case.targets) for case in CASES)
    print(*(report.summary() for report in reports.values()), sep="\n")
    for report in reports.values():
        report.assert_fits()


def test_matrix_products_run_on_the_tensor_cores(reports):
    """wgmma on Hopper, tcgen05 on Blackwell, mma on Ampere, MFMA on CDNA3."""
    instruction = {
        "sm_80": r"mma\.sync\.aligned\.m16n8k16",
        "sm_90": r"wgmma\.mma_async\.sync\.aligned\.m64n(128|256)k16",
        "sm_100": r"tcgen05\.mma",
        "gfx942": r"v_mfma_f32_\d+x\d+x\d+_bf16",
    }
    for (name, target), report in reports.items():
        if "bf16" in name:
            assert re.search(instruction[target], report.assembly), name


def test_hopper_fetches_both_operands_with_the_tensor_memory_accelerator(reports):
    for (name, target), report in reports.items():
        if target == "sm_90" and "aligned" in name.split() and "fp32" not in name:
            assert "cp.async.bulk.tensor.2d" in report.assembly, name


def test_pointer_builds_load_aligned_rows_sixteen_bytes_at_a_time(reports):
    assembly = reports[statistics_case("sm_80", torch.bfloat16, EVERY_FEATURE).name, "sm_80"].assembly
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", assembly)
    assert copies
    assert set(copies) == {"0x10"}


def test_full_precision_inputs_never_round_to_tf32(reports):
    for (name, _), report in reports.items():
        if "fp32" in name:
            assert "tf32" not in report.assembly, name
            assert "xf32" not in report.assembly, name
