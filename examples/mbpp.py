"""Write rows of MBPP as JSON lines that the reward of `code.py` reads.

python -m examples.mbpp train > train.jsonl; python -m examples.mbpp test > test.jsonl
"""

import builtins
import json
import re
import sys
from collections.abc import Mapping
from typing import Any

# Austin et al. (2021), "Program Synthesis with Large Language Models"; the last line is ours.
PROMPT = (
    "You are an expert Python programmer, and here is your task: {task} Your code should pass these tests:\n\n{tests}\n"
    "Answer with the program in one block of Python, between a line ```python and a line ```."
)


def mbpp_row(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Make a question, an answer, `tests` and `test_setup` of a row of MBPP, whose other columns stay.

    Names of Python and its modules that the reference `code` defines again, as task 126 does `sum`, are the solution's
    in tests. Raises `ValueError` that begins with `where`.
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
    defined = re.findall(r"^(?:def|class)\s+(\w+)", str(row.get("code")), re.MULTILINE)
    tested = {*re.findall(r"\w+", " ".join(tests))} & {*dir(builtins), *sys.stdlib_module_names}
    setup += [f"{name} = of_solution({name!r})" for name in defined if name in tested]
    question = PROMPT.format(task=task.strip(), tests="\n".join(tests))
    return {**row, "question": question, "answer": row.get("code"), "tests": tests, "test_setup": "\n".join(setup)}


if __name__ == "__main__":
    import datasets

    for i, row in enumerate(datasets.load_dataset("google-research-datasets/mbpp", "full", split=sys.argv[1])):
        print(json.dumps(mbpp_row(row, f"row {i}")))
