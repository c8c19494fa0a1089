"""Ahead of time: the row kernels as shipped compile for every target without spills, with 16-byte loads."""

import re

import pytest
import torch

from cfa_kernels.loss import policy_rows
from cfa_kernels.ops import row_logprobs
from cfa_kernels.ops.dispatch import TRITON_BEFORE_3_7
from tests.support.aot import TARGETS, AotCase, compile_cases

pytestmark = pytest.mark.slow

VOCABULARY, ODD_VOCABULARY = 151_936, 100_278
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
FLAGS = ("HAS_OLD", "HAS_WEIGHTS", "HAS_REF", "HAS_ENTROPY_SCALE", "HAS_BIAS", "HAS_SOFTCAP", "WITH_ENTROPY")
OPTIONAL = {
    "HAS_BIAS": "p_bias", "HAS_OLD": "p_old", "HAS_WEIGHTS": "p_weights", "HAS_REF": "p_ref",
    "HAS_ENTROPY_SCALE": "p_entropy_scale", "HAS_ROWS": "p_rows",
}  # fmt: skip


def case(
    kernel: str, target: str, logits: torch.dtype, gradient: torch.dtype, *, everything: bool = False,
    clips: bool = True, rows: bool = True, vocabulary: int = VOCABULARY,
) -> AotCase:  # fmt: skip
    """A kernel with the pointers, strides and tiles of (B, T, V) rows, which start at multiples of 16 logits."""
    hip = target == "gfx942"
    options = row_logprobs.launch_options(vocabulary, logits.itemsize, hip=hip) | dict.fromkeys(FLAGS, everything)
    options |= {"CLIPS": clips, "LOG2E": 1.4426950408889634, "HAS_ROWS": rows}
    options |= {"OVERLAPS": gradient.itemsize < logits.itemsize and not hip}
    options |= dict.fromkeys(("stride_v", "stride_gv"), 1)
    options |= {pointer: None for flag, pointer in OPTIONAL.items() if not options[flag]}
    kinds = {
        "p_logits": f"*{KINDS[logits]}:16", "p_gradient": f"*{KINDS[gradient]}:16", "p_targets": "*i64:16",
        "p_counted": "*i1:16", "p_bias": "*bf16:16", "V": "i32" if vocabulary % 16 else "i32:16",
        **dict.fromkeys(("N", "T"), "i32"),
    }  # fmt: skip
    module = policy_rows if hasattr(policy_rows, kernel) else row_logprobs
    names = getattr(module, kernel).arg_names
    options = {name: value for name, value in options.items() if name in (*names, "num_warps")}
    rest = {"p": "*fp32:16", "stride": "i64:16"}  # of other pointers and of strides; what is left are numbers
    kinds = {name: rest.get(name.partition("_")[0], "fp32") for name in names if name not in options} | kinds
    arguments = {name: kind for name, kind in kinds.items() if name in names and name not in options}
    label = [kernel, KINDS[logits], "to", KINDS[gradient], "everything" if everything else "plain"]
    label += ["unclipped"] * (not clips) + ["summing"] * (not rows) + ["odd"] * (vocabulary % 16 != 0)
    return AotCase(
        " ".join(label), f"{module.__name__.removeprefix('cfa_kernels.')}:{kernel}", target, arguments, options
    )


CASES = [
    *(case("policy_rows_kernel", target, FP32, BF16, everything=True) for target in TARGETS),
    *(case("policy_rows_kernel", target, BF16, BF16) for target in ("sm_90", "gfx942")),
    case("policy_rows_kernel", "sm_90", FP16, FP16, everything=True),
    *(case("policy_rows_kernel", "sm_90", FP32, FP32, everything=every, clips=False) for every in (False, True)),
    *(case("row_gradients_kernel", "sm_90", FP32, BF16, everything=True, rows=rows) for rows in (True, False)),
    *(
        case("policy_rows_kernel", "sm_90", logits, BF16, everything=everything, vocabulary=ODD_VOCABULARY)
        for logits in (BF16, FP32)
        for everything in (False, True)
    ),
    case("policy_rows_kernel", "sm_80", BF16, BF16, vocabulary=ODD_VOCABULARY),
]
ONES = [
    case(kernel, "sm_90", BF16, BF16, everything=True, vocabulary=1, rows=rows).with_ones()
    for kernel, rows in (
        ("policy_rows_kernel", True), ("row_logprobs_kernel", True), ("row_gradients_kernel", True),
        ("row_gradients_kernel", False),
    )
]  # fmt: skip
HINT = ".L1::evict_first.L2::cache_hint"


@pytest.fixture(scope="module")
def compiled():
    return compile_cases(CASES + ONES)


@pytest.fixture(scope="module")
def reports(compiled):
    """Builds for NVIDIA and rows of a real vocabulary."""
    return [report for report in compiled[: len(CASES)] if report.is_nvidia]


def accesses(report):
    """PTX without what it says about caches."""
    return report.assembly.replace(HINT, "")


def test_every_kernel_fits_its_target_without_spills(compiled):
    print(*compiled, sep="\n")
    for report in compiled:
        report.assert_fits(max_shared_memory=16_384)  # room to line up what lies behind the last whole vector


def test_one_row_fills_a_multiprocessor_so_that_few_rows_share_the_l2_cache(reports):
    for report in reports:
        if report.name.startswith("policy_rows"):
            assert report.threads == 1024, report
            # Before 3.7 Triton fits float32 logits of an odd vocabulary into 32 registers: two rows, a little slower.
            spared = TRITON_BEFORE_3_7 and "fp32 to bf16" in report.name and report.name.endswith("odd")
            assert 32 - spared < report.registers <= 64, report


def test_the_second_reading_and_the_gradient_are_the_first_to_leave_the_l2_cache(reports):
    """So that what other rows are to read again stays there."""
    for report in reports:
        if report.name.startswith("policy_rows") and "plain" in report.name:
            first, second = (report.assembly.count(f"ld.global{hint}.v4.b32") for hint in ("", HINT))
            # 16 logits a lane for the sums, 32 bytes of them for the gradient
            assert second == first - (2 if "kernel fp32" in report.name else 0) > 0, report
            assert report.assembly.count(f"st.global{HINT}.v") == accesses(report).count("st.global.v") > 0, report


def test_vocabularies_of_any_size_are_read_and_written_in_wide_accesses(reports):
    """OLMo 2 has 100,278 tokens, Granite 49,155: masks of single logits would make every access one of 2 bytes."""
    for report in reports:
        text = accesses(report)
        wide, narrow = (text.count(f"ld.global.{width}.b32") for width in ("v4", "v2"))
        assert wide >= max(narrow, 1), report  # a bfloat16 bias beside float32 logits takes 8 bytes
        if report.name.endswith("plain odd"):
            logits = 2 if "kernel bf16" in report.name else 4
            assert wide == logits + 2, report
            # Single ones: the target, and behind the last whole vector 16 bytes a lane at most.
            assert text.count("ld.global.b16") <= 1 + 2 * 2, report
            assert text.count("st.global.b16") <= 2 * logits, report


def test_no_minimum_drops_a_nan(reports):
    """The interpreter cannot show it: its minimum of nan and 1 is nan, that of a plain `min.f32` is 1."""
    for report in reports:
        assert "min.f32" not in report.assembly, report
        assert "min.NaN.f32" in report.assembly or "everything" not in report.name, report


def test_the_targets_logit_is_read_before_any_gradient_can_lie_over_it(reports):
    """No warp stores a gradient before the barriers of the sums, and the load stands before them."""
    for report in reports:
        if report.name.startswith("policy_rows_kernel bf16") and not report.name.endswith("odd"):
            text = accesses(report)
            (single,) = (match.start() for match in re.finditer(r"ld\.global\.b16", text))
            assert single < text.index("bar.sync") < text.index("st.global.v4"), report
