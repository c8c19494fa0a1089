"""Find formulas in LaTeX."""

import re
from collections.abc import Iterator

from .patterns import GROUP, LETTER_OR_DIGIT, Interval, sentences_outside, trimmed

_MARK = re.compile(
    r"\\begin\{(?P<begin>[a-zA-Z]{1,20}\*?)\}(?:\{\d{0,3}\}|\[[tcb]\])?|\\end\{(?P<end>[a-zA-Z]{1,20}\*?)\}"
    r"|(?P<row>\\\\(?:\*|[ ]?\[-?[\d.]{1,8}[ ]?[a-z]{2}\])?)|\\[\s\S]|\$\$?|(?P<paragraph>\n[ \t\r]*\n)"
)
_DISPLAYS = ("align", "alignat", "equation", "gather", "multline", "eqnarray", "flalign", "displaymath")
# Environments whose rows are formulas; those of a matrix or of `cases` are not.
_BY_ROWS = {*_DISPLAYS, *(f"{name}*" for name in _DISPLAYS), "aligned", "alignedat", "gathered", "split"}

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
    equations, others, regions = list[Interval](), list[Interval](), list[Interval]()
    for whole, inner, displayed in _formulas(text):
        rows = [row for row in (trimmed(text, *row) for row in inner) if LETTER_OR_DIGIT.search(text, *row)]
        bare = "=" if displayed else _TEXT_COMMAND.sub(" ", text[slice(*inner[0])])
        is_equation = bool(_EQUATION.search(bare))
        if displayed or (rows and (is_equation or _OPERATION.search(bare))):
            (equations if is_equation else others).extend(rows)
            regions.append(whole)
    return equations, others, sentences_outside(text, regions)


_Formula = tuple[Interval, list[Interval], bool]  # with its delimiters, its rows without, whether it is displayed


def _formulas(text: str) -> Iterator[_Formula]:
    marks = list(_MARK.finditer(text))
    i = 0
    while i < len(marks):
        sign, after, formula = marks[i].group(), i + 1, None
        if sign in ("$$", r"\[") or marks[i]["begin"] in _BY_ROWS:
            after, formula = _display(text, marks, i, {"$$": "$$", r"\[": r"\]"}.get(sign, ""))
            display = text[slice(*formula[0])]
            is_closed = sign != "$$" or (len(display) > 3 and display.endswith("$$"))
            is_formula = is_closed or _EQUATION.search(display) or _OPERATION.search(display)
            if not is_formula or (sign == "$$" and _ANNOTATED.search(display)):  # but a price
                after, formula = i + 1, None
        elif sign in ("$", r"\("):
            after, formula = _in_line(text, marks, i)
        i = after
        if formula:
            yield formula


def _display(text: str, marks: list[re.Match[str]], first: int, closer: str) -> tuple[int, _Formula]:
    """Find the display that opens at a mark, and the mark after it; without a closer its environment's end does."""
    name = marks[first]["begin"]
    nested: list[str] = []
    rows: list[Interval] = []
    start = marks[first].end()
    for i, mark in enumerate(marks[first + 1 :], first + 1):
        if mark.group() == closer or (not closer and not nested and mark["end"] == name):
            return i + 1, ((marks[first].start(), mark.end()), [*rows, (start, mark.start())], True)
        if mark["paragraph"] and (rows or text[start : mark.start()].strip()):
            return i + 1, ((marks[first].start(), mark.start()), [*rows, (start, mark.start())], True)
        inside = mark["begin"] or mark["end"] or (nested or [name])[-1]
        if mark["begin"]:
            nested.append(inside)
        elif mark["end"] in nested[-1:]:
            nested.pop()
        if mark["paragraph"] or (
            (mark["begin"] or mark["end"] or mark["row"]) and (inside in _BY_ROWS or (mark["row"] and not nested))
        ):
            rows.append((start, mark.start()))
            start = mark.end()
    return len(marks), ((marks[first].start(), len(text)), [*rows, (start, len(text))], True)


def _in_line(text: str, marks: list[re.Match[str]], first: int) -> tuple[int, _Formula | None]:
    """Find the formula in the line that opens at a mark, and the mark after it; `None` if there is none."""
    opening = marks[first]
    closer = "$" if opening.group() == "$" else r"\)"
    after, end, whole = len(marks), len(text), len(text)
    for i, mark in enumerate(marks[first + 1 :], first + 1):
        if mark.group() == closer:
            after, end, whole = i + 1, mark.start(), mark.end()
            break
        if mark["paragraph"] or mark.group() in ("$$", "$", r"\[", r"\("):
            return first + 1, None
    if closer == "$" and not _is_formula(text[opening.end() : end], text[whole : whole + 3], whole > end):
        return first + 1, None
    return after, ((opening.start(), whole), [(opening.end(), end)], False)


def _is_formula(content: str, following: str, closed: bool) -> bool:
    """Tell whether the text between two dollars, or after the last, is a formula rather than text between prices."""
    has_prose = bool(_PROSE.search(content)) and not _COMMAND.search(content)
    if _ANNOTATED.search(content) or not closed:
        return not (has_prose or _ANNOTATED.search(content) or "\n" in content)
    is_even = content[:1].isspace() == content[-1:].isspace() and not _AMOUNT.match(following)
    return is_even and not (has_prose and not _EQUATION.search(content)) and not _OPEN_END.search(content)
