"""Generated problems: what is written, what is held out, and that the demo's are the first of them."""

import itertools
import re

import pytest

from examples.problems import generate
from trainer.data import load_rows
from trainer.rewards.numbers import gold_number


def problems(split: str, count: int, seed: int = 0, **options):
    return list(itertools.islice(generate(split, seed, **options), count))


def arithmetic(problem) -> tuple:
    return tuple((step.left, step.op, step.right) for step in problem.steps)


def test_generated_solutions_are_right_and_their_numbers_come_from_the_question_or_an_earlier_step() -> None:
    for problem in problems("train", 500):
        known = {int(number) for number in re.findall(r"\d+", problem.question)}
        known |= {2, 3, 4}  # "twice", "three times", "four times"
        for left, op, right, result in re.findall(r"(\d+)([-+*/])(\d+)=(\d+) ", problem.solution()):
            assert eval(f"{left}{op}{right}") == int(result) > 0
            assert {int(left), int(right)} <= known
            known.add(int(result))
        assert gold_number(problem.solution()) == problem.answer == int(result)
        assert 2 <= len(problem.steps) <= 4


def test_held_out_problems_share_no_arithmetic_with_training_problems_of_any_seed() -> None:
    held_out = {arithmetic(problem) for problem in problems("test", 1000, seed=1)}
    for seed in range(4):
        assert held_out.isdisjoint(arithmetic(problem) for problem in problems("train", 3000, seed=seed))


@pytest.mark.parametrize(("split", "count"), [("train", 8192), ("test", 2048)])
def test_the_problems_of_the_demo_are_the_first_that_are_generated(split, count) -> None:
    rows = load_rows("generated", split=split)
    assert len(rows) == count
    assert rows == [{"question": one.question, "answer": one.solution()} for one in problems(split, count, seed=1)]
