"""Read the numbers that completions and data sets give as answers, and reward those that are equal."""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from cfa_kernels import AnswerRules, answer_text_span
from cfa_kernels.text.rules import AnswerFormat, Fallback

_LONGEST = 1000  # characters of a number: Python reads no integer of more than 4,300 digits
_MINUS = str.maketrans({"−": "-", "–": "-", "－": "-"})
_DRESS = re.compile(r"\\?[$€£¥₹]|\{,\}|\\,|(?<=\d),(?=\d)")
_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(rf"([+-]?)\s*(?:(\d+)\s+(?=\d+/))?({_DECIMAL})(?:\s*/\s*({_DECIMAL}))?")
_FRAC = re.compile(r"\\[dtc]?frac\s?\{\s*([^{}]+?)\s*\}\s?\{\s*([^{}]+?)\s*\}")
_POWER_OF_TEN = re.compile(
    r"(?<!\s)\s*+(?:[×*x·⋅]|\\times|\\cdot)\s*10\^(?:(?P<bare>\d{1,3})|\{(?P<braced>-?\d{1,3})\})\Z"
    r"|[eE](?P<exponent>[+-]?\d{1,3})\Z"
)
_GROUP_BLANK = re.compile(r"(?<=\d)[ \u00a0\u202f](?=\d{3}(?![\d/]))")  # 10 000


def parse_number(text: str) -> Fraction | None:
    """Read the exact value of a written number, as `-$1,234.50`, `1.5 × 10^3` or `\\frac{3}{4}`; None if it is none."""
    bare = _GROUP_BLANK.sub("", _DRESS.sub("", text.translate(_MINUS)))
    power = _POWER_OF_TEN.search(bare.rstrip())
    scale = Fraction(10) ** int(power["bare"] or power["braced"] or power["exponent"]) if power else 1
    match = _NUMBER.fullmatch(_FRAC.sub(r"\1/\2", bare[: power.start()] if power else bare).strip())
    if match is None or len(match.group()) > _LONGEST:
        return None
    sign, whole, numerator, denominator = match.groups()
    below = Fraction(denominator or 1)
    if below == 0:
        return None
    value = (Fraction(whole or 0) + Fraction(numerator) / below) * scale
    return -value if sign == "-" else value


def final_number(
    text: str, answer_format: AnswerFormat | None = None, answer_fallback: Fallback | None = None
) -> Fraction | None:
    """Read the number a completion gives as its answer, None if it gives none; options are those of `AnswerRules`."""
    span = answer_text_span(text, AnswerRules(answer_format, answer_fallback))
    return None if span is None else parse_number(text[slice(*span)])


def gold_number(answer: str) -> Fraction | None:
    """Read the number of a data set's answer column: that of a worked solution, or the bare number."""
    number = final_number(answer)
    return parse_number(answer) if number is None else number


def exact_match(
    *, completions: Sequence[str], answer: Sequence[str], answer_format: AnswerFormat | None = None,
    answer_fallback: Fallback | None = None, **_: Any,
) -> list[float | None]:  # fmt: skip
    """Give 1 where the completion's number equals that of the data set's answer, else 0; options as `final_number`."""
    numbers = (final_number(completion, answer_format, answer_fallback) for completion in completions)
    golds = map(gold_number, answer)
    return [float(number is not None and number == gold) for number, gold in zip(numbers, golds, strict=True)]
