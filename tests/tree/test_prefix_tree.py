"""PrefixTree and lay_out: every sequence keeps its tokens and positions, and nothing common is laid out twice."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfa_kernels.tree.packs import Limits, groups_within, lay_out, lay_out_each, lay_out_split
from cfa_kernels.tree.prefix_tree import PrefixTree, Query
from cfa_kernels.tree.segment_table import SegmentTable
from tests.support.attention_problem import build

# Few distinct tokens, so that prefixes collide often.
sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


def ids(tokens) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def distinct_prefixes(rows) -> int:
    return len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})


@given(sequences, st.integers(0, 4))
def test_sequences_keep_tokens_and_positions_and_share_each_prefix_once_but_where_they_stand_alone(rows, alone_from):
    tree = PrefixTree()
    alone = [tree.insert(ids(row), alone_from).tolist() for row in rows]
    shared = [tree.insert(ids(row)).tolist() for row in rows]
    tokens, positions = tree.input_ids(), tree.table().positions()
    for row, path in zip(rows * 2, alone + shared, strict=True):
        assert tokens[path].tolist() == row
        assert positions[path].tolist() == list(range(len(row)))
    own = [row for path in alone for row in path[alone_from:]]
    assert len(own) == len(set(own))
    assert not set(own) & {row for path in shared for row in path}
    assert tree.num_tokens == distinct_prefixes(rows) + len(own)


def queries_of(rows) -> list[Query]:
    return [Query(ids(row), 0, ids([*row[1:], 9])) for row in rows]


def each(count: int) -> list[list[int]]:
    return [[n] for n in range(count)]


def assert_answers(pack, rows):
    """Each query of the pack reads its own tokens, at their positions, and asks for its own targets."""
    trunk = pack.trunk or pack
    tokens = np.concatenate([trunk.tree.input_ids()[: pack.first_row], pack.input_ids])
    wanted = [
        column[pack.query_index] for column in (tokens[pack.rows], pack.table.positions()[pack.rows], pack.targets)
    ]
    start = 0
    for n in pack.queries:
        part = slice(start, start + len(rows[n]))
        assert [column[part].tolist() for column in wanted] == [rows[n], [*range(len(rows[n]))], [*rows[n][1:], 9]]
        start = part.stop
    assert start == len(pack.query_index)


@given(sequences, st.integers(1, 40))
def test_packs_answer_all_queries_in_order_within_the_budget(rows, budget):
    packs = list(lay_out(queries_of(rows), [[], *each(len(rows)), []], budget))
    assert [n for pack in packs for n in pack.queries] == list(range(len(rows)))
    for pack in packs:
        assert pack.num_tokens <= budget or len(pack.queries) == 1
        assert pack.num_tokens == distinct_prefixes([rows[n] for n in pack.queries])
        assert_answers(pack, rows)


@given(sequences, st.integers(1, 40), st.integers(0, 12), st.integers(0, 6) | st.none())
def test_a_known_beginning_changes_no_pack(rows, budget, most, alone_from):
    plain = [replace(query, alone_from=alone_from) for query in queries_of(rows)]
    first = plain[0].tokens
    common = [min(most, distinct_prefixes([rows[0]]) + len(row) - distinct_prefixes([rows[0], row])) for row in rows]
    known = [replace(query, begins=(first, count)) for query, count in zip(plain, common, strict=True)]
    (trunk,) = lay_out(plain, [range(len(rows) // 2 + 1)], 999)
    everything = range(len(rows))
    for laid_out in (
        lambda queries: lay_out(queries, each(len(rows)), budget),
        lambda queries: lay_out(queries, [everything], budget, trunk=trunk),
        lambda queries: lay_out_each(queries, everything, budget, trunk=trunk),
    ):
        for ours, theirs in zip(laid_out(known), laid_out(plain), strict=True):
            for column in ("input_ids", "position_ids", "rows", "targets", "query_index", "queries"):
                assert np.array_equal(getattr(ours, column), getattr(theirs, column))


@given(sequences, st.integers(1, 20), st.booleans(), st.booleans())
def test_bundles_over_the_budget_are_split_and_each_query_answered_once(rows, budget, trunks, together):
    half, answered = len(rows) // 2, []
    bundles = [range(half), [], range(half, len(rows))]
    groups = [bundles] if together else [[bundle] for bundle in bundles]
    for pack in lay_out_split(queries_of(rows), groups, Limits(budget, trunks)):
        assert trunks or (pack.queries and pack.trunk is None)
        assert pack.num_tokens <= max(budget, *map(len, rows))
        assert_answers(pack, rows)
        answered += pack.queries
    assert sorted(answered) == list(range(len(rows)))


def test_branches_over_the_budget_are_fed_once_in_packs_that_continue_their_sequence():
    queries = queries_of([list(range(12)), *([*range(t), 99, *range(t + 1, 12)] for t in range(12))])
    trunk, *others = lay_out_split(queries, [[range(13)]], Limits(15))
    assert [pack.num_tokens for pack in (trunk, *others)] == [12, 12, 11, 10, 9, 15, 15, 6]
    assert all(pack.trunk is trunk for pack in others)
    short = lay_out_split(queries, [[range(13)]], Limits(15, most_rows=24))
    assert max(pack.table.num_rows for pack in short) <= 24


@given(sequences, sequences, st.integers(1, 40))
def test_queries_behind_a_trunk_keep_their_order_unless_they_share_rows_that_it_has_not_fed(fed, rows, budget):
    (trunk,) = lay_out(queries_of(fed), [range(len(fed))], 999)
    packs = list(lay_out_each(queries_of(rows), range(len(rows)), budget, trunk=trunk))
    order = [n for pack in packs for n in pack.queries]
    assert sorted(order) == list(range(len(rows)))
    for pack in packs:
        assert pack.num_tokens <= budget or len(pack.queries) == 1
        assert_answers(pack, rows)
    one_pack = distinct_prefixes(fed + rows) - distinct_prefixes(fed)
    tails = [distinct_prefixes([*fed, row]) - distinct_prefixes(fed) for row in rows]
    if one_pack <= budget or sum(tails) == one_pack:
        assert order == list(range(len(rows)))


def test_branches_of_a_group_that_begin_alike_are_fed_once_behind_its_rows_and_divergences_stay_in_order():
    rows = [[1, 2, 3, 4, end] for end in (5, 6, 7)]
    bundles = [[row, [1, 9, *row[2:]], [1, 2, 9, *row[3:]], [9, *row[1:]]] for row in rows]
    queries = queries_of([row for bundle in bundles for row in bundle])
    groups = [[range(4), range(4, 8), range(8, 12)]]
    trunk, *others = lay_out_split(queries, groups, Limits(14))
    assert (trunk.num_tokens, [pack.num_tokens for pack in others]) == (7, [11, 7])
    assert [pack.queries for pack in others] == [[0, 1, 5, 9, 2, 6, 10], [3, 7, 11, 4, 8]]
    apart = [replace(query, targets=query.targets[:1], divergence=True) for query in queries]
    assert [n for pack in lay_out_split(apart, groups, Limits(14)) for n in pack.queries] == list(range(12))


def test_equal_head_rows_are_asked_once():
    queries = [Query(ids([1, 2, 3]), 1, ids(targets)) for targets in ([5, 6], [5, 8], [5, 6])]
    (pack,) = lay_out(queries, [range(3)], 99)
    assert list(zip(pack.rows.tolist(), pack.targets.tolist(), strict=True)) == [(1, 5), (2, 6), (2, 8)]
    assert pack.query_index.tolist() == [0, 1, 0, 2, 0, 1]


@pytest.mark.parametrize(
    ("sizes", "most", "total", "expected"),
    [
        ([2, 2, 2, 9, 1, 1], 5, sum, [2, 1, 1, 2]), ([1, 1, 1], 2, sum, [2, 1]),
        ([1, 2, 3, 9], 6, lambda part: len(part) * max(part), [2, 1, 1]), ([], 5, sum, []),
    ],
)  # fmt: skip
def test_neighbours_are_grouped_within_a_size(sizes, most, total, expected):
    assert [len(group) for group in groups_within(sizes, most, total)] == expected


def int32(*values) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ((int32(0), np.array([3]), int32(0), int32(0), int32()), "length must be a 1-D int32 array"),
        ((int32(0, 2), int32(2, 0), int32(0, 0), int32(0, 0), int32()), "none empty"),
        ((int32(0, 3), int32(2, 2), int32(0, 0), int32(0, 0), int32()), "row_start must place segments"),
        (
            (int32(0, 2), int32(2, 2), int32(0, 1), int32(0, 2), int32(0, 1)),
            "must be inside the 2 context_rows, got 1 and 2",
        ),
        ((int32(0, 2), int32(2, 2), int32(0, 0), int32(0, 2), int32(0, 2)), "segment 1: its context holds row 2"),
        ((int32(0, 2), int32(2, 2), int32(0, 0), int32(0, 2), int32(-1, 1)), "must not be negative"),
    ],
)
def test_a_segment_table_that_is_no_tree_is_refused(table, message):
    with pytest.raises(ValueError, match=message):
        SegmentTable(*table)


@given(sequences, st.integers(1, 5))
def test_the_work_list_covers_every_row_once_with_the_longest_tiles_first(rows, tokens_per_tile):
    table, _ = build(rows)
    work = table.work_list(tokens_per_tile)
    covered = sorted(
        row
        for row_start, length, _, _, first in work.tolist()
        for row in range(row_start + first, row_start + min(first + tokens_per_tile, length))
    )
    assert covered == list(range(table.num_rows))
    assert {tuple(entry[:4]) for entry in work.tolist()} == {
        tuple(entry) for entry in table.segments.view(-1, 4).tolist()
    }
    keys = work[:, 3] + work[:, 4]
    assert (np.diff(keys) <= 0).all()
