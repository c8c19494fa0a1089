"""Turns are the runs of 1 in a mask, each with the run of 0 after it."""

import pytest
import torch

from cfa_kernels.span import Span
from cfa_kernels.text.turns import Turn, find_turns


@pytest.mark.parametrize(
    ("mask", "turns"),
    [
        ("", []), ("000", []), ("1", [(0, 1, 1)]), ("1100100", [(0, 2, 4), (4, 5, 7)]),
        ("001101", [(2, 4, 5), (5, 6, 6)]), ("10101", [(0, 1, 2), (2, 3, 4), (4, 5, 5)]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.float32, list])
def test_a_turn_is_a_run_of_1_and_its_observation_the_run_of_0_after_it(mask, turns, kind):
    values = [int(bit) for bit in mask]
    values = values if kind is list else torch.tensor(values, dtype=kind)
    assert find_turns(values) == [Turn(Span(start, end), Span(end, stop)) for start, end, stop in turns]
