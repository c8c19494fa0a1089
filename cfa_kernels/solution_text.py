"""What a written solution holds, as character intervals: arithmetic, sentences, and the final answer.

Works on text alone. `spans.py` turns these intervals into tokens; rewards read the answer from here.
"""

import re
from typing import NamedTuple

Interval = tuple[int, int]
"""Half-open characters of a text."""


# --- Numbers and arithmetic, as models write them -----------------------------------------------------------
# Every repetition is bounded or cannot overlap itself, so that matching is linear in whatever a model emits.

_BLANK = r"[^\S\n]"
_GROUP = r"\{(?:[^{}\n]|\{[^{}\n]{0,60}\}){1,60}\}"
_DIGITS = (
    r"(?:\d{1,2}(?:,\d\d){1,4},\d{3}(?!\d)"  # 12,34,567
    r"|\d{1,3}(?:[ \u00a0\u202f]\d{3}){1,4}(?![\d,])"  # 12 345
    r"|\d+(?:(?:,|\{,\}|\\,)\d{3}(?!\d)){0,9}(?:\.\d+)?|\.\d+)"
)
_FRACTION = rf"\\[dtc]?frac\s?{_GROUP}\s?{_GROUP}"
_MINUS = r"\-−–－"  # for use inside [...]
_CURRENCY = r"(?:\\?\$|[€£¥₹])"
_ANNOTATION = r"<<[^<>\n]{0,200}>>"
_EQUALS = r"(?:&?==?(?!>)&?|[≈≅≤≥]|\\(?:approx|leq?|geq?)(?![a-zA-Z]))"

_BEFORE_NUMBER = r"(?=\s{1,4}[\d$(\\.])"
_WORD_OPERATOR = rf"(?:plus|minus|times|divided|multiplied|equals|is equal|of(?: the)?{_BEFORE_NUMBER})"
_WORD = r"(?:[^\W\d_]{2,}(?:['’/-][^\W\d_]+){0,4}|[aAI](?= [^\W\d_]{2}))"

# One letter per kind of lexeme, so that an expression is a short regular expression over a string of kinds. They are
# grouped by first character, tried in order: most of a text is words and numbers, and this decides the speed.
_LEXEMES = {
    r"(?=[^\W\d_])": [
        ("O", rf"(?:plus|minus|times|divided by|multiplied by){_BEFORE_NUMBER}"),
        ("o", rf"of(?: the)?{_BEFORE_NUMBER}"),
        ("E", rf"(?:equals|is equal to){_BEFORE_NUMBER}"),
        ("W", rf"{_WORD}(?: (?!{_WORD_OPERATOR}){_WORD}){{0,5}}"),
        ("O", r"(?<=[\d\s)}%$])[xX](?=\s?[\d$(\\.])"),
        ("v", r"(?<=\d)[a-zA-Z](?![\w'’])"),  # a variable's coefficient stands before it
        ("V", r"[a-zA-Z](?:_\{?\w{1,3}\}?)?(?![\w'’])"),
    ],
    r"(?=[\d.\\])": [("N", rf"{_DIGITS}|{_FRACTION}")],
    "": [
        ("A", _ANNOTATION),
        ("E", _EQUALS),
        ("S", r"\*\*"),  # emphasis or a power
        ("O", r"[+*×·⋅∙÷^]|/(?=\s)|\\(?:times|cdot|div|pm)(?![a-zA-Z])"),
        ("M", rf"[{_MINUS}](?=\s)"),
        ("m", rf"[{_MINUS}]"),  # a tight minus: a sign, a difference or a range
        ("W", r"(?<=[\w)])/[^\W\d_]+"),
        ("d", r"/"),
        ("U", _CURRENCY),
        ("P", r"[(\[{~]|\\[(\[{]|\\left\s?[(\[]"),
        ("C", r"[)\]}%°¢²³]|\\[)\]}%]|\\right\s?[)\]]"),
        ("T", rf"\\(?:text|mathrm|mbox)\s?{_GROUP}"),
        ("L", r"\n"),
        ("B", r"\S"),
    ],
}
_LEXEME = re.compile(
    rf"{_BLANK}*(?:%s)"
    % "|".join(f"{guard}(?:{'|'.join(f'({pattern})' for _, pattern in group)})" for guard, group in _LEXEMES.items())
)
_KINDS = ["", *(kind for group in _LEXEMES.values() for kind, _ in group)]

# Words belong to an operand only if an operator follows: "16 eggs - 3 eggs = 13", but not "13 eggs left".
_OPERAND = r"[PUSm]{0,8}(?:A[Um]{0,2}N|[NAV])v?[CUS]{0,8}(?:(?:WT?|T)(?=L?[OMmdoE]))?"
_EXPRESSION = re.compile(rf"{_OPERAND}(?:(?:[OMmdoS]|L?E){_OPERAND})+E?|A(?:[Um]{{0,2}}N)?")
_DIGIT = re.compile(r"\d")
_CLEARLY_ARITHMETIC = re.compile("[EAOM]|(?:[md].*){2}")


def _arithmetic_intervals(text: str) -> list[Interval]:
    """Expressions in order; not a bare fraction or range, nor letters that merely stand beside a sign."""
    lexemes = list(_LEXEME.finditer(text))
    kinds = "".join([_KINDS[lexeme.lastindex or 0] for lexeme in lexemes])
    intervals = []
    for expression in _EXPRESSION.finditer(kinds):
        first, last = lexemes[expression.start()], lexemes[expression.end() - 1]
        start, end = first.start(first.lastindex or 0), last.end()
        if _CLEARLY_ARITHMETIC.search(expression.group()) and _DIGIT.search(text, start, end):
            intervals.append((start, end))
    return intervals


# --- The answer -----------------------------------------------------------------------------------------------

_HASHES = re.compile(rf"#{{4,}}{_BLANK}*\n?")
_ANSWER_IS = (
    r"(?i:\b(?:(?:so|thus|therefore|hence),?\s)?(?:(?:the|our|my)\s)?(?:(?:final|correct)\s)?answer\s{1,3}is\b)"
)
_ANSWER_PHRASE = re.compile(_ANSWER_IS)
_ANSWER_PHRASE_AT_END = re.compile(rf"{_ANSWER_IS}\W{{0,12}}\Z")
_BRACE = re.compile(r"\\boxed\s{0,3}\{|\\.|[{}]", re.DOTALL)
_HEADING = re.compile(rf"[.)]{_BLANK}+[^\W\d_]")

_LEAD = (
    rf"(?:{_ANNOTATION}|{_BLANK}|{_CURRENCY}|[*_`~≈=:(\[{{<\"'“‘]|\\[(\[,;!]|\\approx"
    r"|\\(?:boxed|text|textbf|mathbf|mathrm)\s?\{|(?i:the|final|answer|is|a)\b|[^\W\d]\w{0,30}\s?=){0,30}"
)
_VALUE = (
    rf"(?:[+{_MINUS}]{_BLANK}?(?:{_CURRENCY}{_BLANK}?)?)?"
    rf"(?:\d+{_BLANK}\d+/\d+|{_DIGITS}(?:{_BLANK}?/{_BLANK}?{_DIGITS})?|{_FRACTION})"
)
_SUM = rf"{_VALUE}(?:{_BLANK}?(?:[+*×·⋅÷/^xX{_MINUS}]|\\(?:times|cdot|div)){_BLANK}?{_CURRENCY}?{_VALUE}){{0,20}}"
_LEAD_AND_VALUE = re.compile(rf"{_LEAD}(?P<value>{_SUM})")
_EQUALS_VALUE = re.compile(rf"{_BLANK}?{_EQUALS}{_LEAD}(?P<value>{_SUM})")
_VALUE_IN_SENTENCE = re.compile(rf"[^\n.!?]{{0,60}}?(?<![\w.,])(?P<value>{_SUM})")
_UNITS_ONLY = re.compile(
    rf"(?:[\s*_.,;:!)\]}}°¢\"'”’]|{_CURRENCY}|\\?%|\\[,;!)\]]|\^\{{?\\circ\}}?|\\(?:text|mathrm|mbox)\s?{_GROUP}"
    r"|/?(?<![^\W\d_])[^\W\d_]{2,}(?![^\W\d_])){0,60}"
)


class AnswerText(NamedTuple):
    """Characters of an answer and of the marker before it: `marker <= start < end`."""

    marker: int
    start: int
    end: int


def _value_after(pattern: re.Pattern[str], text: str, position: int, limit: int) -> Interval | None:
    """Find the value that `pattern` announces at `position`; of a chain `3 * 6 = 18`, its last member."""
    match = pattern.match(text, position, limit)
    found = None
    while match:
        found = match.span("value")
        match = _EQUALS_VALUE.match(text, found[1], limit)
    return found


def _hashes_answer(text: str, boxed: AnswerText | None) -> AnswerText | None:
    for marker in reversed(list(_HASHES.finditer(text))):
        value = _value_after(_LEAD_AND_VALUE, text, marker.end(), len(text))
        if value is None:
            continue
        # "#### 2. Add the tips" above a boxed result is a Markdown heading.
        if boxed and boxed.marker > value[1] and _HEADING.match(text, value[1]):
            continue
        return AnswerText(marker.start(), *value)
    return None


def _boxed_answer(text: str) -> AnswerText | None:
    boxes: list[tuple[int, int, int]] = []
    open_braces: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text):
        if brace.group().endswith("{") and brace.group() != r"\{":
            open_braces.append(brace)
        elif brace.group() == "}" and open_braces:
            opening = open_braces.pop()
            if opening.group() != "{":
                boxes.append((opening.start(), opening.end(), brace.start()))
    for marker, start, end in reversed(boxes):
        content = text[start:end]
        if not content.strip():
            continue
        value = _value_after(_LEAD_AND_VALUE, text, start, end)
        if value is None or not _UNITS_ONLY.fullmatch(text, value[1], end):
            value = start + len(content) - len(content.lstrip()), start + len(content.rstrip())
        return AnswerText(marker, *value)
    return None


def _phrase_answer(text: str) -> AnswerText | None:
    for phrase in reversed(list(_ANSWER_PHRASE.finditer(text))):
        for pattern in (_LEAD_AND_VALUE, _VALUE_IN_SENTENCE):
            value = _value_after(pattern, text, phrase.end(), len(text))
            if value:
                return AnswerText(phrase.start(), *value)
    return None


def locate_answer(text: str) -> AnswerText | None:
    """The answer as `answer_text_span` defines it, with where its marker begins."""
    boxed = _boxed_answer(text) if r"\boxed" in text else None
    answer = _hashes_answer(text, boxed) or boxed or _phrase_answer(text)
    if answer is None:
        return None
    # "The answer is $\boxed{18}$": the words and the delimiter announce the answer as much as the box does.
    head = text[: answer.marker].rstrip(" \t\n*_$([{\\")
    tail = max(0, len(head) - 60)
    phrase = _ANSWER_PHRASE_AT_END.search(head, tail) if "answer" in head[tail:].lower() else None
    marker = phrase.start() if phrase else len(head)
    marker += len(text[marker : answer.marker]) - len(text[marker : answer.marker].lstrip())
    return answer._replace(marker=marker)


def answer_text_span(text: str) -> Interval | None:
    r"""Characters of the final answer in a completion's text, right or wrong; `None` where there is none.

    In this order: the number after the last `####` that a number follows; else inside the last non-empty
    balanced `\boxed{}`; else after the last "answer is" that a number follows in its sentence. Currency signs,
    emphasis, `\boxed`, brackets and "the answer is" may stand between marker and number and are not part of
    it. The number may carry a sign (ASCII, Unicode minus or en dash, also before the currency sign: `-$5`),
    thousands separators, decimals (`18.00`, but not the full stop of `18.`) and may be a fraction. Of a
    chain `3 * 6 = 18` the answer is its last member; a sum without result (`36+36`) is returned whole, so
    that it does not pass for a number. A box that holds anything but one number with its units is returned
    whole without outer blanks.

    Args:
        text: decoded completion.

    Returns:
        Half-open character interval, never empty.

    Source: the settled rule on answer tokens in the method notes, item 1.
    """
    answer = locate_answer(text)
    return None if answer is None else (answer.start, answer.end)


# --- What may be masked, most wanted first ----------------------------------------------------------------------

LETTER_OR_DIGIT = re.compile(r"[^\W_]")
_SENTENCE_END = re.compile(r"\n|[.!?…]{1,6}[\"'”’)\]*_]{0,4}(?=\s|\Z)|[。！？][”’」』）]{0,4}")
_NO_SENTENCE_END = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|St|Jr|Sr|vs|approx|e\.g|i\.e)|(?:^|\n|[.!?]\s)\s?\d{1,3})\Z")


def sentence_intervals(text: str) -> list[Interval]:
    """Sentences and lines in order of position, without outer blanks; those without letter or digit are left out.

    A sentence ends at a line break, at `. ! ?` before a blank, or at their CJK forms; not after a title
    ("Mr."), nor after the number of a list item.
    """
    ends = [
        end.end()
        for end in _SENTENCE_END.finditer(text)
        if end.group() != "." or not _NO_SENTENCE_END.search(text, max(0, end.start() - 8), end.start())
    ]
    intervals = []
    for start, end in zip([0, *ends], [*ends, len(text)], strict=True):
        sentence = text[start:end]
        if LETTER_OR_DIGIT.search(sentence):
            intervals.append((start + len(sentence) - len(sentence.lstrip()), start + len(sentence.rstrip())))
    return intervals


def math_intervals(text: str) -> list[Interval]:
    r"""Arithmetic expressions in order of position, then the sentences that overlap none of them, likewise.

    An expression is a chain of operands joined by operators and equals signs, as in `$9 * 2 = $<<9*2=18>>18`,
    `\frac{1}{6} \times 36 = 6` or `16 eggs - 3 eggs = 13`. A lone fraction (`1/2`), a range (`3-4`)
    and anything without a digit are not expressions.
    """
    arithmetic = _arithmetic_intervals(text)
    sentences = []
    following = iter([*arithmetic, (len(text), len(text))])
    start, end = next(following)
    for sentence in sentence_intervals(text):
        while end <= sentence[0] and end < len(text):
            start, end = next(following)
        if start >= sentence[1] or end <= sentence[0]:
            sentences.append(sentence)
    return arithmetic + sentences
