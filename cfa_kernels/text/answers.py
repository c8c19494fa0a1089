"""Find the final answer in a completion's text, as characters. docs/spans.md lists its forms."""

import re
from collections.abc import Callable
from typing import NamedTuple

from ..options import check_class
from .markup import Speech, read_speech
from .patterns import (
    ANNOTATION,
    BLANK,
    CURRENCY,
    DIGITS,
    EQUALS,
    FRACTION,
    GROUP,
    HEADING,
    MINUS,
    Interval,
    label_length,
    sentence_intervals,
    trimmed,
)
from .rules import USUAL_ANSWERS, AnswerRules, answer_pattern


class AnswerText(NamedTuple):
    """Characters of an answer and of the marker before it: `marker <= start < end`."""

    marker: int
    start: int
    end: int


_COLON = rf"{BLANK}?[:：]"
_TEXT = r"\\(?:text(?:bf|it|rm|sf)?|math(?:bf|it|rm)|mbox)\s?"
_SPACE = r"(?:\\[,;:! ]|\\(?:q?quad|left|right|(?:display|text)style)(?![a-zA-Z]))"
_PICTURE = "[←-⇿☀-➿\ufe0f\U0001f300-\U0001faff]"  # "✅ 18", "→ 18"
_SIGN = rf"(?:[+{MINUS}]{BLANK}?(?:{CURRENCY}{BLANK}?)?)?"
_POWER_OF_TEN = (
    rf"(?:[eE][+{MINUS}]?\d{{1,3}}(?!\w|\.\d)"
    rf"|{BLANK}?(?:[×*x·⋅]|\\times|\\cdot){BLANK}?10\^(?:\d{{1,3}}|\{{[{MINUS}]?\d{{1,3}}\}}))"
)
_ROOT = rf"(?:√|\\sqrt(?![a-zA-Z]))\s?(?:{GROUP}|\d{{1,20}})?"
_VALUE = (
    rf"{_SIGN}(?:\d+{BLANK}(?:and{BLANK})?\d+/\d+|\d+(?:{BLANK}|\\[,;:! ])?{FRACTION}"
    rf"|\d{{1,4}}(?::\d{{1,4}}){{1,3}}(?![\d:])|{DIGITS}(?:{_POWER_OF_TEN}|{BLANK}?/{BLANK}?{DIGITS})?|{FRACTION}|[¼-¾⅐-⅞]"
    rf"|{_ROOT})"
)
_TUPLE = rf"[(\[]{BLANK}?{_VALUE}(?:,{BLANK}{_VALUE}){{1,9}}{BLANK}?[)\]]"
_LEAD = (
    rf"(?:{ANNOTATION}|{BLANK}|{CURRENCY}|(?!{_TUPLE})[(\[{{]|[*_`~≈=:：}}<\"'“‘]|{_PICTURE}|\\[(\[]|{_SPACE}|\\approx"
    rf"|(?:\\(?:boxed|fbox)\s?|{_TEXT})\{{|(?i:equal to|a total of)\b"
    r"|US(?=\\?\$)|Rs\.|(?:USD|EUR|GBP|INR|Rs)(?![^\W\d_])"
    r"|(?i:the|final|answer|is|about|approximately|exactly|only|just|therefore|thus|then|equals|an?)\b(?!\s?=)"
    r"|[^\W\d]\w{0,30}\s?=){0,30}"  # "a =" can be read in one way only
)
# What makes a number behind which it stands another one, or none: "1,2,3", "1.234.567", "5²", "1½", "2π", "2n", "1.5k".
_TAIL = (
    r"(?:(?:(?:[,.;'’_]|\{,\}|,?\\[,;:! ]|\*\*|[eE][+-]?)?\d+){1,20}|(?: \d{3}){1,4},\d+|[⁰¹²³⁴-⁻¼-¾⅐-⅞]{1,20}"
    r"|\.\(\d{1,20}\)|\.?\\(?:overline|bar|dot)\s?(?:\{\d{1,20}\}|\d)|[iknxyzKMB](?![^\W_])"
    rf"|\s?(?:{_ROOT}|[π∞]|\\(?:pi|infty|choose)(?![a-zA-Z])))"
)
_SCRIPT = rf"(?:[\^_](?!\{{(?:\\text\{{)?(?:\\circ|st|nd|rd|th)\b){GROUP})?"  # a power or a base, but no "5^{th}"
_OPERATOR = rf"(?:[+*×·⋅÷/^±xX{MINUS}]|\\(?:times|cdot|div|pm))"
_SUM = rf"{_VALUE}{_SCRIPT}(?:{BLANK}?{_OPERATOR}{BLANK}?{CURRENCY}?{_VALUE}{_SCRIPT}){{0,20}}"
_VALUE_TAIL = re.compile(_TAIL)
_VARIABLE = r"[iknxyz](?![^\W\d_])"
_UNIT = rf"(?!{_VARIABLE}|X\b|of\b)[^\W\d_]{{1,20}}"
_UNIT_POWER = r"(?:\^\{?\\circ\}?|(?<=[a-zA-Z}])\^\{?[23]\}?)"
# Between an operand and the operator behind it, and between that and the next operand.
_AFTER = (
    rf"(?:[!%°)\]}}²³`_]|\*\*|\\[%)\]}}]|\\right[)\]]|{_UNIT_POWER}|{CURRENCY}|{_TEXT}{GROUP}"
    rf"|(?:{BLANK}|{BLANK}?/{BLANK}?){_UNIT}|{BLANK}?\({_UNIT}(?:[ -]{_UNIT}){{0,4}}\)){{0,8}}+"
)
_BEFORE = rf"(?:[(\[{{]|\*\*|\\[(\[]|\\left\s?|{CURRENCY}|{BLANK}|{ANNOTATION}){{0,6}}+"
_JOINT = rf"{_OPERATOR}|(?<=[\d)])(?=\()"
_EQUALS_VALUE = re.compile(
    rf"(?:{_AFTER}{BLANK}?(?:{_JOINT}|of(?: the)?\b){_BEFORE}{_VALUE}{_SCRIPT}){{0,20}}+"
    rf"{_AFTER}{BLANK}?{EQUALS}{_LEAD}(?P<value>{_SUM})"
)
_NO_RESULT = re.compile(
    rf"(?:{_AFTER}{BLANK}?(?:{_JOINT}){_BEFORE}(?:{_VALUE}|{_VARIABLE}){_SCRIPT}){{1,20}}+[)\]]{{0,3}}"
)
_LEAD_AND_VALUE = re.compile(rf"{_LEAD}(?P<value>{_TUPLE}|{_SUM})")
_VALUE_IN_TEXT = re.compile(rf"(?<![a-zA-ZÀ-ɏ\d_.,^/:%\\])(?<![\^_]\{{)(?P<value>{_SUM})")
_UNITS_ONLY = re.compile(
    rf"(?:[\s*_~.,;:/)\]}}°¢\"'”’%⺀-鿿가-힯]|(?<!\d)!|{CURRENCY}|{_SPACE}|\\(?:[%)\]\\]|degree|\Z)|{_UNIT_POWER}"
    rf"|{_TEXT}{GROUP}|(?<![^\W\d_])[^\W\d_]{{2,}}(?![^\W\d_])|(?<=[\s~])[mgLhsCFK](?!\w)){{0,60}}"
)
_ONLY_TEXT = re.compile(rf"{_TEXT}\{{([^{{}}]{{1,200}})\}}")
# Words or more numbers behind a number on its line, and a line below; with a sign between them the number is a label.
_OPENS_PART = re.compile(
    r"(?P<label>[.):：、]|\ufe0f?\u20e3)?(?:[^\w\n]|_){0,40}+[^\W_][^\n]{0,300}+\n\s{0,20}(?P<below>\S)"
)


def _value_at(text: str, position: int, limit: int) -> Interval | None:
    """Find the value that words and signs lead to; of a chain `3 * 6 = 18` its last member, a sum without one whole."""
    match, value = _LEAD_AND_VALUE.match(text, position, limit), None
    while match:
        value = match.span("value")
        match = _EQUALS_VALUE.match(text, value[1], limit)
    rest = _NO_RESULT.match(text, value[1], limit) if value else None
    return (value[0], rest.end()) if value and rest else value


def _spoken_value(text: str, position: int, tail: re.Pattern[str] = _VALUE_TAIL) -> Interval | None:
    """Find the value in a sentence or on a line, with what makes it another number or none."""
    value = _value_at(text, position, len(text))
    rest = tail.match(text, value[1]) if value else None
    return (value[0], rest.end()) if value and rest else value


def _content(text: str, start: int, end: int) -> Interval | None:
    r"""Read a box, a tag or a formula: one number without its units, else all that is not blanks or `\text`."""
    start, end = trimmed(text, start, end)
    value = _value_at(text, start, end)
    if value and _UNITS_ONLY.fullmatch(text, value[1], end):
        return value
    only_text = _ONLY_TEXT.fullmatch(text, start, end)
    if only_text and only_text[1].strip():
        start, end = trimmed(text, *only_text.span(1))
    return (start, end) if start < end else None


_HASHES = re.compile(rf"#{{4,}}{BLANK}*\n?")
_OR_FACTORIAL = re.compile(rf"{_TAIL}|!")
_BRACE = re.compile(
    rf"\\(?:boxed|fbox)\s{{0,3}}(?:\{{|(?:\\\$)?(?P<bare>{_SUM}(?:{_TAIL}|!)?|[a-zA-Z](?![a-zA-Z])))|\\.|[{{}}]",
    re.DOTALL,
)
_NAMED = (
    r"(?<![/\w-])(?i:(?:\b(?:so|thus|therefore|hence),?\s)?(?:\b(?:the|our|my|your)\s)?"
    r"(?:\b(?:final|correct|numerical)\s)?\banswer\b)[*_]{0,3}"
)
_IS = r"(?i:\s(?:to|for)\s[^\n.!?:：]{1,80}?)?\s{1,3}(?i:(?:is|equals|(?:would|will|should|must) be)\b|=)"
_STATEMENT = rf"{_NAMED}(?:{_COLON}|(?P<line>{BLANK}*$)|(?P<verb>{_IS}))"
_OPTIONS = r"[^\n]{0,200}+\n[*_> \t]{0,8}B[*_]{0,3}\s?[:：]"  # "A: 9" above "B: 18"
_ANNOUNCEMENT = re.compile(
    rf"(?P<tag><(?i:answer)>)|^[*_> \t]{{0,8}}A[*_]{{0,3}}{_COLON}(?!{_OPTIONS})|{_STATEMENT}", re.MULTILINE
)
_CLOSING_TAG = re.compile(r"</answer>", re.IGNORECASE)
_LEADS_TO_MARKER = re.compile(rf"{_STATEMENT}\W{{0,12}}\Z", re.MULTILINE)
_GAP = re.compile(r"[\s*_:：>`]{0,16}(?:(?<=\n)[-•]\s)?")
_SMALL = re.compile(r"\W{0,8}(\d{1,3})\b")
_RESULT = re.compile(rf"{EQUALS}{_LEAD}(?P<value>{_SUM})")
_FORMULA = re.compile(
    r"\$\$([^$]{1,300})\$\$|\$(?!\s)([^$\n]{1,200}(?<![\s\\+*/=-]))\$(?!\d)"
    r"|\\\[((?:[^\\]|\\[^\]]){1,300})\\\]|\\\(((?:[^\\\n]|\\[^)\n]){1,200})\\\)"
)


def _hashes_answer(text: str) -> AnswerText | None:
    for hashes in reversed(list(_HASHES.finditer(text))):
        value = _spoken_value(text, hashes.end(), _OR_FACTORIAL)
        part = _OPENS_PART.match(text, value[1]) if value else None
        if value and not (part and part["label"]):  # "#### 2. Add the tips"
            return AnswerText(hashes.start(), *value)
    return None


def _boxed_answer(text: str) -> AnswerText | None:
    """Find the non-empty box that opens last; its marker is the outermost box around it."""
    boxes: list[tuple[int, int, int]] = []
    open_braces: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text) if r"\boxed" in text or r"\fbox" in text else ():
        sign = brace.group()
        if brace["bare"]:
            boxes.append((brace.start(), *brace.span("bare")))
        elif sign == "}" and open_braces:
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


def _stated_answer(speech: Speech) -> AnswerText | None:
    text = speech.statement
    for announcement in reversed(list(_ANNOUNCEMENT.finditer(text))):
        start = announcement.end()
        if announcement["tag"]:
            closing = _CLOSING_TAG.search(text, start)  # it may be what stopped sampling
            value = _content(text, start, closing.start() if closing else len(text))
        elif announcement["line"] is not None and not _is_label(text, announcement.start()):
            continue
        else:
            value = _value_below(text, start, is_said=bool(announcement["verb"]))
            if value and speech.text[start : value[1]] != text[start : value[1]]:
                value = None  # a tool wrote in between
        if value:
            return AnswerText(announcement.start(), *value)
    return None


def _is_label(text: str, position: int) -> bool:
    """Tell whether a line up to a position has no words but a part's number, or is a heading."""
    line = text[text.rfind("\n", 0, position) + 1 : position]
    return line.lstrip().startswith(("#", "**")) or not re.search(r"[^\W\d_]", line[label_length(line) :])


def _value_below(text: str, position: int, *, is_said: bool) -> Interval | None:
    """Find the number or formula behind "the answer is", on the same line or below; not that of a solution's part."""
    gap = _GAP.match(text, position)
    start = gap.end() if gap else position
    if formula := _FORMULA.match(text, start):
        return _content(text, *formula.span(formula.lastindex or 0))
    value = _spoken_value(text, start)
    if value is None:
        return None
    part = _OPENS_PART.match(text, value[1])
    if part and part["label"]:
        number, following = _SMALL.match(text, value[0]), _SMALL.match(text, part.start("below"))
        counts_up = number and following and int(following[1]) == int(number[1]) + 1  # "Answer: 1. Count\n2. Add"
        if "\n" in text[position - 1 : start] or counts_up:
            return None
    if is_said or not re.search(r"\d", text[start : value[0]]):
        return value
    # "Answer: 16 - 3 - 4 = 9" begins a solution if calculations with other results are behind it.
    results = (result["value"] for result in _RESULT.finditer(text, value[1], value[1] + 2000))
    return value if all(result == text[slice(*value)] for result in results) else None


def _last_number(text: str) -> AnswerText | None:
    for position, end in reversed(sentence_intervals(text)):
        value = None
        while match := _VALUE_IN_TEXT.search(text, position, end):
            value = match.span("value")
            rest = _VALUE_TAIL.match(text, value[1], end)
            value = (value[0], rest.end()) if rest else value
            position = value[1]
        if value:
            return AnswerText(value[0], *value)
    return None


def _pattern_answer(speech: Speech, pattern: str | re.Pattern[str]) -> AnswerText | None:
    compiled, group = answer_pattern(pattern)
    for match in reversed(list(compiled.finditer(speech.content))):
        if part := _content_part(speech, match.span(group)):
            return AnswerText(min(match.start(), part[0]), *part)
    return None


def _function_answer(speech: Speech, function: Callable[[str], Interval | None]) -> AnswerText | None:
    interval = function(speech.content)
    if interval is None:
        return None
    is_pair = isinstance(interval, tuple | list) and list(map(type, interval)) == [int, int]
    if not is_pair or not 0 <= interval[0] < interval[1] <= len(speech.text):
        raise ValueError(
            f"answer_format must return None or (start, end), not empty and inside the text's {len(speech.text)} "
            f"characters, got {interval!r}"
        )
    part = _content_part(speech, (interval[0], interval[1]))
    return None if part is None else AnswerText(part[0], *part)


def _content_part(speech: Speech, interval: Interval) -> Interval | None:
    """Cut off what is not content at the ends of an interval; `None` if some is in the middle, or nothing is left."""

    def is_whole() -> bool:
        return speech.content[slice(*interval)] == speech.text[slice(*interval)]

    if not is_whole():
        interval = trimmed(speech.content, *interval)
    return interval if interval[0] < interval[1] and is_whole() else None


def _passage_start(speech: Speech, position: int) -> int:
    """Find where the statement begins that reaches a position, behind the last thought, call, turn or foreign text."""
    end = 0 if speech.statement is speech.text else position
    while end := speech.statement.rfind("\n", 0, end) + 1:
        if speech.text[end - 1] != "\n":
            return end
        end -= 1
    return 0


def _marker_start(speech: Speech, marker: int) -> int:
    r"""Include the words and signs that lead to a marker: "The answer is $" before `\boxed{18}`."""
    text, first = speech.statement, _passage_start(speech, marker)
    while True:
        window = max(first, marker - 400)
        head = text[window:marker].rstrip(" \t\n*_$([{\\#")
        words = _LEADS_TO_MARKER.search(head, max(0, len(head) - 140))
        if words is None:
            return marker - len(text[window + len(head) : marker].lstrip())
        marker = window + words.start()


_OPENING = " \t\n*_$([{\\#>"  # signs between words and what they lead to
_WORD = re.compile(r"(?<![\\\\a-zA-Z])[^\W\d_]")  # but no command's name
_DISPLAY_END = re.compile(r"\\\]|\$\$|\\end\{\w{1,20}\*?\}")
_PAUSE = re.compile(r"(?<!\\\\)[,;:]")


def lead_in_start(speech: Speech, marker: int) -> int:
    """Find where the words begin that lead to a marker: behind the last other number of its sentence, if it has one.

    A line above that ends in a colon, or in a word before a display, leads to the marker too, and so does a heading.
    """
    first = _passage_start(speech, marker)
    text, marker = speech.statement[first:], marker - first
    for _ in range(3):  # sentence, line above, heading
        before, marker = marker, _heading_start(text, _clause_start(text, marker))
        if marker == before:
            break
    return first + marker


def _heading_start(text: str, position: int) -> int:
    """Include a heading without numbers that stands right above a position."""
    head = text[:position].rstrip()
    start = head.rfind("\n") + 1
    line = head[start:]
    is_above = "\n" in text[len(head) : position] and HEADING.fullmatch(line)
    return start if is_above and not re.search(r"\d", line[label_length(line) :]) else position


def _clause_start(text: str, marker: int) -> int:
    head = text[:marker].rstrip(_OPENING)
    line = head.rfind("\n") + 1  # which begins a sentence
    start = line + sentence_intervals(f"{head[line:]} x")[-1][0]  # of the sentence that continues at the marker
    gap = text[len(head) : marker]
    has_display = any(sign in text[len(head) : marker + 2] for sign in ("$$", r"\["))
    is_led_to = head.endswith((":", "：")) or (has_display and head[-1:].isalpha())
    if start > len(head) or ("\n" in gap and not is_led_to):
        return marker
    behind = max([start + label_length(head[start:]), *(end.end() for end in _DISPLAY_END.finditer(head, start))])
    digit = next((i for i in range(len(head) - 1, behind - 1, -1) if head[i].isdecimal()), None)  # the last
    if digit is not None:
        behind = digit + 1
    elif behind == start + label_length(head[start:]):
        return start
    words = (None if digit is None else _PAUSE.search(head.rstrip(":"), behind)) or _WORD.search(head, behind)
    return marker if words is None else words.end() if words.group() in ",;:" else words.start()


def _usual_answer(speech: Speech) -> AnswerText | None:
    hashes = _hashes_answer(speech.statement)
    if hashes and not _OPENS_PART.match(speech.statement, hashes.end):
        return hashes
    other = _boxed_answer(speech.statement) or _stated_answer(speech)
    # Hashes with words behind the number and a line below may be a heading: "#### 3 - Revenue".
    return hashes if hashes and not (other and other.start > hashes.end) else other


def locate_answer(text: str | Speech, rules: AnswerRules = USUAL_ANSWERS) -> AnswerText | None:
    """Find the answer as `answer_text_span` defines it, and where its marker begins; raises what that does."""
    check_class(AnswerRules, answers=rules)
    speech = text if isinstance(text, Speech) else read_speech(text, thought_tags=rules.thought_tags)
    answer_format, answer = rules.answer_format, None
    if answer_format is None:
        answer = _usual_answer(speech)
    elif isinstance(answer_format, str | re.Pattern):
        answer = _pattern_answer(speech, answer_format)
    elif speech.content.strip():  # in a thought that never ended there is none
        answer = _function_answer(speech, answer_format)
    if answer is None:
        return _last_number(speech.statement) if rules.answer_fallback == "last_number" else None
    return answer._replace(marker=_marker_start(speech, answer.marker))


def answer_text_span(text: str, answers: AnswerRules = USUAL_ANSWERS, *, prompt: str = "") -> Interval | None:
    r"""Find the final answer in a completion's text, right or wrong: half-open characters, or `None`.

    The answer follows the last `####` that a number follows, but no heading; else it is inside the box (`\boxed{}`,
    `\fbox{}`) that opens last; else it follows the last statement: "the answer is 18", "Answer: 18", "A: 18" at the
    start of a line, `<answer>18</answer>`. Thoughts (`<think>` and the like, also one that the `prompt` before the
    text opens), calls of tools and their results hold no answer. `answers` may replace these forms; raises
    `ValueError` if its function returns no interval.
    """
    answer = locate_answer(read_speech(text, prompt=prompt, thought_tags=answers.thought_tags), answers)
    return None if answer is None else (answer.start, answer.end)
