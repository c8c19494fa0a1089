"""Ahead of time: the kernels of attention as shipped compile for every target, without spills, with tensor cores."""

import re

import pytest
import torch

from cfa_kernels.tree import attention as tree_attention
from cfa_kernels.tree import attention_backward as tree_attention_backward
from cfa_kernels.tree.attention import launch_options
from cfa_kernels.tree.attention_backward import key_options, shared_options, sum_options
from cfa_kernels.tree.attention_options import AttentionRule
from tests.support.aot import TARGETS, AotCase, compile_cases

pytestmark = pytest.mark.slow

BF16, FP32 = torch.bfloat16, torch.float32
KINDS = {BF16: "bf16", FP32: "fp32"}
WINDOW, CHUNK, SOFTCAP = {"sliding_window": 8}, {"attention_chunk_size": 8}, {"softcap": 8.0}
SINKS = {"sinks": torch.zeros(1)}

DATA = ("p_q", "p_k", "p_v", "p_out", "p_by_out", "p_by_q", "p_by_k", "p_by_v")
SUMS = ("p_lse", "p_delta", "p_parts")
TABLES = ("p_work", "p_context", "p_readers", "p_splits")
NUMBERS = {"scale": "fp32", "softcap": "fp32", "span": "i32"}


def build(kernel: str, target: str, dtype: torch.dtype, options: dict, label: str) -> AotCase:
    """One launch, with the alignment that real tensors have."""
    kinds = dict.fromkeys(DATA, f"*{KINDS[dtype]}:16") | dict.fromkeys(SUMS, "*fp32:16") | {"p_sinks": "*bf16:16"}
    kinds |= dict.fromkeys(TABLES, "*i32:16") | dict.fromkeys(("n_readers", "n_heads", "first_query_row"), "i32")
    module = tree_attention if kernel == "tree_attention_kernel" else tree_attention_backward
    arguments = {name: kind for name, kind in (kinds | NUMBERS).items() if name in getattr(module, kernel).arg_names}
    if kernel != "sum_parts_kernel":
        wide = all(options[name] % 16 == 0 for name in ("KEY_DIM", "VALUE_DIM"))
        options = options | {"STRIDE_UNIT": 1 if wide else 8}
        tensors = "qkvo" if kernel == "tree_attention_kernel" else "qkvg"
        strides = [f"stride_{tensor}{axis}" for tensor in tensors for axis in "th"]
        arguments |= dict.fromkeys(strides, "i32:16" if wide else "i32")
    if kernel == "tree_attention_kernel":
        left_out = {"p_lse": options["WITH_LSE"], "p_sinks": options["HAS_SINKS"]}
        options |= {name: None for name, there in left_out.items() if not there}
        arguments = {name: kind for name, kind in arguments.items() if left_out.get(name, True)}
    name = f"{module.__name__.removeprefix('cfa_kernels.')}:{kernel}"
    return AotCase(f"{kernel} {label}", name, target, arguments, options)


def sizes_of(target: str, dtype: torch.dtype, dims: tuple[int, int], group: int, rule: dict) -> tuple:
    return "hip" if target == "gfx942" else target, dtype, *dims, group, AttentionRule(scale=1.0, **rule).kinds


def label(dtype: torch.dtype, dims: tuple[int, int], group: int, rule: dict) -> str:
    return " ".join([KINDS[dtype], f"{dims[0]}/{dims[1]} group {group}", *rule])


def forward(
    target: str, dtype: torch.dtype, dims: tuple[int, int], group: int = 2, *, lse: bool = False, **rule
) -> AotCase:
    options = launch_options(*sizes_of(target, dtype, dims, group, rule), lse=lse)
    name = label(dtype, dims, group, rule) + " lse" * lse
    return build("tree_attention_kernel", target, dtype, options, name)


def backward(target: str, dtype: torch.dtype, dims: tuple[int, int], group: int = 2, **rule) -> list[AotCase]:
    sizes, name = sizes_of(target, dtype, dims, group, rule), label(dtype, dims, group, rule)
    cases = [build("query_gradient_kernel", target, dtype, shared_options("query_gradient_kernel", *sizes), name)]
    for options in key_options(*sizes):
        parts = f"{'keys ' * options['OF_KEYS']}{'values ' * options['OF_VALUES']}"
        cases.append(build("key_gradient_kernel", target, dtype, options, parts + name))
    return cases


def sums(target: str) -> AotCase:
    options = sum_options(key_options(*sizes_of(target, BF16, (256, 256), 2, {}))[0])
    return build("sum_parts_kernel", target, BF16, options, "256/256")


# Each row of `TUNED` on the architectures that it is for, with the options and heads that need the most of it. Rows in
# full precision, which are the same on every architecture, are built for one of NVIDIA's and one of AMD's.
FORWARD = [
    *(
        case
        for target in TARGETS
        for case in (
            forward(target, BF16, (256, 256)),
            forward(target, BF16, (64, 64), 8, **WINDOW, **SINKS),  # GPT-OSS
        )
    ),
    *(forward(target, FP32, (256, 256)) for target in ("sm_90", "gfx942")),
    forward("sm_80", BF16, (128, 128)),
    *(forward(target, BF16, (192, 128), 1) for target in ("sm_90", "sm_100")),  # DeepSeek
    forward("sm_90", BF16, (128, 128), 5, **CHUNK),  # Llama 4
    forward("sm_90", BF16, (128, 128), 7, lse=True),  # Qwen2.5-7B
    forward("sm_90", BF16, (128, 128), 3, lse=True, **WINDOW, **SOFTCAP, **SINKS),
    forward("sm_90", BF16, (64, 64), 71),
    forward("sm_90", FP32, (64, 64), 71),  # Falcon
    forward("sm_90", BF16, (96, 96), 3),  # two column blocks each, a group that fills no tile
    *(forward("sm_90", BF16, (dim, dim)) for dim in (72, 120)),  # strides that 8 divides, 16 not
    forward("sm_90", BF16, (256, 256), **WINDOW, **SOFTCAP),  # Gemma 2
]
BACKWARD = [
    *(
        case
        for target in TARGETS
        for case in (
            *backward(target, BF16, (128, 128))[target == "sm_90" :],  # its first one is below, with every option
            *backward(target, BF16, (256, 256), **WINDOW, **SOFTCAP),
        )
    ),
    *(case for target in ("sm_90", "gfx942") for case in backward(target, FP32, (128, 128))),
    *backward("sm_90", BF16, (64, 64), 5, **CHUNK),
    backward("sm_90", BF16, (128, 128), 7, **WINDOW, **SOFTCAP)[0],  # Gemma 2 27B has both
    *backward("sm_90", BF16, (72, 72)),
    backward("sm_90", FP32, (64, 64), 71)[0],
    *(sums(target) for target in ("sm_90", "gfx942")),
]
ONES = [
    case.with_ones()
    for target, rule in (("sm_90", WINDOW), ("gfx942", CHUNK))
    for case in (forward(target, BF16, (16, 16), **rule), *backward(target, BF16, (16, 16), **rule))
]


@pytest.fixture(scope="module")
def reports():
    return compile_cases(FORWARD + BACKWARD + ONES)


@pytest.fixture(scope="module")
def hopper(reports):
    """Builds with matrix products of halves."""
    return [r for r in reports if r.target == "sm_90" and "bf16" in r.name and "sum_parts" not in r.name]


def test_every_configuration_fits_its_target_without_spills(reports):
    print(*reports, sep="\n")
    for report in reports:
        if "ones" not in report.name:
            report.assert_fits()


def test_integers_that_are_one_compile(reports):
    """Their rows overlap, so such a build need not be fast; a kernel that calls a method of an integer fails here."""
    for report in reports[-len(ONES) :]:
        report.assert_sound()


def test_hopper_builds_use_its_matrix_instructions_on_operands_that_stay_in_registers_until_they_are_done(hopper):
    for report in hopper:
        assert "wgmma.mma_async" in report.assembly, report
        report.assert_watched(2 if "tree_attention" in report.name else 1)


def test_programs_share_a_hopper_multiprocessor(hopper):
    """The products of one run during the softmax of another, or while another waits for its rows."""
    blocks = {
        "tree_attention_kernel bf16 16/16": 5, "tree_attention_kernel bf16 64/64 group 71": 2,
        "tree_attention_kernel bf16 64/64 group 8": 5, "tree_attention_kernel bf16 72/72": 4,
        "tree_attention_kernel bf16 96/96": 3, "tree_attention_kernel bf16 1../1..": 2,
        "query_gradient_kernel bf16 64/64": 4, "query_gradient_kernel bf16 [17]..?/": 2,
    }  # fmt: skip
    for report in hopper:
        for name, expected in blocks.items():
            assert report.blocks >= expected or not re.match(name, report.name), report


def test_rows_are_loaded_sixteen_bytes_at_a_time(hopper):
    """Gathered rows must not have cost the wide asynchronous copies."""
    for report in hopper:
        if "ones" not in report.name:
            assert "cp.async.cg.shared.global" in report.assembly, report
            if "tree_attention" not in report.name:
                assert "ld.global.b16" not in report.assembly, report
                continue
            # 16 columns behind 64 are too few for that, where all warps share them.
            narrow = re.findall(r"cp\.async\.ca\.shared\.global.*?, (0x\w+)(?:, %r\d+)?;", report.assembly)
            assert set(narrow) <= ({"0x8"} if "72/72" in report.name else set()), report
