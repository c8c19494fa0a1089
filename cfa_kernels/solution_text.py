"""What a written solution holds, as character intervals: arithmetic and sentences.

Works on text alone. `answer_text.py` finds the final answer, `spans.py` turns intervals into tokens.
"""

import re

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
EQUALS = r"(?:&?==?(?!>)&?|[≈≅≤≥]|\\(?:approx|leq?|geq?)(?![a-zA-Z]))"

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
    r"(?=[\d.\\])": [("N", rf"{DIGITS}|{FRACTION}")],
    "": [
        ("A", ANNOTATION),
        ("E", EQUALS),
        ("S", r"\*\*"),  # emphasis or a power
        ("O", r"[+*×·⋅∙÷^]|/(?=\s)|\\(?:times|cdot|div|pm)(?![a-zA-Z])"),
        ("M", rf"[{MINUS}](?=\s)"),
        ("m", rf"[{MINUS}]"),  # a tight minus: a sign, a difference or a range
        ("W", r"(?<=[\w)])/[^\W\d_]+"),
        ("d", r"/"),
        ("U", CURRENCY),
        ("P", r"[(\[{~]|\\[(\[{]|\\left\s?[(\[]"),
        ("C", r"[)\]}%°¢²³]|\\[)\]}%]|\\right\s?[)\]]"),
        ("T", rf"\\(?:text|mathrm|mbox)\s?{GROUP}"),
        ("L", r"\n"),
        ("B", r"\S"),
    ],
}
_LEXEME = re.compile(
    rf"{BLANK}*(?:%s)"
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
    """Arithmetic expressions, and the sentences that overlap none of them, each in order of position."""
    arithmetic = _arithmetic_intervals(text)
    sentences = []
    following = iter([*arithmetic, (len(text), len(text))])
    start, end = next(following)
    for sentence in sentence_intervals(text):
        while end <= sentence[0] and end < len(text):
            start, end = next(following)
        if start >= sentence[1] or end <= sentence[0]:
            sentences.append(sentence)
    return arithmetic, sentences


def math_intervals(text: str) -> list[Interval]:
    """The detector "math": the expressions of `arithmetic_intervals` in order of position, then other sentences."""
    arithmetic, sentences = ranked_math_intervals(text)
    return arithmetic + sentences
