"""Find the statements of a Python program in a text. The parser is that of the running Python."""

import ast
import itertools
import re
import warnings
from typing import Any

from .patterns import LETTER_OR_DIGIT, Interval, trimmed

# Markdown's fenced blocks; one that is not closed reaches to the end.
_BLOCK = re.compile(
    r"^[ \t]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`\n]*)$\n?(?P<code>.*?)(?:^[ \t]*(?P=fence)[`~]*\s*?$|\Z)",
    re.MULTILINE | re.DOTALL,
)
_PYTHON_INFO = re.compile(r"\{?\s*\.?(?:python|py)(?:3(?:\.\d+)?)?(?![\w.+-])", re.IGNORECASE)
_LINE = re.compile(r"(?<![^\r\n])[^\r\n]*[^\W_][^\r\n]*")  # from its start only, or blanks are read again
_FIRST_INDENT = re.compile(r"^[ \t\f]*(?=[^\s#])", re.MULTILINE)
_BETWEEN = re.compile(r"(?:[\s;\\]|#[^\n]*)*")
_BODY_PARTS = (ast.stmt, ast.excepthandler, ast.match_case)
_WRAPPER = "if 1:\n"  # before a program that is indented as a whole, such as a function's body, so that it parses

Units = tuple[list[Interval], list[Interval]]  # statements, and docstrings


def ranked_python_intervals(text: str) -> Units:
    """Find the statements of a program, and its docstrings, each in order of position.

    The program is the text's first block fenced as Python; without one, the first fenced block that names no language
    and parses; without any fence, the whole text if it parses. Nothing outside it is a unit, nor is a comment.

    A simple statement is a unit, over all its lines; so is the header of a compound statement, up to its colon and
    with its decorators (`for x in y:`, `else:`, `case 1:`), and each statement of its body. A program that does not
    parse, cut off or wrong, is taken by lines.
    """
    blocks = [(*block.span("code"), block["info"].strip()) for block in _BLOCK.finditer(text)]
    for start, end, info in blocks:
        if _PYTHON_INFO.match(info):
            lines = [trimmed(text, *line.span()) for line in _LINE.finditer(text, start, end)]
            return _parsed_units(text[start:end], start) or (lines, [])
    for start, end, info in blocks or [(0, len(text), "")]:
        units = None if info else _parsed_units(text[start:end], start)
        if units and any(units):
            return units
    return [], []


def _parsed_units(code: str, place: int) -> Units | None:
    """Find the units of a program at that place in a text; `None` if it does not parse."""
    # The parser's line ends, with each character where it was.
    code = code.replace("\\\r\n", " \\\n").replace("\r\n", " \n").replace("\r", "\n")
    first = _FIRST_INDENT.search(code)
    wrapper = _WRAPPER if first and first.group().rpartition("\f")[2] else ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape in a sampled string is not the user's doing
            body = ast.parse(wrapper + code).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    if wrapper and isinstance(body[0], ast.If):
        if body[0].orelse:
            return None
        body = body[0].body + body[1:]
    return _units(wrapper + code, body, place - len(wrapper))


def _units(code: str, body: list[ast.stmt], place: int) -> Units:
    rows = [0, *itertools.accumulate(len(line.encode()) + 1 for line in code.split("\n"))]
    characters = [i for i, character in enumerate(code) for _ in character.encode()]  # by byte, as the parser counts
    characters.append(len(code))

    def span(node: Any) -> Interval:
        start = characters[rows[node.lineno - 1] + node.col_offset]
        if decorators := getattr(node, "decorator_list", None):
            start = code.rindex("@", 0, span(decorators[0])[0])
        return start, characters[rows[node.end_lineno - 1] + node.end_col_offset]

    statements: list[Interval] = []
    docstrings: list[Interval] = []
    waiting = body[:]
    while waiting:
        node = waiting.pop()
        blocks = _blocks(node)
        start, end = span(node)
        if not blocks:
            is_text = isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
            (docstrings if is_text else statements).append((start, end))
        for header, inner in blocks:
            # The tree has an `elif` as an `if` in the `else`; its header is its own.
            if not (inner and isinstance(inner[0], ast.If) and code.startswith("elif", span(inner[0])[0])):
                end = code.index(":", max([span(part)[1] for part in header], default=start)) + 1
                statements.append((start, end))
            waiting += inner
            end = span(inner[-1])[1] if inner else end
            start = _BETWEEN.match(code, end).end()  # type: ignore[union-attr]
    docstrings = [unit for unit in docstrings if LETTER_OR_DIGIT.search(code, *unit)]
    moved = [[(start + place, end + place) for start, end in sorted(rank)] for rank in (statements, docstrings)]
    return moved[0], moved[1]


def _blocks(node: ast.stmt) -> list[tuple[list[ast.AST], list[ast.stmt]]]:
    """List the blocks of a compound statement: the expressions in a header, and the statements below it."""
    blocks = []
    for owner in (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        parts = [part for part in ast.iter_child_nodes(owner) if not isinstance(part, _BODY_PARTS)]
        placed = [[part] if hasattr(part, "lineno") else list(ast.iter_child_nodes(part)) for part in parts]
        blocks.append((list(itertools.chain.from_iterable(placed)), getattr(owner, "body", [])))
    ends: list[Any] = [([], body) for body in (getattr(node, "orelse", ()), getattr(node, "finalbody", ())) if body]
    return [*blocks, *ends] if hasattr(node, "body") or hasattr(node, "cases") else []
