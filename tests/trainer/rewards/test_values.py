"""What reward functions may give, and what is said about anything else."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from trainer.report.metrics import reward_metrics
from trainer.rewards import compute_rewards, load_rewards

GIVEN = {"prompts": ["q"] * 3, "completions": ["a", "b", "c"], "completion_ids": [[1], [2], [3]]}


def refused(*_):
    raise RuntimeError("cannot be printed")


MUTE = {"__repr__": refused, "__str__": refused, "__format__": refused}


def rewards_of(values, name: str = "mine") -> tuple[torch.Tensor, dict]:
    return compute_rewards({name: lambda **_: values}, GIVEN)


@pytest.mark.parametrize(
    "values",
    [
        [True, False, None],
        [1, 0, None],
        (1.0, 0.0, None),
        [np.float32(1), np.int64(0), None],
        [np.bool_(True), np.array(0.0), None],
        [torch.tensor(1), torch.tensor(0.0), None],
        [torch.tensor(True), Fraction(0), None],
    ],
)
def test_any_real_numbers_are_rewards(values) -> None:
    total, by_function = rewards_of([*values[:2], 0.5])
    assert total.tolist() == [1.0, 0.0, 0.5]
    metrics = reward_metrics(total, by_function, 3)
    assert metrics["rewards/mine/mean"] == 0.5
    by_function = compute_rewards({"mine": lambda **_: values, "other": lambda **_: [0, 0, 1]}, GIVEN)[1]
    assert by_function["mine"] == [1.0, 0.0, None]
    assert reward_metrics(total, by_function, 3)["rewards/mine/std"] == 0.5


@pytest.mark.parametrize("values", [torch.tensor([1, 0, 1]), np.array([True, False, True])])
def test_an_array_of_rewards_is_a_list_of_them(values) -> None:
    assert rewards_of(values)[0].tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ([1, "0.5", 0], ValueError, "sample 1: reward mine is '0.5', expected a real number or None"),
        ([1, 0, [1.0]], ValueError, r"sample 2: reward mine is \[1.0\], expected a real number"),
        ([torch.ones(1), 0, 0], ValueError, r"sample 0: reward mine is tensor\(\[1.\]\), expected a real number"),
        ([1j, 0, 0], ValueError, "sample 0: reward mine is 1j, expected a real number"),
        ([0, torch.tensor(torch.nan), 0], FloatingPointError, "sample 1: reward mine is nan"),
        ([0, 0, 10**400], FloatingPointError, "sample 2: reward mine is an integer, beyond what float32 holds"),
        ([0, 1e39, 0], FloatingPointError, r"sample 1: reward mine is 1e\+39"),
        (
            [0, type("Mute", (), MUTE)(), 0], ValueError,
            "sample 1: reward mine is a Mute that cannot be printed, expected a real number",
        ),
        (
            [type("MuteNumber", (float,), MUTE)("inf"), 0, 0], FloatingPointError,
            "sample 0: reward mine is a MuteNumber that cannot be printed, beyond what float32 holds",
        ),
        (type("Mute", (), MUTE)(), ValueError, "reward mine: returned a Mute, expected a list of numbers"),
        ([True, False], ValueError, "reward mine: returned 2 values for 3 completions"),
        ([None, 0.0, 1.0], ValueError, "sample 0: every reward function returned None"),
        (None, ValueError, "reward mine: returned a NoneType, expected a list of numbers"),
        (1.0, ValueError, "reward mine: returned a float, expected a list of numbers"),
        ({0: 1, 1: 0, 2: 1}, ValueError, "reward mine: returned a dict, expected a list of numbers"),
        (torch.ones(3, 1), ValueError, "reward mine: returned a Tensor, expected a list of numbers"),
    ],
)  # fmt: skip
def test_anything_else_names_function_sample_and_value(values, kind, message) -> None:
    with pytest.raises(kind, match=message):
        rewards_of(values)


@pytest.mark.parametrize(
    "names",
    [["math:gcd", "numpy:gcd"], ["exact_match", "trainer.rewards:exact_match"], ["exact_match", "exact_match"]],
)
def test_two_reward_functions_of_one_name_are_an_error_that_names_both(names) -> None:
    with pytest.raises(ValueError, match=f"reward_funcs: {names[0]!r} and {names[1]!r} would both be reported as"):
        load_rewards(names)


def test_reward_functions_are_reported_under_the_last_part_of_their_names() -> None:
    assert list(load_rewards(["exact_match", "math:gcd"])) == ["exact_match", "gcd"]
