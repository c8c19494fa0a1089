"""Find the final answer in a completion's text, as characters. docs/spans.md lists its forms."""

import re
from collections.abc import Callable
from typing import NamedTuple

from ..options import check_class
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
    sentence_intervals,
    trimmed,
)
from .rules import USUAL_ANSWERS, AnswerRules, answer_pattern


class AnswerText(NamedTuple):
    """Characters of an answer and of the marker before it: `marker <= start < end`."""

    marker: int
    start: int
    end: int


_LEAD = (
    rf"(?:{ANNOTATION}|{BLANK}|{CURRENCY}|[*_`~≈=:(\[{{<\"'“‘]|\\[(\[,;!]|\\approx"
    rf"|\\(?:boxed|fbox|text|textbf|mathbf|mathrm)\s?\{{|(?i:equal to|a total of)\b"
    r"|(?i:the|final|answer|is|about|approximately|exactly|only|just|therefore|thus|then|equals|an?)\b(?!\s?=)"
    r"|[^\W\d]\w{0,30}\s?=){0,30}"  # "a =" can be read in one way only
)
_SIGN = rf"(?:[+{MINUS}]{BLANK}?(?:{CURRENCY}{BLANK}?)?)?"
_POWER_OF_TEN = (
    rf"(?:[eE][+{MINUS}]?\d{{1,3}}(?![\w.])"
    rf"|{BLANK}?(?:[×*x·⋅]|\\times|\\cdot){BLANK}?10\^(?:\d{{1,3}}|\{{[{MINUS}]?\d{{1,3}}\}}))"
)
_VALUE = (
    rf"{_SIGN}(?:\d+{BLANK}\d+/\d+|\d{{1,4}}(?::\d{{1,4}}){{1,3}}(?![\d:])"
    rf"|{DIGITS}(?:{_POWER_OF_TEN}|{BLANK}?/{BLANK}?{DIGITS})?|{FRACTION})"
)
_OPERATOR = rf"(?:[+*×·⋅÷/^xX{MINUS}]|\\(?:times|cdot|div))"
_SUM = rf"{_VALUE}(?:{BLANK}?{_OPERATOR}{BLANK}?{CURRENCY}?{_VALUE}){{0,20}}"
_UNITS = rf"(?:(?:{BLANK}|{BLANK}?/{BLANK}?)[^\W\d_]{{1,20}}){{0,3}}"
_LEAD_AND_VALUE = re.compile(rf"{_LEAD}(?P<value>{_SUM})")
_EQUALS_VALUE = re.compile(
    rf"(?:{_UNITS}{BLANK}?{_OPERATOR}{BLANK}?{CURRENCY}?{_VALUE}){{0,6}}{_UNITS}{BLANK}?{EQUALS}{_LEAD}(?P<value>{_SUM})"
)
_VALUE_IN_TEXT = re.compile(rf"(?<![a-zA-ZÀ-ɏ\d_.,^/:\\])(?<![\^_]\{{)(?P<value>{_SUM})")
_UNITS_ONLY = re.compile(
    rf"(?:[\s*_.,;:!)\]}}°¢\"'”’]|{CURRENCY}|\\?%|\\[,;!)\] ]|\^\{{?\\circ\}}?|(?<=[a-zA-Z}}])\^\{{?[23]\}}?"
    rf"|\\(?:text|mathrm|mbox)\s?{GROUP}|/?(?<![^\W\d_])[^\W\d_]{{2,}}(?![^\W\d_])){{0,60}}"
)
_ONLY_TEXT = re.compile(r"\\(?:text|textbf|textrm|mathbf|mathrm|mbox)\s?\{([^{}]{1,200})\}")
_OPENS_PART = re.compile(rf"[.):][*_]{{0,3}}{BLANK}+[*_]{{0,3}}[^\W\d_][^\n]{{0,200}}\n\s{{0,20}}\S")


def _value_after(pattern: re.Pattern[str], text: str, position: int, limit: int) -> Interval | None:
    """Find the value that `pattern` leads to at `position`; of a chain `3 * 6 = 18`, its last member."""
    match = pattern.match(text, position, limit)
    value = None
    while match:
        value = match.span("value")
        match = _EQUALS_VALUE.match(text, value[1], limit)
    return value


def _content(text: str, start: int, end: int) -> Interval | None:
    r"""Read a box, a tag or a formula: one number without its units, else all that is not blanks or `\text`."""
    start, end = trimmed(text, start, end)
    value = _value_after(_LEAD_AND_VALUE, text, start, end)
    if value and _UNITS_ONLY.fullmatch(text, value[1], end):
        return value
    only_text = _ONLY_TEXT.fullmatch(text, start, end)
    if only_text and only_text[1].strip():
        start, end = trimmed(text, *only_text.span(1))
    return (start, end) if start < end else None


_THOUGHT = re.compile(r"<think>.*?(?=</think>|\Z)", re.DOTALL)
_HASHES = re.compile(rf"#{{4,}}{BLANK}*\n?")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s{0,3}\{|\\.|[{}]", re.DOTALL)
_NAMED = (
    r"(?<![/\w-])(?i:(?:\b(?:so|thus|therefore|hence),?\s)?(?:\b(?:the|our|my|your)\s)?"
    r"(?:\b(?:final|correct|numerical)\s)?\banswer\b)[*_]{0,3}"
)
_IS = r"(?i:\s(?:to|for)\s[^\n.!?:]{1,80}?)?\s{1,3}(?i:(?:is|equals|(?:would|will|should|must) be)\b|=)"
_STATEMENT = rf"{_NAMED}(?:{BLANK}?:|{BLANK}*$|{_IS})"
_ANNOUNCEMENT = re.compile(rf"(?P<tag><answer>)|^[*_> \t]{{0,8}}A[*_]{{0,3}}{BLANK}?:|{_STATEMENT}", re.MULTILINE)
_LEADS_TO_MARKER = re.compile(rf"{_STATEMENT}\W{{0,12}}\Z", re.MULTILINE)
_GAP = re.compile(r"[\s*_:]{0,16}(?:(?<=\n)[-•]\s)?")
_FORMULA = re.compile(
    r"\$\$([^$]{1,300})\$\$|\$(?!\s)([^$\n]{1,200}(?<![\s\\+*/=-]))\$(?!\d)"
    r"|\\\[((?:[^\\]|\\[^\]]){1,300})\\\]|\\\(((?:[^\\\n]|\\[^)\n]){1,200})\\\)"
)


def _without_thoughts(text: str) -> str:
    """Replace a model's thoughts, also one that the prompt opened, by as many line breaks."""
    opened_before, closed, rest = text.partition("</think>")
    if closed and "<think>" not in opened_before:
        text = "\n" * len(opened_before) + closed + rest
    return _THOUGHT.sub(lambda thought: "\n" * len(thought.group()), text)


def _hashes_answer(text: str) -> AnswerText | None:
    for hashes in reversed(list(_HASHES.finditer(text))):
        value = _value_after(_LEAD_AND_VALUE, text, hashes.end(), len(text))
        if value and not _OPENS_PART.match(text, value[1]):  # "#### 2. Add the tips"
            return AnswerText(hashes.start(), *value)
    return None


def _boxed_answer(text: str) -> AnswerText | None:
    """Find the non-empty box that opens last; its marker is the outermost box around it."""
    boxes: list[tuple[int, int, int]] = []
    open_braces: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text) if r"\boxed" in text or r"\fbox" in text else ():
        sign = brace.group()
        if sign == "}" and open_braces:
            opening = open_braces.pop()
            if opening.group() != "{":
                boxes.append((opening.start(), opening.end(), brace.start()))
        elif sign.endswith("{") and sign != r"\{":
            open_braces.append(brace)
    markers: list[int] = []
    outer_end = -1
    boxes.sort()
    for start, _, end in boxes:
        inside = start < outer_end
        markers.append(markers[-1] if inside else start)
        outer_end = outer_end if inside else end
    for marker, (_, start, end) in reversed(list(zip(markers, boxes, strict=True))):
        if value := _content(text, start, end):
            return AnswerText(marker, *value)
    return None


def _stated_answer(text: str) -> AnswerText | None:
    for announcement in reversed(list(_ANNOUNCEMENT.finditer(text))):
        start = announcement.end()
        if announcement["tag"]:
            end = text.find("</answer>", start)  # the closing tag may be what stopped sampling
            value = _content(text, start, end if end >= 0 else len(text))
        else:
            value = _value_below(text, start)
        if value:
            return AnswerText(announcement.start(), *value)
    return None


def _value_below(text: str, position: int) -> Interval | None:
    """Find the number or formula behind "the answer is", on the same line or below; not that of a solution's part."""
    gap = _GAP.match(text, position)
    start = gap.end() if gap else position
    if formula := _FORMULA.match(text, start):
        return _content(text, *formula.span(formula.lastindex or 0))
    value = _value_after(_LEAD_AND_VALUE, text, start, len(text))
    if value and "\n" in text[position - 1 : start] and _OPENS_PART.match(text, value[1]):
        return None
    return value


def _last_number(text: str) -> AnswerText | None:
    for position, end in reversed(sentence_intervals(text)):
        value = None
        while match := _VALUE_IN_TEXT.search(text, position, end):
            value = _value_after(_VALUE_IN_TEXT, text, match.start(), end) or match.span("value")
            position = value[1]
        if value:
            return AnswerText(value[0], *value)
    return None


def _pattern_answer(text: str, pattern: str | re.Pattern[str]) -> AnswerText | None:
    compiled, group = answer_pattern(pattern)
    for match in reversed(list(compiled.finditer(text))):
        start, end = match.span(group)
        if start < end:
            return AnswerText(min(match.start(), start), start, end)
    return None


def _function_answer(text: str, function: Callable[[str], Interval | None]) -> AnswerText | None:
    interval = function(text)
    if interval is None:
        return None
    is_pair = isinstance(interval, tuple | list) and list(map(type, interval)) == [int, int]
    if not is_pair or not 0 <= interval[0] < interval[1] <= len(text):
        raise ValueError(
            f"answer_format must return None or (start, end), not empty and inside the text's {len(text)} characters, "
            f"got {interval!r}"
        )
    return AnswerText(interval[0], *interval)


def _marker_start(text: str, marker: int) -> int:
    r"""Include the words and signs that lead to a marker: "The answer is $" before `\boxed{18}`."""
    while True:
        window = max(0, marker - 400)
        head = text[window:marker].rstrip(" \t\n*_$([{\\#")
        words = _LEADS_TO_MARKER.search(head, max(0, len(head) - 140))
        if words is None:
            return marker - len(text[window + len(head) : marker].lstrip())
        marker = window + words.start()


def locate_answer(text: str, rules: AnswerRules = USUAL_ANSWERS) -> AnswerText | None:
    """Find the answer as `answer_text_span` defines it, and where its marker begins; raises what that does."""
    check_class(AnswerRules, answers=rules)
    answer_format = rules.answer_format
    speech = _without_thoughts(text)
    if answer_format is None:
        answer = _hashes_answer(speech) or _boxed_answer(speech) or _stated_answer(speech)
    elif isinstance(answer_format, str | re.Pattern):
        answer = _pattern_answer(speech, answer_format)
    else:
        answer = _function_answer(text, answer_format)
    if answer is None:
        return _last_number(speech) if rules.answer_fallback == "last_number" else None
    return answer._replace(marker=_marker_start(speech, answer.marker))


def answer_text_span(text: str, answers: AnswerRules = USUAL_ANSWERS) -> Interval | None:
    r"""Find the final answer in a completion's text, right or wrong: half-open characters, or `None`.

    The answer follows the last `####` that a number follows; else it is inside the box (`\boxed{}`, `\fbox{}`) that
    opens last; else it follows the last statement: "the answer is 18", "Answer: 18", "A: 18" at the start of a line,
    `<answer>18</answer>`. Thoughts (`<think>`) hold no answer. `answers` may replace these forms; raises `ValueError`
    if a function of its returns no interval.
    """
    answer = locate_answer(text, answers)
    return None if answer is None else (answer.start, answer.end)
