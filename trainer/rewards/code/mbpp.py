"""Read rows of MBPP: a task in words, statements that test a solution, perhaps statements that come before them.

Source: Austin et al. (2021), "Program Synthesis with Large Language Models", whose prompt is used.
"""

import builtins
import re
import sys
from collections.abc import Mapping
from typing import Any

_PROMPT = (
    "You are an expert Python programmer, and here is your task: {task} Your code should pass these tests:\n\n{tests}"
)


def mbpp_row(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Make a question of a row; the reward `code` reads the columns `tests` and `test_setup`.

    The task is `text`, or `prompt` in the sanitized version, whose `test_imports` come before `test_setup_code`. Names
    of Python and its modules that the reference `code` defines anew, as task 126 does `sum`, are the solution's in
    tests. Other columns stay. Raises `ValueError` that begins with `where`.
    """
    task = row.get("text", row.get("prompt"))
    tests, imports = row.get("test_list"), row.get("test_imports") or []
    if not (isinstance(task, str) and task.strip() and isinstance(tests, list) and tests and isinstance(imports, list)):
        columns = {name: row.get(name) for name in ("text", "prompt", "test_list", "test_imports")}
        raise ValueError(f"{where}: MBPP has a task in text or prompt and a list of tests in test_list, got {columns}")
    setup = [*imports, row.get("test_setup_code") or ""]
    for statement in (*tests, *setup):
        try:
            compile(statement, "test", "exec")
        except (SyntaxError, ValueError, TypeError) as problem:
            raise ValueError(f"{where}: {statement!r} in its tests is not Python: {problem}") from problem
    question = _PROMPT.format(task=task.strip(), tests="\n".join(tests))
    defined = re.findall(r"^(?:def|class)\s+(\w+)", str(row.get("code")), re.MULTILINE)
    tested = {*re.findall(r"\w+", " ".join(tests))} & {*dir(builtins), *sys.stdlib_module_names}
    setup += [f"{name} = of_solution({name!r})" for name in defined if name in tested]
    return {**row, "question": question, "tests": tests, "test_setup": "\n".join(setup)}
