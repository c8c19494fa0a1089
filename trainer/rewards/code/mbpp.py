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
    """Make a question of a row; the reward `code` reads the columns `tests`, `test_setup` and `own_names`.

    The task is `text`, or `prompt` in the sanitized version, whose `test_imports` come before `test_setup_code`. Names
    of Python and its modules that the reference `code` defines anew, as task 126 does `sum`, are own names. Other
    columns are kept. Raises `ValueError` that begins with `where` and names the column.
    """
    column = next((name for name in ("text", "prompt") if name in row), None)
    if column is None or "test_list" not in row:
        raise ValueError(f"{where}: MBPP has columns text or prompt, and test_list; this row has {sorted(row)}")
    task, tests, imports = row[column], row["test_list"], row.get("test_imports") or []
    if not isinstance(task, str) or not task.strip():
        raise ValueError(f"{where}: column {column!r} must be text that is not empty, got {task!r}")
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"{where}: column 'test_list' must be a list of tests, got {tests!r}")
    if not isinstance(imports, list):
        raise ValueError(f"{where}: column 'test_imports' must be a list of statements, got {imports!r}")
    setup = [*imports, row.get("test_setup_code") or ""]
    for name, statement in [*(("test_list", test) for test in tests), *(("test_setup_code", part) for part in setup)]:
        try:
            compile(statement, "test", "exec")
        except (SyntaxError, ValueError, TypeError) as problem:
            raise ValueError(f"{where}: column {name!r} has {statement!r}, which is not Python: {problem}") from problem
    others = {name: value for name, value in row.items() if name not in (column, "test_list", "test_setup_code")}
    question = _PROMPT.format(task=task.strip(), tests="\n".join(tests))
    defined = re.findall(r"^(?:def|class)\s+(\w+)", str(row.get("code")), re.MULTILINE)
    own = [name for name in defined if hasattr(builtins, name) or name in sys.stdlib_module_names]
    return others | {"question": question, "tests": tests, "test_setup": "\n".join(setup), "own_names": own}
