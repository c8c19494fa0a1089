"""Ahead of time: the row kernels as shipped compile for every target without spills, with 16-byte loads."""

import re

import pytest
import torch

from cfa_kernels.ops.dispatch import TRITON_BEFORE_3_7
from cfa_kernels.ops.policy_rows import launch_options
from tests.support.aot import TARGETS, AotCase, compile_cases
from tests.support.specialization import with_ones

pytestmark = pytest.mark.slow

VOCABULARY, ODD_VOCABULARY = 151_936, 100_278
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FLAGS = (
    "HAS_OLD", "HAS_WEIGHTS", "HAS_REF", "CORRECT_KL", "HAS_ENTROPY_SCALE", "HAS_BIAS", "HAS_SOFTCAP", "WITH_ENTROPY",
)  # fmt: skip
OPTIONAL = {"HAS_BIAS": "p_bias", "HAS_OLD": "p_old", "HAS_WEIGHTS": "p_weights", "HAS_REF": "p_ref"}
OPTIONAL |= {"HAS_ENTROPY_SCALE": "p_entropy_scale", "HAS_ROWS": "p_rows"}
NUMBERS = ["inv_temperature", "softcap", "low", "high", "delta", "beta", "sapo_pos", "sapo_neg", "log_ratio_max"]


def case(
    kernel: str,
    target: str,
    logits: torch.dtype,
    gradient: torch.dtype,
    *,
    everything: bool,
    loss_type: str = "dapo",
    rows: bool = True,
    vocabulary: int = VOCABULARY,
) -> AotCase:
    """A kernel with the pointers, strides and tiles of (B, T, V) rows, which start at multiples of 16 logits."""
    import cfa_kernels.ops.policy_rows as module

    names = getattr(module, kernel).arg_names
    hip = target == "gfx942"
    options = launch_options(vocabulary, logits.itemsize, hip=hip)
    compiler = {"num_warps": options.pop("num_warps")}
    constexprs = dict.fromkeys(FLAGS, everything) | {"LOSS_TYPE": loss_type, "LOG2E": 1.4426950408889634, **options}
    constexprs |= {"INPLACE": True, "HAS_ROWS": rows, "OVERLAPS": gradient.itemsize < logits.itemsize and not hip}
    constexprs |= {"stride_v": 1, "stride_gv": 1, "stride_ov": 1}
    for flag, pointer in OPTIONAL.items():
        if not constexprs[flag]:
            constexprs[pointer] = None
    constexprs = {name: value for name, value in constexprs.items() if name in names}
    arguments = {}
    for name in (name for name in names if name not in constexprs):
        if name in ("p_logits", "p_rows") and kernel != "row_gradients_kernel":
            arguments[name] = (
                f"*{NAMES[logits]}:16" if name == "p_logits" or kernel == "scale_rows_kernel" else "*fp32:16"
            )
        elif name == "p_logits":
            arguments[name] = f"*{NAMES[logits]}:16"
        elif name in ("p_gradient", "p_out"):
            arguments[name] = f"*{NAMES[gradient]}:16"
        elif name == "p_targets":
            arguments[name] = "*i64:16"
        elif name == "p_counted":
            arguments[name] = "*i1:16"
        elif name == "p_bias":
            arguments[name] = "*bf16:16"
        elif name.startswith("p_"):
            arguments[name] = "*fp32:16"
        elif name in NUMBERS:
            arguments[name] = "fp32"
        elif name.startswith("stride"):
            arguments[name] = "i64:16"
        else:
            arguments[name] = "i32:16" if name == "V" and vocabulary % 16 == 0 else "i32"
    label = (
        f"{kernel} {NAMES[logits]} to {NAMES[gradient]} {loss_type} {'everything' if everything else 'plain'} "
        f"{'' if rows else 'summing '}{target}{'' if vocabulary % 16 == 0 else ' odd'}"
    )
    return AotCase(label, f"cfa_kernels.ops.policy_rows:{kernel}", arguments, constexprs, compiler, (target,))


CASES = [
    *(case("policy_rows_kernel", target, torch.float32, torch.bfloat16, everything=True) for target in TARGETS),
    *(case("policy_rows_kernel", t, torch.bfloat16, torch.bfloat16, everything=False) for t in ("sm_90", "gfx942")),
    case("policy_rows_kernel", "sm_90", torch.float16, torch.float16, everything=True, loss_type="sapo"),
    case("policy_rows_kernel", "sm_90", torch.float32, torch.float32, everything=False, loss_type="cispo"),
    *(
        case("row_gradients_kernel", "sm_90", torch.float32, torch.bfloat16, everything=True, rows=r)
        for r in (True, False)
    ),
    case("scale_rows_kernel", "sm_90", torch.bfloat16, torch.bfloat16, everything=False),
    *(
        case("policy_rows_kernel", "sm_90", logits, torch.bfloat16, everything=everything, vocabulary=ODD_VOCABULARY)
        for logits in (torch.bfloat16, torch.float32)
        for everything in (False, True)
    ),
    case("policy_rows_kernel", "sm_80", torch.bfloat16, torch.bfloat16, everything=False, vocabulary=ODD_VOCABULARY),
]

ONES = [
    with_ones(case(kernel, "sm_90", torch.bfloat16, torch.bfloat16, everything=True, vocabulary=1, rows=rows))
    for kernel, rows in (
        ("policy_rows_kernel", True), ("row_logprobs_kernel", True), ("row_gradients_kernel", True),
        ("row_gradients_kernel", False), ("scale_rows_kernel", True),
    )
]  # fmt: skip
"""A vocabulary or a stride of 1 builds the kernels anew."""


@pytest.fixture(scope="module")
def compiled():
    return compile_cases(CASES + ONES)


@pytest.fixture(scope="module")
def reports(compiled):
    """Of rows of a real vocabulary."""
    names = {case.name for case in CASES}
    return {key: report for key, report in compiled.items() if key[0] in names}


def test_every_kernel_fits_its_target_without_spills(compiled):
    assert len(compiled) == len(CASES + ONES)
    print(*(report.summary() for report in compiled.values()), sep="\n")
    for report in compiled.values():
        report.assert_fits(max_shared_memory=16_384)  # room to line up what lies behind the last whole vector


def test_one_row_fills_a_multiprocessor_so_that_few_rows_share_the_l2_cache(reports):
    for (name, target), report in reports.items():
        if target != "gfx942" and name.startswith("policy_rows"):
            assert report.threads == 1024, name
            # Before 3.7 Triton fits float32 logits of an odd vocabulary into 32 registers: two rows, a little slower.
            spared = TRITON_BEFORE_3_7 and "fp32 to bf16" in name and name.endswith("odd")
            assert 32 - spared < report.registers <= 64, report.summary()


HINT = ".L1::evict_first.L2::cache_hint"


def accesses(report):
    """PTX without what it says about caches."""
    return report.assembly.replace(HINT, "")


def test_the_second_reading_and_the_gradient_are_the_first_to_leave_the_l2_cache(reports):
    """So that what other rows are to read again stays there."""
    found = [report for (name, _), report in reports.items() if name.startswith("policy_rows") and "plain" in name]
    found = [report for report in found if "ptx" in report.asm]
    assert len(found) >= 4
    for report in found:
        first, second = (report.assembly.count(f"ld.global{hint}.v4.b32") for hint in ("", HINT))
        # 16 logits a lane for the sums, 32 bytes of them for the gradient
        assert second == first - (2 if "kernel fp32" in report.name else 0) > 0, report.name
        assert report.assembly.count(f"st.global{HINT}.v") == accesses(report).count("st.global.v") > 0, report.name


def test_logits_are_read_sixteen_bytes_at_a_time(reports):
    for (name, _), report in reports.items():
        if "ptx" in report.asm:
            wide, narrow = (accesses(report).count(f"ld.global.{width}.b32") for width in ("v4", "v2"))
            assert wide >= narrow, name  # a bfloat16 bias beside float32 logits takes 8 bytes
            assert wide > 0, name


def test_vocabularies_of_any_size_are_read_and_written_in_wide_accesses(reports):
    """OLMo 2 has 100,278 tokens, Granite 49,155: masks of single logits would make every access one of 2 bytes."""
    for (name, _), report in reports.items():
        if name.endswith("odd") and "plain" in name:
            logits = 2 if name.startswith("policy_rows_kernel bf16") else 4
            found = {
                kind: accesses(report).count(kind) for kind in ("ld.global.v4.b32", "ld.global.b16", "st.global.b16")
            }
            assert found["ld.global.v4.b32"] == logits + 2, name
            # Single ones: the target, and behind the last whole vector 16 bytes a lane at most.
            assert found["ld.global.b16"] <= 1 + 2 * 2, name
            assert found["st.global.b16"] <= 2 * logits, name


def test_no_minimum_drops_a_nan(reports):
    """The interpreter cannot show it: its minimum of nan and 1 is nan, that of a plain `min.f32` is 1."""
    for (name, _), report in reports.items():
        if "ptx" in report.asm:
            assert "min.f32" not in report.assembly, name
            assert "min.NaN.f32" in report.assembly or "everything" not in name, name


def test_the_targets_logit_is_read_before_any_gradient_can_lie_over_it(reports):
    """No warp stores a gradient before the barriers of the sums, and the load stands before them."""
    for (name, _), report in reports.items():
        if name.startswith("policy_rows_kernel bf16") and "ptx" in report.asm and not name.endswith("odd"):
            text = accesses(report)
            single = [found.start() for found in re.finditer(r"ld\.global\.b16", text)]
            assert len(single) == 1, name
            assert single[0] < text.index("bar.sync") < text.index("st.global.v4"), name
