"""Calls of reward functions: what is said about one that raises, or that cannot take the columns of the data."""

import asyncio
import functools

import pytest

from trainer.rewards.calls import RewardError, require_callable, rewards_by


def refused(self, *_):
    raise RuntimeError("cannot be printed")


SAMPLES = [f"sample {b} (row {10 * b})" for b in range(4)]
GIVEN = {"prompts": ["q"] * 4, "completions": ["a", "b", "c", "d"], "completion_ids": [[0]] * 4, "level": [1, 2, 3, 0]}


def inverse(level, **_):
    return [1 / one for one in level]


def of_a_whole_batch(completions, **_):
    if len(completions) > 1:
        raise LookupError("not so many")
    return [1.0]


def test_a_function_that_raises_is_named_with_the_row_and_its_own_line() -> None:
    line = inverse.__code__.co_firstlineno + 1
    said = rf"^sample 3 \(row 30\): reward mine raised ZeroDivisionError: .* \(in test_calls.py, line {line}\)$"
    with pytest.raises(RewardError, match=said):
        rewards_by("mine", inverse, SAMPLES, GIVEN)


def test_no_row_is_named_where_none_raises_by_itself() -> None:
    with pytest.raises(RewardError, match=r"^reward mine raised LookupError: not so many \(in test_calls.py, line"):
        rewards_by("mine", of_a_whole_batch, SAMPLES, GIVEN)


def test_a_server_that_does_not_answer_is_not_asked_again() -> None:
    asked = []

    def judge(completions, **_):
        asked.append(len(completions))
        raise TimeoutError("no answer")

    with pytest.raises(RewardError, match=r"^reward judge raised TimeoutError: no answer"):
        rewards_by("judge", judge, SAMPLES, GIVEN)
    assert asked == [4]


@pytest.mark.parametrize("raised", [SystemExit(3), asyncio.CancelledError("late"), GeneratorExit("early")])
def test_a_function_that_raises_no_exception_is_named_too(raised) -> None:
    def leaving(**_):
        raise raised

    said = rf"^sample 0 \(row 0\): reward mine raised {type(raised).__name__}: {raised} \(in test_calls.py"
    with pytest.raises(RewardError, match=said):
        rewards_by("mine", leaving, SAMPLES, GIVEN)


def test_what_a_function_does_to_its_lists_changes_nothing_for_others() -> None:
    given = {name: [*values] for name, values in GIVEN.items()}
    rewards_by("mine", lambda **given: [0.0 for values in given.values() if not values.clear()], SAMPLES, given)
    assert given == GIVEN


def test_an_error_that_cannot_be_printed_is_named_by_its_type() -> None:
    def raising(**_):
        raise type("Mute", (Exception,), {"__str__": refused})

    with pytest.raises(
        RewardError, match=r"^sample 0 \(row 0\): reward mine raised Mute: a Mute that cannot be printed"
    ):
        rewards_by("mine", raising, SAMPLES, GIVEN)


def test_ctrl_c_in_a_function_is_no_error_of_it() -> None:
    def interrupted(**_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rewards_by("interrupted", interrupted, SAMPLES, GIVEN)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda completions: [], "unexpected keyword argument 'prompts'"),
        (lambda prompts, completions, completion_ids: [], "unexpected keyword argument 'question'"),
        (lambda difficulty, **_: [], "missing a required argument: 'difficulty'"),
        (lambda completions, /, **_: [], "missing a required positional-only argument|'completions'"),
    ],
)
def test_a_function_that_does_not_take_the_columns_is_named_with_them(function, said) -> None:
    with pytest.raises(ValueError, match=rf"^reward mine: .*({said}).* \['answer', 'question'\] by name"):
        require_callable({"mine": function}, {"question": "Q", "answer": "7"})


@pytest.mark.parametrize(
    "function",
    [
        inverse,
        functools.partial(inverse, factor=2),
        lambda *, answer, **_: [],
        type("R", (), {"__call__": lambda self, level, **_: []})(),
        type("Mute", (), {"__call__": lambda self, level, **_: [], "__repr__": refused})(),
        type("MuteBuiltin", (), {"__call__": max, "__repr__": refused})(),  # Python knows no signature of it
    ],
)
def test_a_function_that_takes_them_is_not_refused(function) -> None:
    require_callable({"mine": function}, {"question": "Q", "answer": "7", "level": 1})
