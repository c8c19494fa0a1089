"""Find arithmetic in a text.

The text becomes lexemes of one letter each (`_LEXEMES`), so that an expression is a short regular expression over a
string of kinds.
"""

import math
import re

from .patterns import (
    ANNOTATION,
    BLANK,
    CURRENCY,
    DIGITS,
    EQUALS,
    FRACTION,
    GROUP,
    MINUS,
    Interval,
    sentences_outside,
)

_BEFORE_NUMBER = r"(?=\s{1,4}[\d$(\\.])"
_WORD_OPERATOR = rf"(?:plus|minus|times|mod|divided|multiplied|equals|is equal|of(?: the)?{_BEFORE_NUMBER})"
_CJK = "[ぁ-ゖァ-ヺー㐀-鿿가-힣]"  # one character may be a word
_WORD = rf"(?:(?:[^\W\d_]{{2,}}|{_CJK})(?:['’/-][^\W\d_]+){{0,4}}(?:-\d{{1,4}}(?![\d.,]))?|[aAI](?= [^\W\d_]{{2}}))"
_DASHES = MINUS + "\u2010"  # a hyphen, too

# Grouped by first character, tried in order: most of a text is words and numbers, and this decides the speed.
_LEXEMES = {
    r"(?=[^\W\d_])": [
        ("O", rf"(?:plus|minus|times|mod|divided by|multiplied by){_BEFORE_NUMBER}"),
        ("o", rf"of(?: the)?{_BEFORE_NUMBER}"),
        ("E", rf"(?:equals|is equal to){_BEFORE_NUMBER}"),
        ("W", rf"{_WORD}(?: (?!{_WORD_OPERATOR}){_WORD}(?![\w(])){{0,5}}"),
        ("O", r"(?<=[\d\s)}%$])[xX](?=\s?[\d$(\\.¼-¾⅐-⅞])"),
        ("v", r"(?<=\d)[a-zA-Z](?![\w'’])"),  # a variable's coefficient stands before it
        ("V", r"[a-zA-Z](?:_\{?\w{1,3}\}?)?(?![\w'’])"),
        ("C", r"(?<=\d)[eE][+-]?\d{1,3}(?!\w)"),
    ],
    r"(?=[\d.\\])": [
        ("H", r"\d{1,2}:\d\d(?::\d\d)?(?:\s?[apAP]\.?[mM]\b\.?)?(?![\d:])"),
        ("N", rf"{DIGITS}|{FRACTION}|\\[cdt]?(?:frac|binom|sqrt)\s?(?:\[\w{{1,6}}\])?{GROUP}(?:\s?{GROUP})?"),
    ],
    "": [
        ("A", ANNOTATION),
        ("E", EQUALS),
        ("S", r"\*\*"),  # emphasis or a power
        ("O", r"[+*×·⋅∙÷^✕✖＋]|/(?=\s)|(?<=\s)%(?=\s\d)|\\(?:times|cdot|div|pm|bmod)(?![a-zA-Z])"),
        ("M", rf"[{_DASHES}](?=\s)"),
        ("m", rf"[{_DASHES}]"),  # a tight minus: a sign, a difference or a range
        ("W", r"(?<=[\w)])/[^\W\d_]+"),
        ("d", r"/"),
        ("U", CURRENCY),
        ("I", r"(?:(?<=[\d)}])|(?<=\d[a-z]))(?:\\left\s?)?[(（]"),  # a factor: 2(3 + 4)
        ("P", r"[(\[{~（]|\\[(\[{]|\\left\s?[(\[]|(?<![\w|])\|(?=[\d(.-])"),
        (
            "C",
            r"[)\]}%°¢²³）]|\\[)\]}%]|\\right\s?[)\]]|(?<=[\d)])(?:\||!(?=\s?[=+*/×)-]))|(?<=\d)[¼-¾⅐-⅞]"
            rf"|(?<=[a-z]{{2}})\.(?: \w{{1,4}}\.)?(?=\s?[+*×·÷=/{_DASHES}]\s?[\d$(<])",  # "5 sq. ft. = 5"
        ),
        (
            "N",
            rf"[¼-¾⅐-⅞]|√\s?(?:{DIGITS}|\([^()\n]{{1,60}}\))|(?:(?<=[=≈])|(?<=[=≈]\s))`{CURRENCY}?{DIGITS}`",
        ),
        ("T", rf"(?:\\[,;:!]\s?)?\\(?:text|mathrm|mbox)\s?{GROUP}"),
        ("L", r"\n"),
        ("B", r"\S"),
    ],
}
# No lexeme ends in a blank, so none begins behind one. Otherwise the blanks at the end of a text would be read again
# from each of them.
_LEXEME = re.compile(
    rf"(?<!{BLANK}){BLANK}*+(?:%s)"
    % "|".join(f"{guard}(?:{'|'.join(f'({pattern})' for _, pattern in group)})" for guard, group in _LEXEMES.items())
)
# Of a text of ASCII: the engine looks a class of characters up in a table, half the time of asking what each one is.
_ASCII_LEXEME = re.compile(_LEXEME.pattern.replace(r"[^\W\d_]", "[a-zA-Z]").replace(f"|{_CJK}", ""))
_KIND_OF_GROUP = ["", *(kind for group in _LEXEMES.values() for kind, _ in group)]

# Words belong to an operand only if an operator follows: "16 eggs - 3 eggs = 13", but not "13 eggs left".
_UNIT = r"(?:(?:WT?|T)[CS]{0,4}(?=L?[OMmdoE]))?"
_OPERAND = rf"[PIUSm]{{0,8}}(?:A[Um]{{0,2}}[NH]|[NAVH])(?:v|V(?<=NV)(?=C?L?[OMoE]))?[CUS]{{0,8}}{_UNIT}"
_MEMBERS = rf"(?:(?:[OMmdoSI]|L?E){_OPERAND}|O[WT](?=L?E))+E?"
_EXPRESSION = re.compile(rf"{_OPERAND}{_MEMBERS}|A(?:[Um]{{0,2}}[NH])?")
_MEMBERS_AFTER_BRACKET = re.compile(rf"[CUS]{{0,8}}{_UNIT}{_MEMBERS}")
_DIGIT = re.compile(r"\d")
_CLEARLY_ARITHMETIC = re.compile("[EAOM]|(?:[md].*){2}")
_NAME_BEFORE = re.compile(r"\\?[a-zA-ZΑ-ω]\w{0,20}\Z")
_NUMBERS = re.compile(r"[PUS]{0,8}[NH](?:[CUS]{0,8}(?:WT?|T)?[Mm][PUS]{0,8}[NH]){1,9}[CUS]{0,8}|N(?:dN){2,9}")
_CLOCK = re.compile(r"(?i:\s?[ap]\.?m\b)")
_PLACE = re.compile(r"\b(?i:chapter|section|page|lesson|figure|table|exercise|problem|question|step|level)s?\s?\Z")
_SIZE_OF = re.compile(
    r"[s-]?\s?(?i:lumber|boards?|planks?|studs?|beams?|photos?|prints?|pictures?|frames?|canvas|grids?|matrix|matrices"
    r"|tiles?|cards?|rugs?|inch(?:es)?|in\.)\b"
)


_PERHAPS_BRACKET = re.compile("[PIC]")
_REACH = 40  # lexemes among which the other half of a bracket is searched


def _brackets(lexemes: list[re.Match[str]], kinds: str) -> dict[int, int]:
    """Find the other half of each bracket; without one it is before or behind all lexemes."""
    halves, opened = dict[int, int](), list[int]()
    for place in _PERHAPS_BRACKET.finditer(kinds):
        i, sign = place.start(), lexemes[place.start()].group()[-1]
        if sign in "([{（":
            halves[i] = len(kinds)
            opened.append(i)
        elif sign in ")]}）":
            halves[i] = opened.pop() if opened else -1
            halves[halves[i]] = i
    return halves


def _whole_expression(
    text: str, lexemes: list[re.Match[str]], kinds: str, halves: dict[int, int], first: int, after: int
) -> Interval | None:
    """Find the characters of the lexemes `[first, after)`; `None` if a bracket's other half is too far away."""
    # Outer brackets without their other half are dropped. Around others the expression reaches as far as that half.
    opened = [i for i in range(first, after) if halves.get(i, i) >= after]
    closed = [i for i in range(first, after) if halves.get(i, i) < first]
    while opened and opened[0] == first:
        first = opened.pop(0) + 1
    while closed and closed[-1] == after - 1:
        after = closed.pop()
    if closed:
        half, line = halves[closed[-1]], kinds.rfind("L", 0, first)
        if first - max(half, line) > _REACH:
            return None
        first = half if half > line else first
    if opened:
        half, line = halves[opened[0]], kinds.find("L", after) % (len(kinds) + 1)
        if min(half, line) - after >= _REACH:
            return None
        if half < line:
            after = half + 1
            more = _MEMBERS_AFTER_BRACKET.match(kinds, after)
            is_whole = more and all(after <= halves.get(i, i) < more.end() for i in range(after, more.end()))
            after = more.end() if more and is_whole else after
    start, end = lexemes[first].start(lexemes[first].lastindex or 0), lexemes[after - 1].end()
    # "sin(30°) = 0.5" is a call, "eggs(3 + 4 = 7)" is not.
    is_call = kinds[first] == "P" and halves.get(first, first) < after - 1
    is_named = closed or is_call or text[start - 1 : start] == "_"
    name = _NAME_BEFORE.search(text, max(0, start - 24), start) if is_named else None
    return (name.start() if name else start), end


def _is_range_or_size(text: str, lexemes: list[re.Match[str]], expression: re.Match[str]) -> bool:
    """Tell whether `3 - 4 people`, `Chapter 3 - 2`, `5:30 - 6:45` or `2 x 4 boards` only looks like a calculation."""
    kinds, (first, after) = expression.group(), expression.span()
    if "E" in kinds or "A" in kinds or (first and _KIND_OF_GROUP[lexemes[first - 1].lastindex or 0] == "E"):
        return False
    if _NUMBERS.fullmatch(kinds):
        start, end = lexemes[first].start(lexemes[first].lastindex or 0), lexemes[after - 1].end()
        if "N" not in kinds or _CLOCK.match(text, end) or _PLACE.search(text, max(0, start - 12), start):
            return True
        each = zip(lexemes[first:after], kinds, strict=True)
        numbers = [lexeme.group().strip().replace(",", "") for lexeme, kind in each if kind in "NH"]
        if not all(one.replace(".", "", 1).isdecimal() for one in numbers):
            return False
        low, *others = map(float, numbers)
        taken = math.prod(others) if "d" in kinds else sum(others)
        # Of a date or a telephone number less than nothing remains, or less than one.
        return low < taken or any(re.match(r"0\d", one) for one in numbers)
    signs = {lexeme.group().strip() for lexeme, kind in zip(lexemes[first:after], kinds, strict=True) if kind == "O"}
    return signs <= {"x", "X"} and bool(signs) and bool(_SIZE_OF.match(text, lexemes[after - 1].end()))


def ranked_math_intervals(text: str) -> tuple[list[Interval], list[Interval]]:
    r"""Find arithmetic expressions, and the sentences that overlap none of them, each in order of position.

    An expression is a chain of operands joined by operators and equals signs, as in `$9 * 2 = $<<9*2=18>>18`,
    `\frac{1}{6} \times 36 = 6` or `16 eggs - 3 eggs = 13`. It is taken whole, with the calls, roots and brackets that
    it begins or ends in. A fraction by itself (`1/2`), a range (`3-4`, `pages 10 - 20`), a date, a telephone number,
    the size of a board (`2 x 4`) and anything without a digit are not expressions, unless an equals sign follows.
    """
    lexemes = list((_ASCII_LEXEME if text.isascii() else _LEXEME).finditer(text))
    kinds = "".join([_KIND_OF_GROUP[lexeme.lastindex or 0] for lexeme in lexemes])
    halves, arithmetic = _brackets(lexemes, kinds), list[Interval]()
    for expression in _EXPRESSION.finditer(kinds):
        if not _CLEARLY_ARITHMETIC.search(expression.group()):
            continue
        whole = _whole_expression(text, lexemes, kinds, halves, *expression.span())
        if whole is None or not _DIGIT.search(text, *whole) or _is_range_or_size(text, lexemes, expression):
            continue
        if arithmetic and whole[0] < arithmetic[-1][1]:
            last = arithmetic.pop()
            whole = min(last[0], whole[0]), max(last[1], whole[1])
        arithmetic.append(whole)
    return arithmetic, sentences_outside(text, arithmetic)
