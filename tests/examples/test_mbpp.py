"""Rows of MBPP: their question, their tests, and what is said about a bad one."""

import pytest

from examples.mbpp import mbpp_row

ROW = {
    "task_id": 1,
    "text": "Write a function to double a number.",
    "code": "def double(x):\n    return 2 * x",
    "test_list": ["assert double(1) == 2", "assert double(4) == 8"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
SANITIZED = {
    "prompt": "Write a function to double a number.",
    "code": ROW["code"],
    "test_imports": ["import math"],
    "test_list": ROW["test_list"],
}


@pytest.mark.parametrize(("row", "setup"), [(ROW, ""), (SANITIZED, "import math\n")])
def test_a_question_shows_its_tests(row, setup) -> None:
    made = mbpp_row(row, "row 0")
    assert made["question"] == (
        "You are an expert Python programmer, and here is your task: Write a function to double a number. "
        "Your code should pass these tests:\n\nassert double(1) == 2\nassert double(4) == 8\n"
        "Answer with the program in one block of Python, between a line ```python and a line ```."
    )
    assert (made["tests"], made["test_setup"], made["answer"]) == (ROW["test_list"], setup, ROW["code"])


def test_names_of_python_that_the_reference_defines_are_the_solutions() -> None:
    code = "import math\r\ndef own(a): return sum(a)\r\ndef sum(a, b):\r\n  def max(x): pass\r\n  return a"
    row = ROW | {"code": code, "test_list": ["assert sum(1, 2) == max(1, 0)"]}
    assert mbpp_row(row, "row 0")["test_setup"] == "\nsum = of_solution('sum')"
    assert mbpp_row(row | {"test_list": ["assert own(1)"]}, "row 0")["test_setup"] == ""


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"question": "?", "answer": "5"}, "MBPP has a task in text or prompt and a list of tests in test_list, got"),
        (ROW | {"text": None}, "MBPP has a task .* got {'text': None,"),
        (ROW | {"test_list": []}, r"MBPP has .* 'test_list': \[\]"),
        (SANITIZED | {"test_imports": "import math"}, "MBPP has .* 'test_imports': 'import math'"),
        (ROW | {"test_list": ["assert f(1 == 2"]}, r"'assert f\(1 == 2' in its tests is not Python"),
        (ROW | {"test_setup_code": "import"}, "'import' in its tests is not Python"),
    ],
)
def test_a_bad_row_is_named_with_its_number_and_reason(bad, reason) -> None:
    with pytest.raises(ValueError, match=f"row 1: {reason}"):
        mbpp_row(bad, "row 1")
