"""Find the statements and comments of a Python program in a text. The parser is that of the running Python."""

import ast
import bisect
import io
import itertools
import re
import tokenize
import warnings
from collections.abc import Iterator
from typing import NamedTuple

from .patterns import LETTER_OR_DIGIT, Interval

_FENCE = re.compile(r"^[ \t]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`\n]*)$", re.MULTILINE)
_PYTHON_INFO = re.compile(r"\{?\s*\.?(?:python|py)(?:3(?:\.\d+)?)?(?![\w.+-])", re.IGNORECASE)
_LINE = re.compile(r"[^\r\n]+")
_FIRST_INDENT = re.compile(r"^[ \t\f]*(?=[^\s#])", re.MULTILINE)
_TRIPLE_QUOTE = re.compile(r"'''|\"\"\"")
_DOCSTRING_LINE = re.compile(r"[rRuU]?(?:'''|\"\"\")")
_WRAPPER = "if 1:\n"
"""Put before a program that is indented as a whole, a function's body or a block within a list, so that it parses."""

_LAYOUT = frozenset((tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER))
_UNREADABLE = (SyntaxError, ValueError, MemoryError, RecursionError, tokenize.TokenError)


def ranked_python_intervals(text: str) -> tuple[list[Interval], list[Interval]]:
    """Find the statements of a program, and its comments and docstrings, each in order of position.

    The program is the text's first block fenced as Python; without one, the first fenced block that names no language
    and parses; without any fence, the whole text if it parses. Nothing outside it is a unit.

    A simple statement is a unit, over all its lines; so is the header of a compound statement, up to its colon and
    with its decorators (`for x in y:`, `else:`, `case 1:`), and each statement of its body. Comments inside a
    statement's brackets belong to it; a bare string is a docstring. A program that does not parse, cut off or wrong,
    is taken by lines instead. Comments and docstrings without letter or digit are left out.
    """
    block = _program(text)
    if block is None:
        return [], []
    start, end, units = block
    if units is None:
        units = _line_units(text[start:end])
    statements, remarks = units
    return [(start + a, start + b) for a, b in statements], [(start + a, start + b) for a, b in remarks]


class _Units(NamedTuple):
    statements: list[Interval]
    remarks: list[Interval]


# --- Where the program is ---------------------------------------------------------------------------------------


def _program(text: str) -> tuple[int, int, _Units | None] | None:
    """Find the characters of the program, and its units if it parses; `None` if the text holds no program."""
    blocks = list(_fenced_blocks(text))
    for start, end, info in blocks:
        if _PYTHON_INFO.match(info):
            return start, end, _parsed_units(text[start:end])
    for start, end, info in blocks or [(0, len(text), "")]:
        if not info and (units := _parsed_units(text[start:end])) and any(units):
            return start, end, units
    return None


def _fenced_blocks(text: str) -> Iterator[tuple[int, int, str]]:
    """List contents and first line's words of Markdown's fenced blocks; one that is not closed reaches to the end."""
    opening = None
    for line in _FENCE.finditer(text):
        info = line["info"].strip()
        if opening is None:
            opening = line["fence"], min(line.end() + 1, len(text)), info
        elif not info and line["fence"].startswith(opening[0]):
            yield opening[1], max(line.start(), opening[1]), opening[2]
            opening = None
    if opening is not None:
        yield opening[1], len(text), opening[2]


# --- A program that parses --------------------------------------------------------------------------------------


def _parsed_units(code: str) -> _Units | None:
    """Find the units of a program by its syntax tree and its tokens; `None` if it does not parse."""
    code = _with_plain_line_ends(code)
    first = _FIRST_INDENT.search(code)
    wrapper = _WRAPPER if first and first.group().rpartition("\f")[2] else ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape in a sampled string is not the user's doing
            body = ast.parse(wrapper + code).body
        if wrapper and isinstance(body[0], ast.If):
            if body[0].orelse:
                return None
            body = body[0].body + body[1:]
        statements, remarks = _units(_Source(wrapper + code), body)
    except _UNREADABLE:
        return None
    shift = len(wrapper)
    return _Units([(a - shift, b - shift) for a, b in statements], [(a - shift, b - shift) for a, b in remarks])


def _with_plain_line_ends(code: str) -> str:
    r"""Replace `\r\n` and `\r` by `\n`, with each character where it was: a superfluous `\r` becomes a blank."""
    if "\r" not in code:
        return code
    return code.replace("\\\r\n", " \\\n").replace("\r\n", " \n").replace("\r", "\n")


class _Source:
    """Map from the parser's lines and columns to a program's characters, with its comments and colons."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.comments: list[Interval] = []
        self._lines = code.split("\n")
        self._starts = list(itertools.accumulate([len(line) + 1 for line in self._lines], initial=0))
        self._bytes: dict[int, list[int]] = {}  # by line that is not ASCII: the bytes at which its characters start
        self._colon_ends: list[int] = []
        self._logical_lines: list[int] = []  # where they start
        fresh = True
        for kind, string, (row, column), _, _ in tokenize.generate_tokens(io.StringIO(code).readline):
            place = self._starts[row - 1] + column
            if kind == tokenize.COMMENT:
                self.comments.append((place, place + len(string)))
            elif kind == tokenize.NEWLINE:
                fresh = True
            elif fresh and kind not in _LAYOUT:
                self._logical_lines.append(place)
                fresh = False
            if string == ":" and kind == tokenize.OP:
                self._colon_ends.append(place + 1)

    def character(self, line: int, byte: int) -> int:
        """Return the character at a column that counts bytes of UTF-8, as the parser's columns do."""
        text = self._lines[line - 1]
        if text.isascii():
            return self._starts[line - 1] + byte
        if line not in self._bytes:
            self._bytes[line] = [i for i, value in enumerate(text.encode()) if value & 0xC0 != 0x80]
        return self._starts[line - 1] + bisect.bisect_left(self._bytes[line], byte)

    def logical_line(self, place: int) -> int:
        """Return the start of the logical line that holds a character."""
        return self._logical_lines[bisect.bisect_right(self._logical_lines, place) - 1]

    def start(self, node: ast.stmt) -> int:
        """Return the start of a statement, its decorators included."""
        decorators = getattr(node, "decorator_list", None)
        if not decorators:
            return self.character(node.lineno, node.col_offset)
        return self.logical_line(self.character(decorators[0].lineno, decorators[0].col_offset))

    def end(self, node: ast.stmt) -> int:
        """Return the end of a statement."""
        return self.character(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def header(self, after: int) -> Interval:
        """Return the header before `after`: from its logical line's start to the last colon."""
        end = self._colon_ends[bisect.bisect_right(self._colon_ends, after) - 1]
        return self.logical_line(end - 1), end


def _units(source: _Source, body: list[ast.stmt]) -> _Units:
    statements: list[Interval] = []
    docstrings: list[Interval] = []
    waiting = body[:]
    while waiting:
        node = waiting.pop()
        headers, inner = _opened(source, node)
        statements += headers
        waiting += inner
        if not headers:
            interval = source.start(node), source.end(node)
            value = node.value if isinstance(node, ast.Expr) else None
            is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
            (docstrings if is_text else statements).append(interval)
    statements.sort()
    holders = sorted(statements + docstrings)
    starts = [start for start, _ in holders]
    remarks = docstrings
    for comment in source.comments:
        before = bisect.bisect_right(starts, comment[0]) - 1
        if before < 0 or holders[before][1] <= comment[0]:
            remarks.append(comment)
    return _Units(statements, sorted(remark for remark in remarks if LETTER_OR_DIGIT.search(source.code, *remark)))


def _opened(source: _Source, node: ast.stmt) -> tuple[list[Interval], list[ast.stmt]]:
    """List headers and inner statements of a compound statement; none for a simple one."""
    first: list[ast.stmt] = getattr(node, "body", [])
    bodies = [getattr(node, "orelse", []), getattr(node, "finalbody", [])]
    bodies += [part.body for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ()))]
    headers: list[Interval] = []
    if isinstance(node, ast.Match):
        pattern = node.cases[0].pattern
        headers = [source.header(source.logical_line(source.character(pattern.lineno, pattern.col_offset)))]
    elif first:
        headers = [(source.start(node), source.header(source.start(first[0]))[1])]
    for body in bodies:
        if not body:
            continue
        start = source.start(body[0])
        # The tree has an `elif` as an `if` in the `else`; its header is its own.
        if not (isinstance(body[0], ast.If) and source.code.startswith("elif", start)):
            headers.append(source.header(start))
    return headers, [*first, *itertools.chain.from_iterable(bodies)]


# --- A program that does not parse -------------------------------------------------------------------------------


def _line_units(code: str) -> _Units:
    """List lines without outer blanks; those in a comment or docstring are remarks."""
    units = _Units([], [])
    quote, in_docstring = "", False
    for line in _LINE.finditer(code):
        content = line.group().strip()
        is_comment = not quote and content.startswith("#")
        if not quote:
            in_docstring = bool(_DOCSTRING_LINE.match(content))
        is_remark = is_comment or in_docstring
        if not is_comment:
            for found in _TRIPLE_QUOTE.findall(content):
                quote = found if not quote else "" if found == quote else quote
        if LETTER_OR_DIGIT.search(content):
            start = line.start() + len(line.group()) - len(line.group().lstrip())
            (units.remarks if is_remark else units.statements).append((start, start + len(content)))
    return units
