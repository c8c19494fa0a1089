"""A segment table lists the work of queries and of keys as its definition says, and reaches a device once."""

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
