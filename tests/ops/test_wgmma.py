"""The walk through Hopper machine code finds inputs of unfinished products that are overwritten, and only those."""

import pytest

from tests.support.wgmma import overwritten_inputs

pytestmark = pytest.mark.slow

PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, R120, gdesc[UR8].tnspB, R24"
LAST = f"{PRODUCT}, gsb0"
OTHER = "HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], RZ, !UPT, gsb0"
WAIT_ALL = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
WAIT_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
WRITE = "FADD R121, R3, R4"


def listing(*lines: str) -> str:
    """As nvdisasm writes it: labels end in a colon, instructions follow their address."""
    return "\n".join(
        line if line.endswith(":") else f"        /*{16 * i:04x}*/                   {line} ;"
        for i, line in enumerate(lines)
    )


@pytest.mark.parametrize(
    "lines",
    [
        (LAST, WRITE, WAIT_ALL), (LAST, "@!P2 " + WRITE, WAIT_ALL),
        (PRODUCT, WRITE, LAST.replace("R120", "R124"), WAIT_ALL), (LAST, WAIT_BUT_ONE, WRITE),
        (LAST, "@P0 " + WAIT_ALL, WRITE), (LAST, "LDSM.16.M88.4 R120, [R5+0x100]", WAIT_ALL),
        (LAST, "LDS.128 R116, [R5]", "LDG.E.128 R120, desc[UR4][R2.64]", WAIT_ALL),
        (LAST, "IMAD.WIDE.U32 R118, R2, R3, RZ", "CS2R R122, SRZ", WAIT_ALL),
        (LAST, "SHFL.BFLY PT, R123, R7, 0x1, 0x1f", WAIT_ALL), (LAST, OTHER.replace("R88", "R92"), WAIT_ALL),
        (".L_x_1:", WRITE, WAIT_BUT_ONE, LAST, "@!P2 BRA `(.L_x_1)", WAIT_ALL),
        (LAST, "@P1 BRA `(.L_x_1)", WAIT_ALL, "EXIT", ".L_x_1:", WRITE),
        (LAST, "BSSY B0, `(.L_x_1)", "@P0 BRA `(.L_x_0)", "BSYNC B0", ".L_x_0:", "EXIT", ".L_x_1:", WRITE),
        (LAST, "CALL.REL.NOINC `(.L_x_1)", WAIT_ALL, "EXIT", ".L_x_1:", WRITE, "RET.REL.NODEC R2 `(kernel)"),
    ],
)  # fmt: skip
def test_an_input_written_before_its_product_is_done_is_a_finding(lines):
    (finding,) = overwritten_inputs(listing(*lines))
    assert finding.startswith(PRODUCT)


@pytest.mark.parametrize(
    "lines",
    [
        (LAST, WAIT_ALL, WRITE), (LAST, OTHER, WAIT_BUT_ONE, WRITE),
        (LAST, "FADD R124, R120, R121", "STS.128 [R120], R120", "ISETP.GE.AND P0, PT, R120, R121, PT", WAIT_ALL),
        (LAST, "LDS.64 R118, [R120]", "LDGSTS.E.BYPASS.128 [R120+0x10], desc[UR4][R122.64]", WAIT_ALL),
        (LAST, "R2UR UR4, R120", "BAR.SYNC.DEFER_BLOCKING R121, 0x80", "@!PT LDS RZ, [RZ]", WAIT_ALL),
        (LAST, OTHER.replace("R88", "R40").replace("64x64", "64x128"), WAIT_ALL), (LAST, "EXIT", WRITE),
        (LAST, "BRA `(.L_x_1)", WRITE, ".L_x_1:", WAIT_ALL, WRITE),
        (".L_x_1:", WAIT_ALL, WRITE, LAST, "@!P2 BRA `(.L_x_1)", WAIT_ALL), (OTHER, "FADD R88, R3, R4", WAIT_ALL),
    ],
)  # fmt: skip
def test_other_writes_are_no_finding(lines):
    assert overwritten_inputs(listing(*lines)) == []


def test_a_jump_to_nowhere_is_refused():
    with pytest.raises(ValueError, match="cannot follow BRX R2"):
        overwritten_inputs(listing(LAST, "BRX R2 -0x10", WAIT_ALL))
