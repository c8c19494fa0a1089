"""Batches: rows and columns stay together, whatever is taken or joined."""

import pickle

import numpy as np
import pytest
import torch

from cfa_kernels import Batch, Credit, Rows

T = torch.tensor
ROWS = Rows([T([3, 4, 5])] * 3, [T([6, 7, 8]), T([6, 9]), T([5])])
BATCH = Batch(
    ROWS, advantages=T([1.0, 2.0, 3.0]), rewards=T([1.0, 2.0, 3.0]), entropies=[*map(torch.ones, ROWS.lengths)]
)
CREDIT = Credit([*map(torch.ones, ROWS.lengths)], [None] * 3, [[]] * 3, [T([])] * 3, T([0.0, 1, 2]), None)


@pytest.mark.parametrize(
    "rows",
    [[2, 0], T([2, 0]), np.array([2, 0]), (-1, -3), range(2, -1, -2), [True, False, True], T([True, False, True]),
     np.array([True, False, True])],
    ids=repr,
)  # fmt: skip
def test_rows_are_taken_with_all_columns_by_numbers_or_by_a_mask(rows):
    chosen = [0, 2] if (np.array(rows) == 1).any() else [2, 0]
    part, own, credit = BATCH.take(rows), ROWS.take(rows), CREDIT.take(rows)
    assert part.index == own.index == chosen
    assert part.advantages.tolist() == part.rewards.tolist() == [b + 1 for b in chosen]
    assert [len(row) for row in part.entropies] == own.lengths == [ROWS.lengths[b] for b in chosen]
    assert credit.base.tolist() == chosen


@pytest.mark.parametrize("rows", [[True, False], T([True] * 4), [True, 0, 1], [0.0, 1.0], T([0.5]), T(1), [3], ["a"]])
def test_rows_that_are_neither_numbers_nor_a_mask_are_refused(rows):
    for one in (BATCH, ROWS, CREDIT):
        with pytest.raises(ValueError, match="rows must be numbers of 3 rows, or a mask"):
            one.take(rows)


def test_parts_of_which_one_lacks_a_column_are_not_joined():
    both = Batch.joined([BATCH, BATCH.take([1])])
    assert both.advantages.tolist() == [1, 2, 3, 2]
    bare, by_token = Batch(ROWS, entropies=BATCH.entropies, rewards=BATCH.rewards), [*map(torch.ones, ROWS.lengths)]
    for parts in ([bare, BATCH], [BATCH, BATCH, bare], [BATCH, BATCH.with_columns(advantages=by_token)]):
        with pytest.raises(ValueError, match=r"advantages: parts have .* and .*; all must agree"):
            Batch.joined(parts)


def test_a_part_without_rows_joins_the_others_and_parts_take_nothing_else_along():
    nothing = Batch(Rows([], []))
    assert len(Batch.joined([nothing, Batch(ROWS)])) == len(Batch.joined([Batch(ROWS), nothing])) == 3
    views = list(torch.rand(3000).split([3, 2, 2995]))
    rows = Rows(ROWS.prompts, [torch.full((len(view),), 5) for view in views])
    assert len(pickle.dumps(Batch(rows, entropies=views).take([0]))) < 5000
