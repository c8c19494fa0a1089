"""Ahead of time: the log-prob kernels as shipped compile for every target, without spills, with tensor cores."""

import itertools
import re

import pytest
import torch

from cfa_kernels.ops.block_sums import WIDTH
from cfa_kernels.ops.linear_logprob import MERGE_OPTIONS, launch_options
from cfa_kernels.ops.tuning import tuned
from tests.support.aot import TARGETS, AotCase, compile_cases

pytestmark = pytest.mark.slow

KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
EVERY_FEATURE = dict.fromkeys(("HAS_BIAS", "HAS_SOFTCAP", "WITH_ENTROPY"), True)


def statistics_case(target: str, dtype: torch.dtype, every_feature: bool = True, aligned: bool = True) -> AotCase:
    """One launch of the tiles' kernel, with the alignment that the launcher sees in real tensors."""
    options = launch_options("hip" if target == "gfx942" else target, dtype, aligned=aligned)
    options |= dict.fromkeys(EVERY_FEATURE, every_feature)
    kind = KINDS[dtype]
    arguments = {"p_tiles": "*fp32:16", "n_rows": "i32", "inner": "fp32", "outer": "fp32", "group": "i32"}
    sizes = ("vocabulary", "width", "stride_h", "stride_w")
    arguments |= dict.fromkeys(sizes, "i32:16" if aligned else "i32")
    for name, rows in (("hidden", "BLOCK_M"), ("lm_head", "BLOCK_N")):
        descriptor = f"tensordesc<{kind}[{options[rows]}, {options['BLOCK_K']}]>"
        arguments[name] = descriptor if options["TMA"] else f"*{kind}:16" if aligned else f"*{kind}"
    if every_feature:
        arguments["p_bias"] = f"*{kind}:16"
    else:
        options["p_bias"] = None
    name = f"{kind} {'aligned' if aligned else 'unaligned'} {'every feature' if every_feature else 'plain'}"
    return AotCase(name, "ops.linear_logprob:tile_statistics_kernel", target, arguments, options)


def merge_case(target: str) -> AotCase:
    arguments = {"p_tiles": "*fp32:16", "p_targets": "*i64:16", "p_out": "*fp32", "inner": "fp32", "outer": "fp32"}
    arguments |= dict.fromkeys(("p_hidden", "p_head", "p_bias"), "*bf16:16")
    arguments |= dict.fromkeys(("n_rows", "n_out", "n_tiles", "vocabulary"), "i32")
    arguments |= dict.fromkeys(("width", "stride_h", "stride_w"), "i32:16")
    return AotCase("merge", "ops.linear_logprob:merge_tiles_kernel", target, arguments, MERGE_OPTIONS | EVERY_FEATURE)


def sums_case(target: str, dtype: torch.dtype) -> AotCase:
    kinds = {"p_logits": f"*{KINDS[dtype]}:16", "p_maxima": "*fp32:16", "p_sums": "*fp64:16", "temperature": "fp32"}
    kinds |= {"V": "i32:16", "n": "i32", "stride_b": "i32:16"}
    options = tuned("block_sums_kernel") | {"WIDTH": WIDTH}
    return AotCase(f"sums {KINDS[dtype]}", "ops.block_sums:block_sums_kernel", target, kinds, options)


SUMS = [sums_case(*where) for where in itertools.product(("sm_80", "sm_90", "gfx942"), (torch.bfloat16, torch.float32))]
ALIGNED_SM_80 = statistics_case("sm_80", torch.bfloat16)
UNALIGNED_SM_90 = statistics_case("sm_90", torch.bfloat16, aligned=False)
PLAIN_SM_90 = statistics_case("sm_90", torch.bfloat16, every_feature=False)
CASES = [
    *(statistics_case(target, torch.bfloat16) for target in TARGETS if target != "sm_80"),
    *(statistics_case(target, torch.bfloat16, aligned=False) for target in TARGETS if target != "sm_90"),
    *(statistics_case(target, torch.float32) for target in ("sm_90", "gfx942")), *map(merge_case, TARGETS),
    ALIGNED_SM_80, UNALIGNED_SM_90, statistics_case("sm_90", torch.float16, every_feature=False), *SUMS,
    *(case.with_ones() for case in (PLAIN_SM_90, UNALIGNED_SM_90, merge_case("sm_90"))),
]  # fmt: skip


@pytest.fixture(scope="module")
def reports():
    return compile_cases(CASES)


def test_every_configuration_fits_its_target_without_spills(reports):
    print(*reports, sep="\n")
    for report in reports:
        report.assert_fits()


def test_matrix_products_run_on_the_tensor_cores_and_full_precision_never_rounds_to_tf32(reports):
    """wgmma on Hopper, tcgen05 on Blackwell, mma on Ampere, MFMA on CDNA3."""
    instruction = {
        "sm_80": r"mma\.sync\.aligned\.m16n8k16", "sm_90": r"wgmma\.mma_async\.sync\.aligned\.m64n(128|256)k16",
        "sm_100": r"tcgen05\.mma", "gfx942": r"v_mfma_f32_\d+x\d+x\d+_bf16",
    }  # fmt: skip
    for report in reports:
        if "bf16" in report.name and "sums" not in report.name:
            assert re.search(instruction[report.target], report.assembly), report
        if "fp32" in report.name:
            assert not re.search("tf32|xf32", report.assembly), report


def test_hopper_fetches_both_operands_with_the_tensor_memory_accelerator(reports):
    for report in reports:
        if report.target == "sm_90" and re.match("(bf|fp)16 aligned", report.name):
            assert "cp.async.bulk.tensor.2d" in report.assembly, report


def test_pointer_builds_load_aligned_rows_sixteen_bytes_at_a_time(reports):
    assembly = reports[CASES.index(ALIGNED_SM_80)].assembly
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", assembly)
    assert set(copies) == {"0x10"}


def test_sums_of_blocks_load_sixteen_bytes_and_leave_room_for_a_full_multiprocessor(reports):
    for case, report in zip(CASES, reports, strict=True):
        if case in SUMS:
            assert report.registers * report.threads <= TARGETS[report.target].register_file // 8, report
            assert report.shared_memory <= 4096, report
            assert re.search(r"ld\.global\.(L\S+\.)?v4\.b32|(global|buffer)_load_dwordx4", report.assembly), report
