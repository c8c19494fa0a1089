"""The table of tiles gives each launch the choices that were measured and compiled before it was a table."""

import hashlib
import itertools
import json

import pytest
import torch

from cfa_kernels.ops import linear_logprob, policy_rows, tree_attention
from cfa_kernels.ops.attention_options import AttentionRule
from cfa_kernels.ops.tree_attention_backward import key_options, query_options

ARCHITECTURES = ("cpu", "hip", "sm_80", "sm_86", "sm_90", "sm_100", "sm_103", "sm_120")
DTYPES = (torch.float32, torch.bfloat16)
DIMS = (8, 64, 72, 96, 104, 128, 192, 200, 256)
GROUPS = (1, 16, 17, 33, 64, 65, 128, 129)
VOCABULARIES = (1, 64, 65, 128, 512, 1000, 2048, 8192, 8193, 16384, 32000, 151_936)
RULE = AttentionRule(scale=1.0)
TILE = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "maxnreg")
RECORDED = {
    "tree_attention_kernel": [
        ["04869e05", "6967f1a0"],
        ["54dc912d", "3d28f3f0"],
        ["04869e05", "5cebc5a8"],
        ["04869e05", "5cebc5a8"],
        ["04869e05", "163d0f4d"],
        ["04869e05", "6967f1a0"],
        ["04869e05", "6967f1a0"],
        ["04869e05", "6967f1a0"],
    ],
    "query_gradient_kernel": [
        ["a1e1d668", "10c186ef"],
        ["a1e1d668", "b4fff633"],
        ["a1e1d668", "5cebc5a8"],
        ["a1e1d668", "5cebc5a8"],
        ["a1e1d668", "9de259cf"],
        ["a1e1d668", "ca981a2f"],
        ["a1e1d668", "10c186ef"],
        ["a1e1d668", "10c186ef"],
    ],
    "key_gradient_kernel": [
        ["66156687", "f8ffbe02"],
        ["66156687", "0033097d"],
        ["66156687", "117a738d"],
        ["66156687", "117a738d"],
        ["66156687", "db9293a8"],
        ["66156687", "f8ffbe02"],
        ["66156687", "f8ffbe02"],
        ["66156687", "f8ffbe02"],
    ],
    "tile_statistics_kernel": [
        ["99c4a4ea", "99c4a4ea"],
        ["92b2f1ac", "19fcc14b"],
        ["59edb3b9", "9f1e2ccf"],
        ["59edb3b9", "9f1e2ccf"],
        ["59edb3b9", "db2d1665"],
        ["59edb3b9", "587b6bc9"],
        ["59edb3b9", "587b6bc9"],
        ["59edb3b9", "9f1e2ccf"],
    ],
    "row kernels": [
        ["82490300", "831f802e"],
        ["ec06746a", "e6421411"],
        ["82490300", "831f802e"],
        ["82490300", "831f802e"],
        ["82490300", "831f802e"],
        ["82490300", "831f802e"],
        ["82490300", "831f802e"],
        ["82490300", "831f802e"],
    ],
}
"""Digests of `tiles` for each of `ARCHITECTURES` and `DTYPES`."""


def tiles(kernel: str, architecture: str, dtype: torch.dtype):
    """What a kernel is launched with, over the grid of widths, as lists of numbers."""
    if kernel == "tile_statistics_kernel":
        names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "TMA", "FLATTEN", "num_warps", "num_stages", "waves_per_eu")
        for aligned in (True, False):
            options = linear_logprob.launch_options(architecture, dtype, aligned=aligned)
            yield [options.get(name) for name in names]
    elif kernel == "row kernels":
        for vocabulary in VOCABULARIES:
            hip = architecture == "hip"
            yield list(policy_rows.launch_options(vocabulary, dtype.itemsize, hip=hip).values())
    else:
        for group, key_dim, value_dim in itertools.product(GROUPS, DIMS, DIMS):
            sizes = (architecture, dtype, key_dim, value_dim, group)
            if kernel == "tree_attention_kernel":
                launches = [tree_attention.launch_options(*sizes, RULE)]
            elif kernel == "query_gradient_kernel":
                launches = [query_options(*sizes, RULE)]
            else:
                launches = key_options(*sizes, RULE)
            yield [len(launches), *(launches[0].get(name) for name in TILE)]


def digest(kernel: str, architecture: str, dtype: torch.dtype) -> str:
    """Eight digits that stand for all of `tiles`."""
    return hashlib.sha256(json.dumps(list(tiles(kernel, architecture, dtype))).encode()).hexdigest()[:8]


@pytest.mark.parametrize("kernel", RECORDED)
def test_every_launch_has_the_tile_that_was_recorded(kernel):
    """Who tunes a row on purpose replaces the digests that this prints."""
    found = {a: [digest(kernel, a, dtype) for dtype in DTYPES] for a in ARCHITECTURES}
    assert found == dict(zip(ARCHITECTURES, RECORDED[kernel], strict=True))


def test_both_halves_share_their_tiles():
    for kernel, architecture in itertools.product(("tile_statistics_kernel", "row kernels"), ARCHITECTURES):
        assert digest(kernel, architecture, torch.float16) == digest(kernel, architecture, torch.bfloat16)
