"""Dealing groups over ranks: complete, repeatable, within Graham's bound; sizes are the rows that are fed."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cfa_kernels.batch import ScoredRow
from cfa_kernels.scoring.plan import queries_of
from cfa_kernels.span import Span
from cfa_kernels.tree.balance import deal, rows_to_score
from cfa_kernels.tree.packs import lay_out

sizes = st.lists(st.integers(0, 50), max_size=7)


def largest(dealt, sizes) -> float:
    return max(sum(sizes[i] for i in items) for items in dealt)


@given(sizes, st.integers(1, 9))
def test_each_item_is_dealt_once_and_ranks_keep_the_order_in_which_items_came(sizes, ranks):
    dealt = deal(sizes, ranks)
    assert len(dealt) == ranks
    assert sorted(i for items in dealt for i in items) == list(range(len(sizes)))
    assert all(items == sorted(items) for items in dealt)


@given(sizes, st.integers(1, 3))
def test_the_largest_sum_is_within_grahams_bound_of_the_smallest_possible(sizes, ranks):
    possible = (
        [[i for i, to in enumerate(choice) if to == rank] for rank in range(ranks)]
        for choice in itertools.product(range(ranks), repeat=len(sizes))
    )
    best = min(largest(dealt, sizes) for dealt in possible)
    assert largest(deal(sizes, ranks), sizes) <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


def test_equal_sizes_are_spread_and_so_are_groups_that_cost_nothing():
    assert deal([7] * 6, 3) == [[0, 3], [1, 4], [2, 5]]
    assert deal([0] * 6, 3) == [[0, 3], [1, 4], [2, 5]]
    assert deal([4, 9], 4) == [[1], [0], [], []]


def test_rows_to_score_are_those_that_the_packs_of_a_group_feed():
    spans = [[Span(0, 2), Span(5, 9), Span(17, 19)], [], [Span(3, 4)]]  # one behind its answer costs nothing
    answers = [Span(12, 15), Span(8, 9), Span(19, 20)]
    rows = [
        ScoredRow(np.arange(6), np.arange(20) + 100 * (b + 1), units, answer)
        for b, (units, answer) in enumerate(zip(spans, answers, strict=True))
    ]
    queries = [query for row in rows for query in queries_of(row, mask=99)]
    (pack,) = lay_out(queries, [range(len(queries))], 10_000)
    assert rows_to_score(6, spans, answers) == pack.num_tokens
