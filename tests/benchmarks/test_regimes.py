"""The regimes: what a prompt asks for is what its solution has, and wrong operands are followed to the answer."""

import itertools
import random
import re

import pytest

from benchmarks.research.regimes import REGIMES, WORDS, Regime, problems
from examples.problems import generate

SOME = list(itertools.islice(generate("train", 3), 40))


@pytest.mark.parametrize("regime", REGIMES.values(), ids=REGIMES)
def test_a_solution_has_the_idle_lines_that_its_prompt_asks_for(regime: Regime) -> None:
    rng = random.Random(0)
    for problem in SOME:
        *lines, answer = regime.solution(problem, rng).split("\n")
        idle = [line for line in lines if not re.search(r"\d[-+*/]\d", line) or line.startswith("We also see")]
        assert len(idle) == regime.sentences
        assert len(lines) - len(idle) == len(problem.steps)
        assert regime.question(problem).endswith(f" {WORDS[regime.kind]} {len(idle)}.") or not idle
        if not regime.hurried:
            assert answer == f"#### {problem.answer}"


def test_a_wrong_operand_is_followed_to_the_answer() -> None:
    rng, wrong = random.Random(0), 0
    for problem in SOME:
        *lines, answer = REGIMES["hurried"].solution(problem, rng).split("\n")
        results = [re.search(r"(\d+)([-+*/])(\d+)=(\d+)", line) for line in lines]
        for found in results:
            assert found is not None
            left, op, right, result = found.groups()
            assert eval(f"{left}{'//' if op == '/' else op}{right}") == int(result)
        assert results[-1] is not None
        assert answer == f"#### {results[-1][4]}"
        wrong += answer != f"#### {problem.answer}"
    assert 0 < wrong < len(SOME) / 2


def test_rows_are_the_same_for_a_seed_and_hold_the_right_answer() -> None:
    rows = problems(REGIMES["idle8"], "test", 5, 8)
    assert rows == problems(REGIMES["idle8"], "test", 5, 8) != problems(REGIMES["idle8"], "test", 6, 8)
    for row, problem in zip(rows, generate("test", 5), strict=False):
        assert row["answer"].endswith(f"#### {problem.answer}")
