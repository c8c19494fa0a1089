"""What a written solution holds, as character intervals: arithmetic, formulas in LaTeX, and sentences.

Works on text alone. `answer_text.py` finds the final answer, `spans.py` turns intervals into tokens.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

Interval = tuple[int, int]
"""Half-open characters of a text."""


# --- Numbers and arithmetic, as models write them -----------------------------------------------------------
# Every repetition is bounded or cannot overlap itself, so that matching is linear in whatever a model emits.

BLANK = r"[^\S\n]"
GROUP = r"\{(?:[^{}\n]|\{[^{}\n]{0,60}\}){1,60}\}"
DIGITS = (
    r"(?:\d{1,2}(?:,\d\d){1,4},\d{3}(?!\d)"  # 12,34,567
    r"|\d{1,3}(?:[ \u00a0\u202f]\d{3}){1,4}(?![\d,])"  # 12 345
    r"|\d+(?:(?:,|\{,\}|\\,)\d{3}(?!\d)){0,9}(?:\.\d+)?|\.\d+)"
)
FRACTION = rf"\\[dtc]?frac\s?{GROUP}\s?{GROUP}"
MINUS = r"\-−–－"  # for use inside [...]
CURRENCY = r"(?:\\?\$|[€£¥₹])"
ANNOTATION = r"<<[^<>\n]{0,200}>>"
EQUALS = r"(?:&?[=＝]=?(?!>)&?|[≈≅≤≥]|\\(?:approx|leq?|geq?)(?![a-zA-Z]))"

_BEFORE_NUMBER = r"(?=\s{1,4}[\d$(\\.])"
_WORD_OPERATOR = rf"(?:plus|minus|times|mod|divided|multiplied|equals|is equal|of(?: the)?{_BEFORE_NUMBER})"
_WORD = r"(?:[^\W\d_]{2,}(?:['’/-][^\W\d_]+){0,4}(?:-\d{1,4}(?![\d.,]))?|[aAI](?= [^\W\d_]{2}))"

# A call, a root or a binomial is one operand with all that it takes: no expression begins inside it. Arithmetic in
# brackets right after a word, "eggs(16-3=13)", is no call.
_IN_PARENTHESES = r"\((?:[^()\n]|\([^()\n]{0,60}\)){1,60}\)"
_CALL = (
    rf"(?=\w{{1,13}}+\()(?<!\d)(?:[a-zA-Z](?=\((?:[^()\n]{{0,60}}\d|[a-zA-Z]\)))"
    r"|[^\W\d_]\w{1,12}(?=\([^()\n]{0,60}\d)(?!\([^()\n,=]{0,60}[+*/×÷-][^()\n,=]{0,60}=))"
    rf"{_IN_PARENTHESES}"
)
_LATEX_CALL = (
    rf"\\(?:sqrt\s?(?:\[[^\]\n]{{1,6}}\])?\s?(?:{GROUP}|\d)|[dt]?binom\s?{GROUP}\s?{GROUP}"
    rf"|(?:log|ln|lg|exp|sin|cos|tan|max|min|gcd|lcm)(?![a-zA-Z])(?:[_^](?:\w|{GROUP})){{0,2}}"
    rf"\s?(?:{GROUP}|{_IN_PARENTHESES}|{DIGITS}))"
)
# Dates, telephone numbers, addresses, lengths in a style sheet: digits that no one calculates with, unless an equals
# sign follows.
_DAY, _MONTH, _YEAR = r"(?:0?[1-9]|[12]\d|3[01])", r"(?:0?[1-9]|1[0-2])", r"(?:1[5-9]|20)\d\d"
_LABEL = (
    r"(?=\d{1,4}+(?:[/.-]|[ ]\d{3}-|px|rem|v[hw]))"
    rf"(?:(?:{_DAY}/{_DAY}/(?:\d{{4}}|\d\d)|{_YEAR}-{_MONTH}-{_DAY}|{_YEAR}/{_MONTH}/{_DAY}|{_DAY}-{_DAY}-{_YEAR}"
    r"|(?:\d{1,3}[- ])?\d{3}-\d{3}-\d{4}|\d{3}-\d\d-\d{4}|\d+(?:\.\d+){2,8})(?![\w/-]|\s?[=＝])"
    r"|\d+(?:\.\d+)?(?:px|rem|vh|vw)\b)"
)
_CLOCK = r"\d{1,2}:\d\d(?::\d\d)?(?:\s?[apAP]\.?[mM]\b\.?)?(?![\d:])"

# One letter per kind of lexeme, so that an expression is a short regular expression over a string of kinds. They are
# grouped by first character, tried in order: most of a text is words and numbers, and this decides the speed.
_LEXEMES = {
    r"(?=[^\W\d_])": [
        ("O", rf"(?:plus|minus|times|mod|divided by|multiplied by){_BEFORE_NUMBER}"),
        ("o", rf"of(?: the)?{_BEFORE_NUMBER}"),
        ("E", rf"(?:equals|is equal to){_BEFORE_NUMBER}"),
        ("B", r"(?:https?://|www\.)\S{1,2000}"),
        ("N", _CALL),
        ("W", rf"{_WORD}(?: (?!{_WORD_OPERATOR}){_WORD}(?![\w(])){{0,5}}"),
        ("O", r"(?<=[\d\s)}%$])[xX](?=\s?[\d$(\\.])"),
        ("v", r"(?<=\d)[a-zA-Z](?![\w'’])"),  # a variable's coefficient stands before it
        ("V", r"[a-zA-Z](?:_\{?\w{1,3}\}?)?(?![\w'’])"),
    ],
    r"(?=[\d.\\])": [
        ("B", _LABEL),
        ("H", _CLOCK),
        ("N", rf"{DIGITS}|{FRACTION}|{_LATEX_CALL}"),
    ],
    "": [
        ("A", ANNOTATION),
        ("E", EQUALS),
        ("S", r"\*\*"),  # emphasis or a power
        ("O", r"[+*×·⋅∙÷^✕✖＋]|/(?=\s)|(?<=\s)%(?=\s\d)|\\(?:times|cdot|div|pm|bmod)(?![a-zA-Z])"),
        ("M", rf"[{MINUS}](?=\s)"),
        ("m", rf"[{MINUS}]"),  # a tight minus: a sign, a difference or a range
        ("W", r"(?<=[\w)])/[^\W\d_]+"),
        ("d", r"/"),
        ("U", CURRENCY),
        ("N", rf"√\s?(?:{DIGITS}|\([^()\n]{{1,60}}\))"),
        ("I", r"(?:(?<=[\d)}])|(?<=\d[a-z]))(?:\\left\s?)?\("),  # a factor: 2(3 + 4)
        ("P", r"[(\[{~]|\\[(\[{]|\\left\s?[(\[]|(?<![\w|])\|(?=[\d(.-])"),
        ("C", r"[)\]}%°¢²³]|\\[)\]}%]|\\right\s?[)\]]|(?<=[\d)])(?:\||!(?=\s?[=+*/×)-]))"),
        ("T", rf"\\(?:text|mathrm|mbox)\s?{GROUP}"),
        ("L", r"\n"),
        ("B", r"\S"),
    ],
}
# No lexeme ends in a blank, so none begins behind one: without that the blanks at the end of a text would be read anew
# from each of them.
_LEXEME = re.compile(
    rf"(?<!{BLANK}){BLANK}*+(?:%s)"
    % "|".join(f"{guard}(?:{'|'.join(f'({pattern})' for _, pattern in group)})" for guard, group in _LEXEMES.items())
)
_KINDS = ["", *(kind for group in _LEXEMES.values() for kind, _ in group)]

# Words belong to an operand only if an operator follows: "16 eggs - 3 eggs = 13", but not "13 eggs left".
_OPERAND = r"[PIUSm]{0,8}(?:A[Um]{0,2}[NH]|[NAVH])v?[CUS]{0,8}(?:(?:WT?|T)(?=L?[OMmdoE]))?"
_MEMBERS = rf"(?:(?:[OMmdoSI]|L?E){_OPERAND})+E?"
_EXPRESSION = re.compile(rf"{_OPERAND}{_MEMBERS}|A(?:[Um]{{0,2}}[NH])?")
_MEMBERS_AFTER_BRACKET = re.compile(rf"[CUS]{{0,8}}(?:(?:WT?|T)(?=L?[OMmdoE]))?{_MEMBERS}")
_DIGIT = re.compile(r"\d")
_CLEARLY_ARITHMETIC = re.compile("[EAOM]|(?:[md].*){2}")
_NAME_BEFORE = re.compile(r"\\?[^\W\d_]\w{0,20}\Z")

_FROM_TO = re.compile(r"[PUS]{0,8}(N)[CUS]{0,8}(?:WT?|T)?M[PUS]{0,8}(N)[CUS]{0,8}")
_FROM_TO_CLOCK = re.compile(r"[PUS]{0,8}H[CUS]{0,8}(?:WT?|T)?[Mm][PUS]{0,8}[HN][CUS]{0,8}")
_NUMBERED_THING = re.compile(
    r"\b(?i:chapters?|pages?|pp?\.|sections?|rooms?|steps?|parts?|questions?|problems?|days?|weeks?|figures?|tables?"
    r"|lessons?|units?|grades?|levels?|no\.|number|version|route|highway|ages?|aged)\s?\Z"
)
_SIZE_OF = re.compile(
    r"[s-]?\s?(?i:lumber|boards?|planks?|studs?|beams?|photos?|prints?|pictures?|frames?|canvas|grids?|matrix|matrices"
    r"|tiles?|cards?|rugs?|inch(?:es)?|in\.)\b"
)


def _arithmetic_intervals(text: str) -> list[Interval]:
    """Expressions in order, as `ranked_math_intervals` describes them."""
    lexemes = list(_LEXEME.finditer(text))
    kinds = "".join([_KINDS[lexeme.lastindex or 0] for lexeme in lexemes])
    intervals: list[Interval] = []
    for expression in _EXPRESSION.finditer(kinds):
        if not _CLEARLY_ARITHMETIC.search(expression.group()):
            continue
        whole = _whole_expression(text, lexemes, kinds, *expression.span())
        if whole is None or not _DIGIT.search(text, *whole) or _is_range_or_size(text, lexemes, expression):
            continue
        if intervals and whole[0] < intervals[-1][1]:
            last = intervals.pop()
            whole = min(last[0], whole[0]), max(last[1], whole[1])
        intervals.append(whole)
    return intervals


_BRACKET_KIND = re.compile("[PIC]")
_REACH = 40
"""Lexemes within which the other half of a bracket is looked for."""


def _bracket(lexeme: re.Match[str]) -> int:
    """1 for an opening bracket, -1 for a closing one, else 0; asked of lexemes of the kinds P, I and C."""
    last = lexeme.group()[-1]
    return 1 if last in "([{" else -1 if last in ")]}" else 0


def _unpaired(lexemes: list[re.Match[str]], kinds: str, first: int, after: int) -> tuple[list[int], list[int]]:
    """Which lexemes of `[first, after)` are brackets that open, and that close, without their other half."""
    opened: list[int] = []
    closed: list[int] = []
    for i in (place.start() for place in _BRACKET_KIND.finditer(kinds, first, after)):
        match _bracket(lexemes[i]):
            case 1:
                opened.append(i)
            case -1 if opened:
                opened.pop()
            case -1:
                closed.append(i)
    return opened, closed


def _other_half(lexemes: list[re.Match[str]], kinds: str, places: range, count: int) -> int | None:
    """Walk over `places` until `count` brackets found their other half; -1 if the line ends first, else `None`."""
    for i in places:
        if kinds[i] == "L":
            return -1
        count += _bracket(lexemes[i]) * places.step if kinds[i] in "PIC" else 0
        if count == 0:
            return i
    return None if len(places) == _REACH else -1


def _whole_expression(text: str, lexemes: list[re.Match[str]], kinds: str, first: int, after: int) -> Interval | None:
    """Characters of the lexemes `[first, after)`, with no half of a bracket.

    Outer brackets without their other half are left out. Where a bracket inside lacks it, the expression reaches as far
    as that half, over words if need be; `None` where this is too far in the same line.
    """
    start, end = lexemes[first].start(lexemes[first].lastindex or 0), lexemes[after - 1].end()
    opened, closed = _unpaired(lexemes, kinds, first, after)
    if not opened and not closed:
        return start, end
    while opened and opened[0] == first:
        first = opened.pop(0) + 1
    while closed and closed[-1] == after - 1:
        after = closed.pop()
    if closed:
        found = _other_half(lexemes, kinds, range(first - 1, max(-1, first - 1 - _REACH), -1), len(closed))
        if found is None:
            return None
        first = first if found < 0 else found
    if opened:
        found = _other_half(lexemes, kinds, range(after, min(len(lexemes), after + _REACH)), len(opened))
        if found is None:
            return None
        if found >= 0:
            after = found + 1
            more = _MEMBERS_AFTER_BRACKET.match(kinds, after)
            after = more.end() if more and not any(_unpaired(lexemes, kinds, after, more.end())) else after
    start, end = lexemes[first].start(lexemes[first].lastindex or 0), lexemes[after - 1].end()
    name = _NAME_BEFORE.search(text, max(0, start - 24), start) if closed else None
    return (name.start() if name else start), end


def _is_range_or_size(text: str, lexemes: list[re.Match[str]], expression: re.Match[str]) -> bool:
    """Whether `3 - 4 people`, `Chapter 3 - 2`, `5:30 - 6:45` or `2 x 4 boards` only looks like a calculation."""
    kinds, (first, after) = expression.group(), expression.span()
    if "E" in kinds or "A" in kinds or (first and _KINDS[lexemes[first - 1].lastindex or 0] == "E"):
        return False
    if _FROM_TO_CLOCK.fullmatch(kinds):
        return True
    if pair := _FROM_TO.fullmatch(kinds):
        low, high = (lexemes[first + pair.start(group)].group().strip().replace(",", "") for group in (1, 2))
        start = lexemes[first].start(lexemes[first].lastindex or 0)
        if _NUMBERED_THING.search(text, max(0, start - 16), start):
            return True
        return all(number.replace(".", "", 1).isdecimal() for number in (low, high)) and float(low) < float(high)
    signs = {lexeme.group().strip() for lexeme, kind in zip(lexemes[first:after], kinds, strict=True) if kind == "O"}
    return signs <= {"x", "X"} and bool(signs) and bool(_SIZE_OF.match(text, lexemes[after - 1].end()))


# --- What may be masked, most wanted first ----------------------------------------------------------------------

LETTER_OR_DIGIT = re.compile(r"[^\W_]")
SENTENCE_END = re.compile(r"\n|[.!?…]{1,6}[\"'”’)\]*_]{0,4}(?=\s|\Z)|[。！？][”’」』）]{0,4}")
_NO_SENTENCE_END = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|St|Jr|Sr|vs|approx|e\.g|i\.e)|(?:^|\n|[.!?]\s)\s?\d{1,3})\Z")


def sentence_intervals(text: str) -> list[Interval]:
    """Sentences and lines in order of position, without outer blanks; those without letter or digit are left out.

    A sentence ends at a line break, at `. ! ?` before a blank, or at their CJK forms; not after a title
    ("Mr."), nor after the number of a list item.
    """
    ends = [
        end.end()
        for end in SENTENCE_END.finditer(text)
        if end.group() != "." or not _NO_SENTENCE_END.search(text, max(0, end.start() - 8), end.start())
    ]
    intervals = []
    for start, end in zip([0, *ends], [*ends, len(text)], strict=True):
        sentence = text[start:end]
        if LETTER_OR_DIGIT.search(sentence):
            intervals.append((start + len(sentence) - len(sentence.lstrip()), start + len(sentence.rstrip())))
    return intervals


def ranked_math_intervals(text: str) -> tuple[list[Interval], list[Interval]]:
    r"""Arithmetic expressions, and the sentences that overlap none of them, each in order of position.

    An expression is a chain of operands joined by operators and equals signs, as in `$9 * 2 = $<<9*2=18>>18`,
    `\frac{1}{6} \times 36 = 6` or `16 eggs - 3 eggs = 13`. It is taken whole, with the calls, roots and brackets that
    it begins or ends in. A lone fraction (`1/2`), a range (`3-4`, `pages 10 - 20`), a date, a telephone number, the
    size of a board (`2 x 4`) and anything without a digit are not expressions, unless an equals sign follows.
    """
    arithmetic = _arithmetic_intervals(text)
    return arithmetic, list(_clear_of(sentence_intervals(text), arithmetic, len(text)))


def _clear_of(intervals: Iterable[Interval], taken: list[Interval], length: int) -> Iterator[Interval]:
    """Those of the intervals that overlap none of `taken`; both disjoint and in order, in a text of that length."""
    following = iter([*taken, (length, length)])
    start, end = next(following)
    for interval in intervals:
        while end <= interval[0] and end < length:
            start, end = next(following)
        if start >= interval[1] or end <= interval[0]:
            yield interval


def math_intervals(text: str) -> list[Interval]:
    """The detector "math": the expressions of `arithmetic_intervals` in order of position, then other sentences."""
    arithmetic, sentences = ranked_math_intervals(text)
    return arithmetic + sentences


# --- Formulas in LaTeX ------------------------------------------------------------------------------------------

_MARK = re.compile(
    r"\\begin\{(?P<begin>[a-zA-Z]{1,20}\*?)\}(?:\{\d{0,3}\}|\[[tcb]\])?|\\end\{(?P<end>[a-zA-Z]{1,20}\*?)\}"
    r"|(?P<row>\\\\(?:\*|[ ]?\[-?[\d.]{1,8}[ ]?[a-z]{2}\])?)|\\[\s\S]|\$\$?|(?P<paragraph>\n[ \t\r]*\n)|\[asy\]"
)
_DISPLAYS = frozenset(
    name + star
    for name in ("align", "alignat", "equation", "gather", "multline", "eqnarray", "flalign", "displaymath")
    for star in ("", "*")
)
_BY_ROWS = _DISPLAYS | {"aligned", "alignedat", "gathered", "split"}
"""Environments whose rows are formulas; those of a matrix or of `cases` are not."""

_TEXT_COMMAND = re.compile(rf"\\(?:text|mathrm|mbox|textbf|textit|operatorname)\s?{GROUP}")
_EQUATION = re.compile(r"[=＝≈≅≡]|\\(?:approx|equiv|cong|doteq)(?![a-zA-Z])")
_OPERATION = re.compile(
    r"[+*<>＋×·⋅∙÷±≤≥≠∈]|(?<=[\w)}\]!|])\s*[-−–－]"
    r"|\\(?:times|cdot|div|pm|mp|[bp]?mod|l(?:e|eq|t|l)|g(?:e|eq|t|g)|neq?|leqslant|geqslant|in|mid|nmid|sim|propto"
    r"|sum|prod|int|oint|cup|cap|subset(?:eq)?|oplus|otimes|implies|iff|Rightarrow)(?![a-zA-Z])"
    r"|(?<![\^{])\\circ(?![a-zA-Z])"  # a degree is none
)
_PROSE = re.compile(
    r"(?<![\\a-zA-Z])(?!(?:mod|sin|cos|tan|log|max|min|gcd|lcm|exp)\b)(?:[a-z]{3,}|and|or|to|of|is|in|at|by|an)(?![a-zA-Z])"
)
_COMMAND = re.compile(r"\\[a-zA-Z]|[\^_]")
_AMOUNT = re.compile(r"\d|\.\d|\s?<<")
_ANNOTATED = re.compile("<<|>>")
_OPEN_END = re.compile(r"[+\-*/−–－]\s*\Z|=\s+\Z")
_ENVIRONMENT_ALONE = re.compile(
    r"(?:\\(?:begin|end)\{[^{}\n]{1,30}\}(?:\[[^\[\]\n]{0,30}\]|\{[^{}\n]{0,30}\}){0,2}\s*)+"
)


def ranked_latex_intervals(text: str) -> tuple[list[Interval], list[Interval], list[Interval]]:
    r"""The detector "latex": equations, other formulas, and the sentences that overlap none, each in order of position.

    Equations are displayed formulas (`\[ \]`, `$$ $$`, `equation`, `align`, `gather` and their like, split at the `\\`
    of their rows, but not at those of a matrix) and formulas in the line (`$ $`, `\( \)`) that hold an equals sign or
    one of its like (`\approx`, `\equiv`). Other formulas are those in the line that hold another operator or relation;
    a lone name, number, power or fraction is none. Delimiters and outer blanks stay out. A display that nothing closes
    reaches to the end of its paragraph, a formula in the line that nothing closes counts only where the text ends in
    it. A dollar that marks a price opens no formula; drawings (`[asy]`) are left alone.
    """
    equations: list[Interval] = []
    others: list[Interval] = []
    regions = []
    for formula in _formulas(text):
        rows = [row for row in (_trimmed(text, *row) for row in formula.rows) if LETTER_OR_DIGIT.search(text, *row)]
        if not formula.displayed:
            bare = _TEXT_COMMAND.sub(" ", text[slice(*formula.rows[0])])
            is_equation = bool(_EQUATION.search(bare))
            if not rows or not (is_equation or _OPERATION.search(bare)):
                continue
        (equations if formula.displayed or is_equation else others).extend(rows)
        regions.append(formula.whole)
    sentences = [
        sentence
        for sentence in _clear_of(sentence_intervals(text), regions, len(text))
        if not _ENVIRONMENT_ALONE.fullmatch(text, *sentence)
    ]
    return equations, others, sentences


class _Formula(NamedTuple):
    whole: Interval  # with its delimiters
    rows: list[Interval]
    displayed: bool


def _formulas(text: str) -> Iterator[_Formula]:
    """Formulas in order of position; a drawing is a display without rows."""
    marks = list(_MARK.finditer(text))
    i = 0
    while i < len(marks):
        first, mark, found = i, marks[i], None
        match mark.group():
            case "$$":
                i, found = _display(text, marks, i, "$$")
                if _is_doubled_price(text[slice(*found.whole)]):
                    i, found = first + 1, None
            case r"\[":
                i, found = _display(text, marks, i, r"\]")
            case "[asy]":
                end = text.find("[/asy]", mark.end())
                end = len(text) if end < 0 else end
                found = _Formula((mark.start(), end), [], True)
                while i < len(marks) and marks[i].start() < end:
                    i += 1
            case "$" | r"\(":
                i, found = _in_line(text, marks, i)
            case _ if mark["begin"] in _DISPLAYS | _BY_ROWS:
                i, found = _display(text, marks, i, "")
            case _:
                i += 1
        if found:
            yield found


def _display(text: str, marks: list[re.Match[str]], first: int, closer: str) -> tuple[int, _Formula]:
    """The display that opens at a mark, and the mark after it; without a closer it is the environment that ends it."""
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
    """The formula in the line that opens at a mark, and the mark after it; `None` if there is none."""
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
    """Whether what stands between two dollars, or after the last, is a formula rather than the text between prices."""
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


def _trimmed(text: str, start: int, end: int) -> Interval:
    content = text[start:end]
    return start + len(content) - len(content.lstrip()), start + len(content.rstrip())
