"""A segment table lists the work of queries and of keys as its definition says, and reaches a device once."""

import pickle
from collections import defaultdict

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from cfa_kernels.tree.attention_options import EVERYTHING, Reach
from cfa_kernels.tree.segment_table import SegmentTable
from tests.support.attention_problem import build

sequences = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=6)


@given(sequences)
def test_the_work_list_of_the_last_segments_is_what_the_whole_one_holds_of_them(rows):
    table, _ = build(rows)
    whole = table.work_list(3)
    for row in table.row_start.tolist():
        np.testing.assert_array_equal(table.work_list(3, row), whole[whole[:, 0] >= row])


reaches = st.one_of(
    st.just(EVERYTHING),
    st.builds(lambda span: Reach(window=span), st.sampled_from([1, 3, 8, 2**40])),
    st.builds(lambda span: Reach(chunk=span), st.sampled_from([1, 3, 8, 2**40])),
)


def pairs_that_see_each_other(table: SegmentTable, reach: Reach) -> list[tuple[int, int]]:
    """(query row, key row), read from the contexts as the forward reads them."""
    pairs = []
    for row, length, start, before in table.segments.view(-1, 4).tolist():
        path = [*table.context_rows[start : start + before].tolist(), *range(row, row + length)]
        for position in range(before, before + length):
            oldest = int(reach.oldest_visible(torch.tensor(position)))
            pairs += [(path[position], path[key]) for key in range(oldest, position + 1)]
    return pairs


@given(sequences, reaches, st.integers(1, 6), st.integers(1, 9))
def test_the_work_of_keys_meets_every_pair_that_attention_visits_once(rows, reach, keys_per_tile, queries_per_program):
    table, _ = build(rows)
    work, splits, (reader_row, reader_limit, reader_position) = table.key_work(
        keys_per_tile, queries_per_program, reach
    )
    tiles, met = defaultdict(list), []
    for row, keys, first, position, own, base, begin, end, slot in work.tolist():
        assert 0 < keys <= keys_per_tile
        assert 0 < end - begin <= queries_per_program
        tiles[row, keys].append((begin, end, slot))
        for query in range(begin, end):
            at, sees, where = row + query, query + 1, position + query
            if query >= own:
                at, sees, where = (int(x[base + query]) for x in (reader_row, reader_limit, reader_position))
                sees -= first
            oldest = int(reach.oldest_visible(torch.tensor(where)))
            met += [(at, row + key) for key in range(min(sees, keys)) if position + key >= oldest]
    assert sorted(met) == sorted(pairs_that_see_each_other(table, reach))
    assert len(met) == table.visible_pairs(reach)
    assert (np.diff(work[:, 6] - work[:, 7]) >= 0).all(), "the longest come first"
    split = {(row, keys): (slot, count) for row, keys, slot, count in splits.tolist()}
    for tile, parts in tiles.items():
        begins, ends, slots = zip(*sorted(parts), strict=True)
        assert begins == (0, *ends[:-1])
        slot, count = split.get(tile, (-1, 1))
        assert count == len(parts)
        assert slots == (tuple(range(slot, slot + count)) if tile in split else (-1,))
    assert sorted(slot for slot in work[:, 8].tolist() if slot >= 0) == list(range(int(splits[:, 3].sum())))


def test_readers_out_of_reach_are_not_looked_at():
    """Sixteen long completions under a prompt: only rows within the window of a tile's keys are visited."""
    table, _ = build([[*range(64), 100 + i, *range(200)] for i in range(16)])
    work, *_ = table.key_work(16, 10**6, Reach(window=32))
    visited = {row: end for row, _, _, _, _, _, _, end, _ in work.tolist() if row < 64}
    assert visited == {0: 47, 16: 47, 32: 32 + 16 * 15, 48: 16 + 16 * 31}


def test_a_table_is_found_by_copies_of_its_handle_while_it_lives_and_rebuilt_afterwards():
    table, _ = build([[1, 2, 3], [1, 4], [1, 4, 5]])
    copies = [tensor.clone() for tensor in (table.handle, table.segments, table.contexts)]
    assert SegmentTable.of(*copies) is table
    segments, contexts = table.segments, table.contexts
    del table
    rebuilt = SegmentTable.of(*copies)
    assert torch.equal(rebuilt.segments, segments)
    assert torch.equal(rebuilt.contexts, contexts)
    assert SegmentTable.of(*copies) is rebuilt


def test_a_table_that_is_gone_is_rebuilt_once_for_all_layers_of_a_backward(monkeypatch):
    rows = [[1, 2, 3], [1, 4], [1, 4, 5]]
    gone = [[tensor.clone() for tensor in (t.handle, t.segments, t.contexts)] for t in (build(rows)[0], build(rows)[0])]
    checked, check = [], SegmentTable._check
    monkeypatch.setattr(SegmentTable, "_check", lambda table: checked.append(1) or check(table))
    for copies in [*gone * 3, *gone[:1] * 3]:
        SegmentTable.of(*copies)
    assert len(checked) == 2


def test_tables_of_the_same_rows_have_handles_of_their_own_and_a_pickled_one_keeps_its_own():
    table, other = (build([[1, 2, 3], [1, 4]])[0] for _ in range(2))
    assert not torch.equal(table.handle, other.handle)
    again = pickle.loads(pickle.dumps(table))
    assert SegmentTable.of(again.handle, again.segments, again.contexts) is table


def test_work_of_keys_is_copied_to_a_device_once(device):
    table, _ = build([[1, 2, 3], [1, 4], [1, 5, 6]])
    first = table.key_work_on_device(torch.device(device), 2, 2, Reach(window=2))
    assert table.key_work_on_device(torch.device(device), 2, 2, Reach(window=2)) is first
    assert table.key_work_on_device(torch.device(device), 2, 2) is not first
    assert [tensor.data_ptr() % 16 for tensor in first[:3]] == [0, 0, 0]
    for tensor, array in zip(first[:3], table.key_work(2, 2, Reach(window=2)), strict=True):
        np.testing.assert_array_equal(tensor.cpu(), array)
    assert first[3] == sum(slot >= 0 for slot in first[0][:, 8].tolist())
