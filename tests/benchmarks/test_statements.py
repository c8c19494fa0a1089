"""Statements: tasks that their own programs solve, deletions, shares by hand, a run that resumes."""

import json

import pytest
import torch

from benchmarks.research import statements
from benchmarks.research.command import main
from benchmarks.research.models import Subject
from benchmarks.research.statements import TASKS, all_tests, cut, effect, kind, probe, summed
from cfa_kernels import detect_spans
from trainer.rewards.code import fenced_code
from trainer.settings import ASSETS

pytestmark = pytest.mark.slow
TASK_LIST = [json.loads(line) for line in TASKS.read_text(encoding="utf-8").splitlines()]
PROGRAM = """Here it is:
```python
def half(x):
    y = x // 2
    z = 0
    if x < 0:
        return 0
    return y
```
Done."""


def run_here(completions, tests, **_):
    """Judge programs of this file as `CodeReward` does, in this process."""

    def passes(completion, own):
        names = {}
        try:
            exec(fenced_code(completion), names)
            for test in own:
                exec(test, names)
        except Exception:
            return 0.0
        return 1.0

    return [passes(*pair) for pair in zip(completions, tests, strict=True)]


@pytest.mark.parametrize("task", TASK_LIST, ids=[task["call"].partition("(")[0] for task in TASK_LIST])
def test_a_task_is_solved_by_its_program_and_hides_the_call_that_it_asks_for(task):
    assert run_here([f"```python\n{task['code']}```"], [all_tests(task)]) == [1.0]
    tokenizer = Subject(str(ASSETS)).tokenizer
    asked = tokenizer.decode(statements.posed(task, tokenizer).prompt)
    assert all(test in asked for test in task["tests"][:2])
    assert task["call"] not in asked
    tokens, target = probe(task, tokenizer)
    assert tokenizer.decode(tokens[slice(*target)]) == task["value"]
    assert tokenizer.decode(tokens).endswith(f"`{task['call']}` gives `{task['value']}")


def test_the_effect_of_a_statement_is_the_share_of_tests_that_fail_without_it():
    tests = ["assert half(4) == 2", "assert half(7) == 3", "assert half(-6) == 0", "assert half(0) == 0"]
    expected = {"y = x // 2": 1 - 1 / 4, "z = 0": 0.0, "return 0": 1 / 4, "return y": 3 / 4}
    for statement, share in expected.items():
        before, _, after = PROGRAM.partition(statement)
        assert effect(run_here, before, statement, after, tests) == share, statement
    for header in ("def half(x):", "if x < 0:"):
        assert effect(run_here, "", header, "", tests) is None
    assert [kind(one) for one in ("def f(x):", "print(a)", "return", "else:", "returned = 1", "@cache\nclass A:")] == [
        "def", "return, print", "return, print", "header", "other", "header"
    ]  # fmt: skip


def test_shares_are_of_the_positive_credit_and_ranks_are_within_a_program():
    kinds = [["def", "other", "header", "other", "return, print"]] * 3
    values = [[1.0, 2.0, -1.0, 0.0, 1.0], [0.0, 3.0, 1.0, 0.0, 0.0], [-1.0] * 5]
    effects = [[None, 1.0, None, 0.0, 1.0]] * 3
    found = summed(values, kinds, effects)
    assert [found[name]["value"] for name in statements.KINDS] == pytest.approx([1 / 8, 1 / 8, 1 / 8, 5 / 8])
    assert found["but return"]["spearman"]["value"] == pytest.approx(2 / 3)  # 1, 1, and 0 of a constant row
    assert found["all"]["problems"] == 3


def test_the_command_judges_programs_that_pass_and_resumes(tmp_path, monkeypatch):
    wrong = "```python\ndef f():\n    return 1\n```"

    def completed(self, prompts):
        kept = (i % 2 and "while" not in task["code"] for i, task in enumerate(TASK_LIST))  # which may not end
        texts = [f"```python\n{task['code']}```" if k else wrong for k, task in zip(kept, TASK_LIST, strict=True)]
        return [torch.tensor([*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]) for text in texts]

    monkeypatch.setattr(Subject, "completed", completed)
    monkeypatch.setattr(statements, "CodeReward", lambda timeout, isolation: run_here)
    arguments = ["statements", "--group", "1", "--commit", "none"]
    arguments += ["--folder", str(tmp_path), "--results", str(tmp_path)]
    assert main(arguments) == 0
    document = json.loads((tmp_path / "evidence-statements.json").read_text())
    assert (document["programs"], document["passed"], document["judged"]) == (20, 0.45, 9)
    for name in ("equal credit", *statements.CHOSEN):
        one = document["methods"][name]
        assert sum(one[kind]["value"] for kind in statements.KINDS) == pytest.approx(1), name
    text = (tmp_path / "evidence-statements.md").read_text()
    assert "45% of 20 programs pass" in text
    monkeypatch.setattr(statements, "judge", None)  # all is known by now
    assert main(arguments) == 0
    assert (tmp_path / "evidence-statements.md").read_text() == text


def test_a_statement_is_cut_out_of_its_completion():
    tokenizer = Subject(str(ASSETS)).tokenizer
    row = tokenizer(PROGRAM)["input_ids"]
    parts = cut(tokenizer, row, detect_spans(row, tokenizer, spans=statements.SPANS))
    assert [own for _, own, _ in parts] == ["def half(x):", "y = x // 2", "z = 0", "if x < 0:", "return 0", "return y"]
    assert all("".join(part) == PROGRAM for part in parts)
