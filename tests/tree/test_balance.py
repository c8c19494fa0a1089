"""Dealing groups over ranks: complete, repeatable, within Graham's bound."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from cfa_kernels.tree.balance import deal

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
