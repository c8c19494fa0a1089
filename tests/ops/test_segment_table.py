"""A segment table counts rows, positions and visible pairs as its definition says, and reaches a device once."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cfa_kernels.ops.segment_table import SegmentTable
from cfa_kernels.tree import PrefixTree

sequences = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=6)


def table_of(rows) -> tuple[SegmentTable, list[np.ndarray]]:
    """The table of a tree of token sequences, and the packed rows along each sequence."""
    tree = PrefixTree()
    paths = [tree.insert(np.array(row, dtype=np.int64)) for row in rows]
    return tree.table(), paths


@given(sequences)
def test_positions_and_pairs_are_those_of_the_paths(rows):
    table, paths = table_of(rows)
    positions = table.positions()
    for path in paths:
        np.testing.assert_array_equal(positions[path], np.arange(len(path)))
    assert table.num_rows == len(positions) == len({row for path in paths for row in path.tolist()})
    assert table.longest == max(map(len, rows))
    assert table.visible_pairs() == (positions + 1).sum()


@pytest.mark.parametrize("first", [60, 61, 62, 63])
def test_tables_on_the_device_start_at_multiples_of_16_bytes_whatever_their_sizes(first, device):
    """Triton compiles a kernel anew for a pointer that is aligned differently."""
    for branches in (1, 2, 3):
        table, _ = table_of([[*range(first), *[100 + branch] * (5 * branch)] for branch in range(1, branches + 1)])
        work, segments, rows = table.on_device(torch.device(device), tokens_per_tile=16)
        assert [tensor.data_ptr() % 16 for tensor in (work, segments, rows)] == [0, 0, 0]
        np.testing.assert_array_equal(work.cpu(), table.work_list(16))
        np.testing.assert_array_equal(segments[:, 3].cpu(), table.context_length)
        np.testing.assert_array_equal(rows.cpu(), table.context_rows)


def test_a_table_is_copied_to_a_device_once_per_tile_size(device):
    table, _ = table_of([[1, 2, 3], [1, 4]])
    first = table.on_device(torch.device(device), tokens_per_tile=2)
    assert table.on_device(torch.device(device), tokens_per_tile=2) is first
    assert table.on_device(torch.device(device), tokens_per_tile=1)[0].shape == (4, 2)


@given(sequences)
def test_the_work_list_of_the_last_segments_is_what_the_whole_one_holds_of_them(rows):
    table, _ = table_of(rows)
    whole = table.work_list(3)
    for segment, row in enumerate(table.row_start.tolist()):
        np.testing.assert_array_equal(table.work_list(3, row), whole[whole[:, 0] >= segment])
