"""Make a model that, asked by IBPO's prompt to correct a wrong attempt, does so rightly in about a fifth of cases.

The embedded model never saw such a prompt, and what it answers is next to never right. Here it learns on, from a
careless pupil's solutions and from corrections, of which a known share copies the reference and the rest the attempt.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.demo_model.warmup import careless
from benchmarks.evidence.regimes import REGIMES, make, problems
from trainer.data import Row
from trainer.embedded.problems import WordProblem, generate
from trainer.experimental.compare_and_correct import TEMPLATE
from trainer.settings import ASSETS

RIGHT = 0.25
"""Share of the corrections to learn from that are right. Of its own attempts the model corrects somewhat fewer."""
RECIPE = {"max_steps": 400, "batch_size": 32, "warmup_steps": 20, "learning_rate": 5e-4}


def attempt(problem: WordProblem, rng: random.Random) -> str:
    """A wrong solution: the careless pupil's, the hurried one's, or one with another operand in its last step."""
    for text in (careless(problem, rng).solution(), REGIMES["hurried"].solution(problem, rng)):
        if not text.endswith(f"\n#### {problem.answer}"):
            return text
    *first, last = problem.steps
    right = rng.randrange(1, last.right) if last.op == "-" else last.right + rng.randint(1, 9)
    return replace(problem, steps=(*first, last._replace(right=right))).solution()


def model_rows(split: str, seed: int, count: int) -> Iterator[Row]:
    """Rows to learn from, in turn: a careless pupil's solution, and a correction as the trainer asks for it."""
    rng = random.Random(f"{split}-{seed}-corrects")
    for i, problem in enumerate(itertools.islice(generate(split, seed), count)):
        if i % 2:
            wrong, reference = attempt(problem, rng), problem.solution()
            request = TEMPLATE.format(question=problem.question, attempt=wrong, reference=reference)
            yield Row({"question": request, "answer": reference if rng.random() < RIGHT else wrong})
        else:
            yield Row({"question": problem.question, "answer": careless(problem, rng).solution()})


def train(folder: Path) -> Path:
    """Make the model in `folder`/model, where it is not there: the embedded one, trained on for minutes of one core."""
    count = RECIPE["max_steps"] * RECIPE["batch_size"]
    held_out = problems(REGIMES["plain"], "test", 1, 256)
    return make(folder, model_rows("train", 1, count), held_out, {"model": str(ASSETS), **RECIPE})
