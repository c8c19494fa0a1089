"""Statements and docstrings of the program that a text holds."""

import io
import itertools
import re
import textwrap
import tokenize
from pathlib import Path

import pytest

import cfa_kernels
from cfa_kernels.text.python_code import ranked_python_intervals


def units(text: str) -> tuple[list[str], list[str]]:
    statements, remarks = ranked_python_intervals(text)
    return [text[slice(*unit)] for unit in statements], [text[slice(*unit)] for unit in remarks]


def fenced(code: str) -> str:
    return f"Here is x = 1:\n```python\n{code}\n```\nand y = 2\n"


@pytest.mark.parametrize(
    ("code", "statements"),
    [
        ("x = 1; y = 2;z = 3", ["x = 1", "y = 2", "z = 3"]),
        ("def f(a, b={1: 2}) -> 'a:b':\n    return a", ["def f(a, b={1: 2}) -> 'a:b':", "return a"]),
        (
            "if x[1:2]: y: int = 3\nelif z:\n  a\nelse :\n  b",
            ["if x[1:2]:", "y: int = 3", "elif z:", "a", "else :", "b"],
        ),
        ("if x:\n  a\nelse:\n  if y:\n    b", ["if x:", "a", "else:", "if y:", "b"]),
        (
            "try:\n  a\nexcept (A, B) as e: b\nelse: c\nfinally:\n  d",
            ["try:", "a", "except (A, B) as e:", "b", "else:", "c", "finally:", "d"],
        ),
        (
            "match x[1:]:\n  case {'a': 1} if y: a\n  case (1 |\n      2):\n    b\n  case _: pass",
            ["match x[1:]:", "case {'a': 1} if y:", "a", "case (1 |\n      2):", "b", "case _:", "pass"],
        ),
        (
            "@cache\n@ d(lambda: {1: 2})\nasync def f():\n  async with a as b: await b",
            ["@cache\n@ d(lambda: {1: 2})\nasync def f():", "async with a as b:", "await b"],
        ),
        ("x = [1,\n     2]\ny = '''a\n  b'''", ["x = [1,\n     2]", "y = '''a\n  b'''"]),
        ("é, 名 = 'é🦆'; y = 2", ["é, 名 = 'é🦆'", "y = 2"]),
        ("x = 1\r\nif x:\r\n  y = '''a\r\n'''\r\n  z", ["x = 1", "if x:", "y = '''a\r\n'''", "z"]),
        ("x = 1 \\\r\n  + 2\r\ny\rz", ["x = 1 \\\r\n  + 2", "y", "z"]),
        ("", []),
    ],
)
def test_statements_and_headers_are_the_units_of_a_program(code: str, statements: list[str]) -> None:
    assert units(fenced(code)) == (statements, [])
    assert units(f"```\n{code}\n```") == (statements, [])


def test_docstrings_come_after_the_statements_and_comments_are_no_units() -> None:
    code = "# one\n#----\n'''Doc\nté.'''\ndef f():  # two: 2\n  'three'\n  # four\n  x = [  # five\n  ]\n  '--'"
    assert units(fenced(code)) == (["def f():", "x = [  # five\n  ]"], ["'''Doc\nté.'''", "'three'"])


@pytest.mark.parametrize(
    ("text", "statements"),
    [
        ("```text\na = 0\n```\n``` py title='b.py'\nb = 1\n```\n```python\nc = 2\n```", ["b = 1"]),
        ("```\nno program\n```\n~~~\na = 0\n```\n~~~\n```\nb = 1\n```", ["b = 1"]),
        ("```pycon\n>>> a\n```\n```python2\na\n```", []),
        ("````python\nb = '''\n```\n'''\n````", ["b = '''\n```\n'''"]),
        ("1. Do:\n   ```python\n   if b:\n       c\n   d\n   ```\n", ["if b:", "c", "d"]),
        ("    b = 1\n    return b\n\ndef f(): pass\n", ["b = 1", "return b", "def f():", "pass"]),
        ("b = 1\nc = 2", ["b = 1", "c = 2"]), ("Then b = 1", []), ("Say ```python x = 1``` here, or `y = 2`", []),
        ("```python", []), ("", []),
    ],
)  # fmt: skip
def test_the_program_is_the_first_python_block_or_what_parses(text: str, statements: list[str]) -> None:
    assert units(text) == (statements, [])


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("def f(x):\n\n    y = (x +\n", ["def f(x):", "y = (x +"]),
        ("  a\nelse:\n  b", ["a", "else:", "b"]),
    ],
)
def test_a_program_that_does_not_parse_is_taken_by_lines(code: str, lines: list[str]) -> None:
    assert units(f"So:\n```python\n{code}") == (lines, [])


@pytest.mark.parametrize("module", ["text/python_code", "text/answers", "model/check/verify"])
def test_a_real_program_is_all_in_its_units_with_any_line_ends_and_indent(module: str) -> None:
    code = (Path(cfa_kernels.__file__).parent / f"{module}.py").read_text(encoding="utf-8")
    for change in (lambda line: line, lambda line: line + "\r", lambda line: "   " + line if line else line):
        text = fenced("\n".join(map(change, code.split("\n"))))
        in_order = "\n".join(text[slice(*unit)] for unit in sorted(itertools.chain(*ranked_python_intervals(text))))
        assert words(in_order) == words(code)


def words(code: str) -> list[str]:
    """The letters and digits of a program without those of its comments."""
    tokens = tokenize.generate_tokens(io.StringIO(textwrap.dedent(code)).readline)
    return [word for token in tokens if token.type != tokenize.COMMENT for word in re.findall(r"\w+", token.string)]
