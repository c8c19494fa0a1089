"""Ahead of time: the kernels of attention's gradients as shipped compile for every target, without spills."""

import re

import pytest
import torch

from cfa_kernels.ops.attention_options import AttentionRule
from cfa_kernels.ops.tree_attention_backward import key_options, query_options, sum_options
from tests.support.aot import AotCase, compile_cases
from tests.support.specialization import with_ones
from tests.support.wgmma import overwritten_inputs

pytestmark = pytest.mark.slow

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
STRIDES = [f"stride_{tensor}{axis}" for tensor in "qkvg" for axis in "th"]
DATA = ("p_q", "p_k", "p_v", "p_out", "p_by_out", "p_by_q", "p_by_k", "p_by_v")
SUMS = ("p_lse", "p_delta", "p_parts")
TABLES = ("p_work", "p_context", "p_seers", "p_splits")
SIGNATURES = {
    "query_gradient_kernel": (*DATA[:6], *SUMS[:2], *TABLES[:2]),
    "key_gradient_kernel": (*DATA[:3], "p_by_out", *DATA[6:], *SUMS, "p_work", "p_seers", "n_seers"),
    "sum_parts_kernel": ("p_parts", "p_by_k", "p_by_v", "p_splits"),
}


def build(kernel: str, target: str, dtype: torch.dtype, options: dict, label: str) -> AotCase:
    """One launch, with the alignment that real tensors have."""
    constexprs = dict(options)
    compiler = {name: constexprs.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in constexprs}
    kinds = dict.fromkeys(DATA, f"*{NAMES[dtype]}:16") | dict.fromkeys(SUMS, "*fp32:16")
    kinds |= dict.fromkeys(TABLES, "*i32:16") | {"n_seers": "i32"}
    arguments = {name: kinds[name] for name in SIGNATURES[kernel]}
    if kernel != "sum_parts_kernel":
        wide = all(options[name] % 16 == 0 for name in ("KEY_DIM", "VALUE_DIM"))
        constexprs |= {"STRIDE_UNIT": 1 if wide else 8}
        arguments |= dict.fromkeys(STRIDES, "i32:16" if wide else "i32")
        arguments |= {"n_heads": "i32", "scale": "fp32", "softcap": "fp32", "span": "i32"}
    name = f"{kernel} {label} for {target}"
    module = "cfa_kernels.ops.tree_attention_backward"
    return AotCase(name, f"{module}:{kernel}", arguments, constexprs, compiler, (target,))


def cases(
    target: str, dtype: torch.dtype, dims: tuple[int, int], group: int = 2, *, ones: bool = False, **rule
) -> list[AotCase]:
    """Every launch of one backward. With `ones` every integer that a launch may turn into a constant is 1."""
    architecture = "hip" if target == "gfx942" else target
    sizes = (architecture, dtype, *dims, group, AttentionRule(scale=1.0, **rule))
    label = " ".join([NAMES[dtype], f"{dims[0]}/{dims[1]} group {group}", *rule])
    by_key = key_options(*sizes)
    parts = [f"of {'keys ' * o['OF_KEYS']}{'values ' * o['OF_VALUES']}{label}" for o in by_key]
    found = [build("query_gradient_kernel", target, dtype, query_options(*sizes), label)]
    found += [build("key_gradient_kernel", target, dtype, o, p) for o, p in zip(by_key, parts, strict=True)]
    return [with_ones(case) for case in found] if ones else found


GEMMA = ("sm_90", torch.bfloat16, 256, 256, 2, AttentionRule(scale=1.0))


CASES = (
    [
        case
        for target in TARGETS
        for case in (
            *cases(target, torch.bfloat16, (128, 128)),
            *cases(target, torch.bfloat16, (256, 256), sliding_window=8, softcap=1.0),  # Gemma 2
            *cases(target, torch.float32, (128, 128)),
        )
    ]
    + [
        *cases("sm_90", torch.bfloat16, (64, 64), 5, attention_chunk_size=8),
        cases("sm_90", torch.bfloat16, (128, 128), 7, sliding_window=8, softcap=1.0)[0],  # Gemma 2 27B has both
        *(case for dim in (72, 120) for case in cases("sm_90", torch.bfloat16, (dim, dim))),
        *cases("sm_90", torch.float32, (64, 64), 71),  # Falcon
        *cases("sm_90", torch.bfloat16, (16, 16), sliding_window=8, ones=True),
        build("sum_parts_kernel", "sm_90", torch.bfloat16, sum_options(key_options(*GEMMA)[0]), "256/256"),
        build("sum_parts_kernel", "gfx942", torch.bfloat16, sum_options(key_options("hip", *GEMMA[1:])[0]), "256/256"),
    ]
)


@pytest.fixture(scope="module")
def reports():
    return compile_cases(CASES)


def hopper(reports):
    return [
        report
        for (name, target), report in reports.items()
        if target == "sm_90" and "bf16" in name and "sum_parts" not in name
    ]


def test_every_configuration_fits_its_target_without_spills(reports):
    assert len(reports) == len(CASES)
    print(*(report.summary() for report in reports.values()), sep="\n")
    for report in reports.values():
        if "ones" not in report.name:
            report.assert_fits()


def test_integers_that_are_one_compile(reports):
    """Their rows overlap, so such a build need not be fast; a kernel that calls a method of an integer fails here."""
    found = [report for report in reports.values() if "ones" in report.name]
    assert len(found) == 2
    assert not any(report.overwritten for report in found)


def test_hopper_builds_use_its_matrix_instructions(reports):
    for report in hopper(reports):
        assert report.has_wgmma, report.name


def test_programs_of_query_gradients_share_a_hopper_multiprocessor(reports):
    """One waits for its rows while another multiplies."""
    found = [report for report in hopper(reports) if report.name.startswith("query") and "256" not in report.name]
    assert len(found) == 6
    for report in found:
        assert report.blocks >= (4 if "64/64" in report.name else 2), report.summary()


def test_rows_are_loaded_sixteen_bytes_at_a_time(reports):
    """Gathered rows must not have cost the wide asynchronous copies."""
    for report in hopper(reports):
        if "ones" not in report.name:
            assert "cp.async.cg.shared.global" in report.asm["ptx"], report.name
            assert "ld.global.b16" not in report.asm["ptx"], report.name


def test_operands_stay_in_registers_until_their_product_is_done(reports):
    """What `assert_fits` found nothing against is there to be looked at, and is seen once the waits are gone."""
    for report in hopper(reports):
        assert report.register_inputs >= 1, report.name
        without_waits = re.sub(r".*WARPGROUP\.DEPBAR.*\n", "", report.asm["sass"])
        assert overwritten_inputs(without_waits), report.name
