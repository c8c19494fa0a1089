"""Rows that teach corrections: asked for as the trainer asks, of attempts that are wrong, right by a known share."""

import itertools
import random

from transformers import AutoTokenizer

from benchmarks.evidence.corrects import RIGHT, attempt, model_rows
from tests.support.runs import config
from trainer.data import encode_prompt
from trainer.embedded.problems import generate
from trainer.experimental.compare_and_correct import correction_prompt
from trainer.settings import ASSETS

COUNT = 800


def test_corrections_are_asked_for_as_the_trainer_does_and_a_known_share_is_right():
    tokenizer, settings = AutoTokenizer.from_pretrained(ASSETS), config()
    rows, right = list(model_rows("train", 1, COUNT)), 0
    for i, (row, problem) in enumerate(zip(rows, generate("train", 1), strict=False)):
        gold = problem.solution()
        if i % 2 == 0:
            assert row["question"] == problem.question
            assert row["answer"].count("\n") == len(problem.steps)
            continue
        wrong = row["question"].partition("This attempt is wrong:\n")[2].partition("\n\nThis is correct:\n")[0]
        asked = correction_prompt(problem.question, wrong, gold, tokenizer, settings)
        assert encode_prompt(row["question"], tokenizer) == asked
        assert row["answer"] in (wrong, gold)
        right += row["answer"] == gold
    assert abs(right / (COUNT / 2) - RIGHT) < 0.06
    assert rows == list(model_rows("train", 1, COUNT))


def test_an_attempt_is_wrong_in_its_answer_and_of_the_same_steps():
    rng = random.Random(0)
    for problem in itertools.islice(generate("test", 2), COUNT):
        *steps, answer = attempt(problem, rng).split("\n")
        assert answer.startswith("#### ")
        assert int(answer.removeprefix("#### ")) != problem.answer
        assert [step.split()[0] for step in steps] == [step.lead.split()[0] for step in problem.steps]
        assert f"={answer.removeprefix('#### ')} " in steps[-1]
