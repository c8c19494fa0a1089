"""Find formulas in LaTeX."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from .patterns import GROUP, LETTER_OR_DIGIT, Interval, clear_of, sentence_intervals, trimmed

_MARK = re.compile(
    r"\\begin\{(?P<begin>[a-zA-Z]{1,20}\*?)\}(?:\{\d{0,3}\}|\[[tcb]\])?|\\end\{(?P<end>[a-zA-Z]{1,20}\*?)\}"
    r"|(?P<row>\\\\(?:\*|[ ]?\[-?[\d.]{1,8}[ ]?[a-z]{2}\])?)|\\[\s\S]|\$\$?|(?P<paragraph>\n[ \t\r]*\n)"
)
_DISPLAYS = frozenset(
    name + star
    for name in ("align", "alignat", "equation", "gather", "multline", "eqnarray", "flalign", "displaymath")
    for star in ("", "*")
)
# Environments whose rows are formulas; those of a matrix or of `cases` are not.
_BY_ROWS = _DISPLAYS | {"aligned", "alignedat", "gathered", "split"}

_TEXT_COMMAND = re.compile(rf"\\(?:text|mathrm|mbox|textbf|textit|operatorname)\s?{GROUP}")
_EQUATION = re.compile(r"[=＝≈≅≡]|\\(?:approx|equiv|cong|doteq)(?![a-zA-Z])")
_OPERATION = re.compile(
    r"[+*<>＋×·⋅∙÷±≤≥≠∈]|(?<=[\w)}\]!|])\s*[-−–－]"
    r"|\\(?:times|cdot|div|pm|mp|[bp]?mod|l(?:e|eq|t|l)|g(?:e|eq|t|g)|neq?|leqslant|geqslant|in|mid|nmid|sim|propto"
    r"|sum|prod|int|oint|cup|cap|subset(?:eq)?|oplus|otimes|implies|iff|Rightarrow)(?![a-zA-Z])"
    r"|(?<![\^{])\\circ(?![a-zA-Z])"  # a degree is not an exponent
)
_PROSE = re.compile(
    r"(?<![\\a-zA-Z])(?!(?:mod|sin|cos|tan|log|max|min|gcd|lcm|exp)\b)(?:[a-z]{3,}|and|or|to|of|is|in|at|by|an)(?![a-zA-Z])"
)
_COMMAND = re.compile(r"\\[a-zA-Z]|[\^_]")
_AMOUNT = re.compile(r"\d|\.\d|\s?<<")
_ANNOTATED = re.compile("<<|>>")
_OPEN_END = re.compile(r"[+\-*/−–－]\s*\Z|=\s+\Z")


def ranked_latex_intervals(text: str) -> tuple[list[Interval], list[Interval], list[Interval]]:
    r"""Find equations, other formulas, and the sentences that overlap none, each in order of position.

    Equations are displayed formulas, split at the `\\` of their rows, and formulas in the line that hold an equals sign
    or one of its like (`\approx`, `\equiv`). Other formulas are those in the line that hold another operator or
    relation; a name, number, power or fraction by itself is not one. A display that nothing closes reaches to the end
    of its paragraph; a formula in the line that nothing closes counts only if the text ends in it.
    """
    equations: list[Interval] = []
    others: list[Interval] = []
    regions = []
    for formula in _formulas(text):
        rows = [row for row in (trimmed(text, *row) for row in formula.rows) if LETTER_OR_DIGIT.search(text, *row)]
        if not formula.displayed:
            bare = _TEXT_COMMAND.sub(" ", text[slice(*formula.rows[0])])
            is_equation = bool(_EQUATION.search(bare))
            if not rows or not (is_equation or _OPERATION.search(bare)):
                continue
        (equations if formula.displayed or is_equation else others).extend(rows)
        regions.append(formula.whole)
    sentences = list(clear_of(sentence_intervals(text), regions, len(text)))
    return equations, others, sentences


class _Formula(NamedTuple):
    whole: Interval  # with its delimiters
    rows: list[Interval]
    displayed: bool


def _formulas(text: str) -> Iterator[_Formula]:
    marks = list(_MARK.finditer(text))
    i = 0
    while i < len(marks):
        first, mark, formula = i, marks[i], None
        match mark.group():
            case "$$":
                i, formula = _display(text, marks, i, "$$")
                if _is_doubled_price(text[slice(*formula.whole)]):
                    i, formula = first + 1, None
            case r"\[":
                i, formula = _display(text, marks, i, r"\]")
            case "$" | r"\(":
                i, formula = _in_line(text, marks, i)
            case _ if mark["begin"] in _DISPLAYS | _BY_ROWS:
                i, formula = _display(text, marks, i, "")
            case _:
                i += 1
        if formula:
            yield formula


def _display(text: str, marks: list[re.Match[str]], first: int, closer: str) -> tuple[int, _Formula]:
    """Find the display that opens at a mark, and the mark after it; without a closer its environment's end does."""
    name = marks[first]["begin"]
    nested: list[str] = []
    rows: list[Interval] = []
    start, after, end = marks[first].end(), len(marks), len(text)
    for i in range(first + 1, len(marks)):
        mark = marks[i]
        if mark.group() == closer or (not closer and not nested and mark["end"] == name):
            rows.append((start, mark.start()))
            return i + 1, _Formula((marks[first].start(), mark.end()), rows, True)
        if mark["paragraph"] and (rows or text[start : mark.start()].strip()):
            after, end = i + 1, mark.start()
            break
        cuts = bool(mark["paragraph"])
        if mark["begin"]:
            nested.append(mark["begin"])
            cuts = mark["begin"] in _BY_ROWS
        elif mark["end"]:
            if mark["end"] in nested[-1:]:
                nested.pop()
            cuts = mark["end"] in _BY_ROWS
        elif mark["row"]:
            cuts = not nested or nested[-1] in _BY_ROWS
        if cuts:
            rows.append((start, mark.start()))
            start = mark.end()
    rows.append((start, end))
    return after, _Formula((marks[first].start(), end), rows, True)


def _in_line(text: str, marks: list[re.Match[str]], first: int) -> tuple[int, _Formula | None]:
    """Find the formula in the line that opens at a mark, and the mark after it; `None` if there is none."""
    opening = marks[first]
    closer = "$" if opening.group() == "$" else r"\)"
    after, end, whole = len(marks), len(text), len(text)
    for i in range(first + 1, len(marks)):
        mark = marks[i]
        if mark.group() == closer:
            after, end, whole = i + 1, mark.start(), mark.end()
            break
        if mark["paragraph"] or mark.group() in ("$$", "$", r"\[", r"\("):
            return first + 1, None
    if closer == "$" and not _is_formula(text[opening.end() : end], text[whole : whole + 3], whole > end):
        return first + 1, None
    return after, _Formula((opening.start(), whole), [(opening.end(), end)], False)


def _is_formula(content: str, following: str, closed: bool) -> bool:
    """Tell whether the text between two dollars, or after the last, is a formula rather than text between prices."""
    if closed and (content[:1].isspace() != content[-1:].isspace() or _AMOUNT.match(following)):
        return False
    if _ANNOTATED.search(content) or (not closed and "\n" in content):
        return False
    has_prose = _PROSE.search(content) and not _COMMAND.search(content)
    if not closed:
        return not has_prose
    return not (has_prose and not _EQUATION.search(content)) and not _OPEN_END.search(content)


def _is_doubled_price(display: str) -> bool:
    closed = len(display) > 3 and display.endswith("$$")
    return bool(_ANNOTATED.search(display)) or not (closed or _EQUATION.search(display) or _OPERATION.search(display))
