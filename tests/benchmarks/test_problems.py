"""Generated problems: what the generator writes, and that the training program's data set is what it writes."""

import gzip
import itertools
import re

import pytest

from benchmarks.research.problems import data_set, generate
from trainer.rewards.numbers import gold_number
from trainer.settings import ASSETS


def problems(split: str, count: int, seed: int = 0):
    return list(itertools.islice(generate(split, seed), count))


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


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_data_set_of_the_training_program_is_what_the_generator_writes(split) -> None:
    assert gzip.decompress((ASSETS / f"{split}.jsonl.gz").read_bytes()) == data_set(split)
