"""Tiles, warps and pipeline stages of every kernel that is shipped, as one table.

They never depend on lengths. Every row compiles without spills for models that exist (`tests/ops/test_aot_*.py`).
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

import torch
import triton

ANY = 2**31 - 1


class Tuned(NamedTuple):
    """The options of launches that fit all other fields."""

    arch: str  # pattern for `dispatch.architecture`
    dtype: str  # "float32", "half" or "*"
    options: Mapping[str, Any]
    widest: int = ANY  # bound of `key` and `value`
    key: int = ANY  # and bounds of each, a head's widths
    value: int = ANY
    group: int = ANY  # query heads of a key head
    aligned: bool = False  # rows of operands must start at multiples of 16 bytes


def _tile(block_m: int, block_n: int, num_warps: int, num_stages: int, **more: int) -> dict[str, int]:
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages, **more}


def _product(
    block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int, *, tma: bool = False, **more: int
) -> dict[str, Any]:
    return _tile(block_m, block_n, num_warps, num_stages, BLOCK_K=block_k, TMA=tma, FLATTEN=tma, **more)


TUNED: dict[str, tuple[Tuned, ...]] = {
    # Full precision has no tensor cores: more heads share a tile only if they must. On Hopper several programs share a
    # multiprocessor, so that one's products run during the other's softmax, and narrow blocks of keys leave them the
    # registers; 4 warps are few enough that copies of a rest of 32 columns stay wide.
    "tree_attention_kernel": (
        Tuned("*", "float32", _tile(16, 16, 4, 2), group=16),
        Tuned("*", "float32", _tile(32, 16, 8, 2), group=32),
        Tuned("*", "float32", _tile(64, 16, 16, 2), group=64),
        Tuned("hip", "float32", _tile(128, 16, 16, 2)),
        Tuned("*", "float32", _tile(128, 16, 32, 2)),
        Tuned("hip", "*", _tile(64, 32, 4, 1)),
        Tuned("sm_8*", "*", _tile(128, 64, 8, 3), widest=64),
        Tuned("sm_8*", "*", _tile(128, 32, 8, 3), widest=128),
        Tuned("sm_8*", "*", _tile(64, 32, 8, 2)),
        Tuned("sm_90", "*", _tile(64, 32, 4, 3, maxnreg=96), widest=64, group=64),
        Tuned("sm_90", "*", _tile(64, 32, 4, 3, maxnreg=168), widest=96, group=64),
        Tuned("sm_90", "*", _tile(128, 32, 8, 3, maxnreg=128), key=192, value=128, group=128),
        Tuned("*", "*", _tile(128, 64, 8, 3), value=128),
        Tuned("sm_90", "*", _tile(128, 32, 8, 3)),
        Tuned("*", "*", _tile(64, 64, 8, 2)),
    ),
    # On Hopper the forward's tiles, for the same reason.
    "query_gradient_kernel": (
        Tuned("*", "float32", _tile(16, 16, 4, 3), widest=128, group=16),
        Tuned("*", "float32", _tile(16, 16, 4, 2), group=16),
        Tuned("*", "float32", _tile(32, 16, 8, 2), group=32),
        Tuned("*", "float32", _tile(64, 16, 16, 2)),
        Tuned("hip", "*", _tile(64, 32, 4, 1), widest=128),
        Tuned("hip", "*", _tile(64, 16, 4, 1)),
        Tuned("sm_8*", "*", _tile(128, 64, 8, 3), widest=64),
        Tuned("sm_8*", "*", _tile(128, 32, 8, 3), widest=128),
        Tuned("sm_90", "*", _tile(64, 32, 4, 3, maxnreg=128), widest=64, group=64),
        Tuned("sm_90", "*", _tile(128, 32, 8, 3, maxnreg=128), widest=128, group=128),
        Tuned("*", "*", _tile(128, 64, 8, 3), widest=128),
        Tuned("sm_90", "*", _tile(128, 32, 8, 2)),
        Tuned("sm_100", "*", _tile(64, 32, 4, 2)),
        Tuned("*", "*", _tile(64, 32, 8, 2)),
    ),
    "key_gradient_kernel": (
        Tuned("*", "float32", _tile(16, 16, 4, 2)),
        Tuned("hip", "*", _tile(16, 64, 4, 1)),
        Tuned("sm_8*", "*", _tile(32, 64, 4, 2), widest=64),
        Tuned("sm_8*", "*", _tile(64, 64, 8, 2), widest=128),
        Tuned("*", "*", _tile(32, 128, 8, 3), widest=128),
        Tuned("sm_90", "*", _tile(16, 128, 8, 2)),
        Tuned("*", "*", _tile(32, 64, 8, 2)),
    ),
    "sum_parts_kernel": (Tuned("*", "*", {"ROWS": 8, "num_warps": 4}),),
    # With few rows most of a tile's products are idle, which costs nothing: reading the head takes longer. On HIP the
    # compiler would else save vector registers for a fourth wave, and scalar ones spill.
    "tile_statistics_kernel": (
        Tuned("cpu", "*", _product(32, 64, 32, 4, 1)),
        Tuned("hip", "float32", _product(128, 64, 16, 4, 2, waves_per_eu=2)),
        Tuned("*", "float32", _product(128, 128, 16, 8, 3)),
        Tuned("hip", "*", _product(128, 128, 64, 8, 2, waves_per_eu=2), aligned=True),
        Tuned("hip", "*", _product(128, 128, 32, 8, 2, waves_per_eu=2)),
        Tuned("sm_90", "*", _product(128, 256, 64, 8, 4, tma=True), aligned=True),
        Tuned("sm_10*", "*", _product(128, 128, 64, 8, 4, tma=True), aligned=True),
        Tuned("*", "*", _product(128, 128, 32, 8, 4)),
    ),
    # 8 rows are one 32-byte sector of a tile's sums.
    "merge_tiles_kernel": (Tuned("*", "*", {"BLOCK_R": 8, "BLOCK_T": 512, "BLOCK_H": 256, "num_warps": 8}),),
    # 32 logits a lane, 16 bytes of them at a time.
    "block_sums_kernel": (Tuned("*", "*", {"BLOCKS": 128, "num_warps": 4}),),
    # The largest tile of a row's logits and its warps, 16 logits a lane; short rows take both in proportion. One
    # program fills a multiprocessor: more rows at once would not fit the L2 cache, from which the gradient is to read
    # them again.
    "row kernels": (
        Tuned("hip", "*", {"BLOCK": 8192, "num_warps": 8}),
        Tuned("*", "*", {"BLOCK": 16384, "num_warps": 32}),
    ),
}
"""Rows of each kernel; the first row that fits a launch is taken, and the last one fits all."""


@cache
def _row(
    kernel: str, arch: str, kind: str, key: int = 0, value: int = 0, group: int = 0, aligned: bool = False
) -> Tuned:
    for row in TUNED[kernel]:
        fits = fnmatchcase(arch, row.arch) and row.dtype in ("*", kind) and aligned >= row.aligned
        if fits and max(key, value) <= row.widest and key <= row.key and value <= row.value and group <= row.group:
            return row
    raise LookupError(f"TUNED[{kernel!r}] has no row for {arch}, {kind}; its last row must fit every launch")


def tuned(kernel: str, arch: str = "*", dtype: torch.dtype = torch.float32, **sizes: int) -> dict[str, Any]:
    """Copy the options of the first row of `TUNED` that fits; `sizes` are `key`, `value`, `group` and `aligned`."""
    return dict(_row(kernel, arch, "float32" if dtype == torch.float32 else "half", **sizes).options)


def column_blocks(dim: int) -> tuple[int, int]:
    """Cut a head's columns into a power of two and another for the rest (or 0), where that is less than padding."""
    # Matrix products take blocks at least 16 wide.
    padded = triton.next_power_of_2(max(dim, 16))
    rest = triton.next_power_of_2(max(dim - padded // 2, 16))
    return (padded // 2, rest) if dim > 64 and padded // 2 + rest < padded else (padded, 0)
