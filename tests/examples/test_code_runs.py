"""Training on MBPP by the reward for code."""

import dataclasses

import pytest

from examples.mbpp import mbpp_row
from tests.support.embedded import settings
from tests.support.tiny import jsonl
from trainer.evaluate import evaluate
from trainer.run import set_up

pytestmark = pytest.mark.slow
REWARD = "examples.code:passes_tests_unisolated"


@pytest.fixture
def mbpp(tmp_path) -> list[str]:
    """Flags of a run on eight tasks that each ask for another multiple."""
    rows = [
        {"text": f"Multiply by {n}.", "test_list": [f"assert f(1) == {n}", "assert f(0) == zero"],
         "test_setup_code": "zero = 0", "code": "def f(x): ..."} for n in range(8)
    ]  # fmt: skip
    rows = [mbpp_row(row, "a row") for row in rows]
    (tmp_path / "mbpp.jsonl").write_text(jsonl(*rows))
    # What isolates is tested with the reward; here it may be missing.
    return [
        f"--dataset={tmp_path / 'mbpp.jsonl'}", f"--reward_funcs={REWARD}", f"--eval_reward={REWARD}",
        "--eval_problems=3", "--max_completion_length=16", "--max_steps=1", f"--output_dir={tmp_path / 'run'}",
    ]  # fmt: skip


def test_evaluation_counts_the_problems_whose_tests_pass(mbpp) -> None:
    trainer = set_up(settings(*mbpp))
    assert trainer.grader is trainer.rewards["passes_tests_unisolated"]
    wanted = [row["question"].partition("Multiply by ")[2][0] for row in trainer.held_out]
    wrong = wanted[1]

    def solved(prompts, **options):
        factors = [trainer.tokenizer.decode(prompt).partition("Multiply by ")[2][0] for prompt in prompts]
        texts = [f"```python\ndef f(x): return x * {99 if n == wrong else n}\n```" for n in factors]
        return dataclasses.replace(trainer.engine(prompts, **options), texts=texts, contents=texts)

    config = settings(*mbpp, "--max_completion_length=2")
    result = evaluate(solved, trainer.held_out, trainer.held_out_prompts, config, match=trainer.grader)
    assert result.correct == [True, False, True]
