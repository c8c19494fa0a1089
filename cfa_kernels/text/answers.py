"""Find the final answer in a completion's text, as characters. docs/spans.md shows the forms as a table."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .patterns import (
    ANNOTATION,
    BLANK,
    CURRENCY,
    DIGITS,
    EQUALS,
    FRACTION,
    GROUP,
    MINUS,
    SENTENCE_END,
    Interval,
    sentence_intervals,
    trimmed,
)
from .rules import USUAL_ANSWERS, AnswerFormat, AnswerRules, answer_pattern


class AnswerText(NamedTuple):
    """Characters of an answer and of the marker before it: `marker <= start < end`."""

    marker: int
    start: int
    end: int


# --- Values: what an answer is made of --------------------------------------------------------------------------
# As in `patterns.py`, every repetition is bounded or cannot overlap itself: matching is linear in the text.

_FILLERS = (
    "the|final|answer|is|option|about|approximately|roughly|around|exactly|precisely|only|just|simply|therefore|thus"
    "|hence|then|indeed|actually|still|now|clearly|also|equals"
)
_LEAD = (
    rf"(?:{ANNOTATION}|{BLANK}|{CURRENCY}|[*_`~≈=:：(\[{{<\"'“‘【约]|\\[(\[,;!]|\\approx"
    rf"|\\(?:boxed|fbox|text|textbf|mathbf|mathrm)\s?\{{|(?i:equal to|a total of)\b"
    rf"|(?:(?i:{_FILLERS})|an?)\b(?!\s?=)|[^\W\d]\w{{0,30}}\s?=){{0,30}}"  # "a =" can be read in one way only
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
    rf"(?:[\s*_.,;:!)\]}}°¢。，\"'”’]|{CURRENCY}|\\?%|\\[,;!)\] ]|\^\{{?\\circ\}}?|(?<=[a-zA-Z}}])\^\{{?[23]\}}?"
    rf"|\\(?:text|mathrm|mbox)\s?{GROUP}|/?(?<![^\W\d_])[^\W\d_]{{2,}}(?![^\W\d_])){{0,60}}"
)
_WHOLLY_TEXT = re.compile(r"\\(?:text|textbf|textrm|mathbf|mathrm|mbox)\s?\{([^{}]{1,200})\}")
_DIGIT = re.compile(r"\d")


def _value_after(pattern: re.Pattern[str], text: str, position: int, limit: int) -> Interval | None:
    """Find the value that `pattern` announces at `position`; of a chain `3 * 6 = 18`, its last member."""
    match = pattern.match(text, position, limit)
    found = None
    while match:
        found = match.span("value")
        match = _EQUALS_VALUE.match(text, found[1], limit)
    return found


def _values_in(text: str, start: int, end: int) -> Iterator[Interval]:
    """List the values in `[start, end)`, a chain as its last member; not the number of a list item that opens it."""
    position = start
    while match := _VALUE_IN_TEXT.search(text, position, end):
        value = _value_after(_VALUE_IN_TEXT, text, match.start(), end) or match.span("value")
        position = value[1]
        if match.start() > start or not _LIST_ITEM.match(text, value[1]):
            yield value


def _content(text: str, start: int, end: int) -> Interval | None:
    r"""Read the answer in a box or a tag: one number without its units, else all that is not blanks or `\text`."""
    start, end = trimmed(text, start, end)
    value = _value_after(_LEAD_AND_VALUE, text, start, end)
    if value and _UNITS_ONLY.fullmatch(text, value[1], end):
        return value
    wholly = _WHOLLY_TEXT.fullmatch(text, start, end)
    if wholly and wholly[1].strip():
        start, end = trimmed(text, *wholly.span(1))
    return (start, end) if start < end else None


# --- Thoughts ---------------------------------------------------------------------------------------------------

_THOUGHT_TAG = re.compile(r"<(/?)think(?:ing)?>")


def _spoken(text: str) -> str:
    """Replace a model's thoughts by as many line breaks; only text outside thoughts can be an answer.

    A closing tag without an opening one ends a thought that began in the prompt, as in chat templates.
    """
    if "think" not in text:
        return text
    parts: list[str] = []
    spoken_to, opened = 0, None
    for tag in _THOUGHT_TAG.finditer(text):
        if not tag[1]:
            opened = tag.start() if opened is None else opened
        elif opened is not None or not parts:
            opened = opened or 0
            parts += [text[spoken_to:opened], "\n" * (tag.start() - opened)]
            spoken_to, opened = tag.start(), None
    if opened is not None:
        parts += [text[spoken_to:opened], "\n" * (len(text) - opened)]
        spoken_to = len(text)
    return "".join([*parts, text[spoken_to:]])


# --- Boxes ------------------------------------------------------------------------------------------------------

_BRACE = re.compile(r"\\(?:boxed|fbox)\s{0,3}(?:\{|(?=[\d\-+.$]))|\\.|[{}]", re.DOTALL)


def _boxed_answer(text: str) -> AnswerText | None:
    """Find the non-empty box that opens last; its marker is the outermost box around it."""
    if r"\boxed" not in text and r"\fbox" not in text:
        return None
    boxes: list[tuple[int, int, int | None]] = []
    open_braces: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text):
        found = brace.group()
        if found == "}" and open_braces:
            opened = open_braces.pop()
            if opened.group() != "{":
                boxes.append((opened.start(), opened.end(), brace.start()))
        elif found.endswith("{") and found != r"\{":
            open_braces.append(brace)
        elif found.startswith((r"\boxed", r"\fbox")):  # "\boxed 5"
            boxes.append((brace.start(), brace.end(), None))
    outermost: list[int] = []
    last = -1
    boxes.sort()
    for marker, _, end in boxes:
        inside = marker < last
        outermost.append(outermost[-1] if inside else marker)
        last = last if inside else end or marker
    for marker, (_, start, end) in reversed(list(zip(outermost, boxes, strict=True))):
        value = _value_after(_LEAD_AND_VALUE, text, start, len(text)) if end is None else _content(text, start, end)
        if value:
            return AnswerText(marker, *value)
    return None


# --- Statements: "The answer is 18" -------------------------------------------------------------------------------

_NAMED = (
    r"(?<![/\w-])(?i:(?:\b(?:so|thus|therefore|hence),?\s)?(?:\b(?:the|our|my|your)\s)?"
    r"(?:\b(?:final|correct|right|numeric|numerical)\s)?\banswer\b)"
)
_IS = (
    r"[*_]{0,3}(?i:\s(?:to|for)\s[^\n.!?:：]{1,80}?)?"
    r"\s{1,3}(?i:(?:is|equals|(?:would|will|should|must) be)\b|=)"
)
_COLON = rf"[*_]{{0,3}}{BLANK}?[:：]"
_LINE = rf"^[#*_> \t]{{0,8}}{_NAMED}[*_:： \t]{{0,8}}"
_CHINESE_IS = r"(?:(?:所以|因此|故)[,，]?)?(?:最终|正确|最后)?的?答案(?:应该|应|就)?(?:是|为|等于)"
_CHINESE_COLON = r"【(?:最终|正确|参考)?答案】|(?:最终|正确|参考)?答案\s?[:：]|(?:^|(?<=[。！？\s]))答\s?[:：]"
# Those named "is" begin a sentence about the answer, those named "colon" may as well head a whole solution.
_ANNOUNCEMENT = re.compile(
    rf"(?P<tag>(?i:<answer>))|(?P<line>{_LINE}\n)|{_NAMED}(?:(?P<colon>{_COLON})|(?P<is>{_IS}))"
    rf"|(?P<letter>^[*_> \t]{{0,8}}A{_COLON})|(?P<chinese_is>{_CHINESE_IS})|(?P<chinese_colon>{_CHINESE_COLON})",
    re.MULTILINE,
)
# Every announcement holds one of these; for speed, the whole pattern is tried only near them.
_KEYWORD = re.compile(rf"nswer|NSWER|答(?=案|\s?[:：])|^[*_> \t]{{0,8}}A{_COLON}", re.MULTILINE)
_BEFORE_KEYWORD, _AFTER_KEYWORD = 48, 120
_ANNOUNCED_AT_END = re.compile(
    rf"(?:{_NAMED}(?:{_COLON}|{_IS})|{_LINE}|{_CHINESE_IS}|{_CHINESE_COLON})\W{{0,12}}\Z", re.MULTILINE
)
_SUPPOSED = re.compile(r"\b(?i:if|whether|unless|suppose|supposing|assume|assuming)(?:\sthat)?\s\Z")
_OPTION_B = re.compile(r"^\W{0,8}B[*_]{0,3}\s?[:：]", re.MULTILINE)
_CLOSING_TAG = "</answer>"

_GAP = re.compile(r"[\s*_:：]{0,16}(?:(?<=\n)[-•]\s)?")
_LIST_ITEM = re.compile(rf"[.)][*_]{{0,3}}{BLANK}+[*_]{{0,3}}[^\W\d_]")
_MATHS = re.compile(
    r"\$\$(?P<display>[^$]{1,300})\$\$|\$(?P<inline>(?!\s)[^$\n]{1,200}(?<![\s\\+*/=-]))\$(?!\d)"
    r"|\\\[(?P<brackets>(?:[^\\]|\\[^\]]){1,300})\\\]|\\\((?P<parentheses>(?:[^\\\n]|\\[^)\n]){1,200})\\\)"
)
_PROSE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
_CODE = re.compile(r"```\w{0,12}\n\s{0,8}")
_CHOICE = re.compile(
    r"(?:[*_`$【\"'“ \t]|\\(?:text|textbf|mathbf|mathrm)\s?\{|\\\(|(?i:option|choice|letter)\b){0,12}"
    r"(?:\((?P<bracketed>[A-Ja-j])\)|(?P<bare>[B-HJ]|[AI](?!\s[a-z]))(?![A-Za-z0-9_'’])(?!\s?[=+/^<>\\]|\s?\*\s?\w|\s?-\s?\d))"
)
_NUMBER_WORD = (
    "(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen"
    "|eighteen|nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|hundred|thousand|million|billion)"
)
# By itself or with a unit up to the end of its sentence: "one of these" is not a number.
_IN_WORDS = re.compile(
    rf"{_LEAD}(?P<value>(?i:{_NUMBER_WORD}(?:[\s-](?:and\s)?{_NUMBER_WORD}){{0,8}}))\b"
    rf"(?={BLANK}?(?:(?!of\b|that\b|who|which\b|more\b|less\b)[^\W\d_]{{2,20}}{BLANK}?){{0,2}}[*_\"')}}]{{0,4}}(?:[.!,;。]|\s*\Z|\n))"
)
_VERDICT = re.compile(
    r"\W{0,4}(?i:correct|right|wrong|incorrect|no|yes|true|false|consistent|reasonable|verified|valid|confirmed)\b"
)
_DENIED = re.compile(r"\b(?i:not|never|no longer)\b|n['’]t\b|不")
_BUT = re.compile(r"\b(?i:but|rather|instead)\b|而是")
_EMPHASISED = re.compile(rf"(?:\*\*|__|\\textbf\{{|\\mathbf\{{){CURRENCY}?\Z")
_POINTED_AT = re.compile(
    rf"(?:=|\b(?i:is|are|be|but|equals|equal to|gives|makes)\b|[是为])[\s*_:：]{{0,6}}{CURRENCY}?\Z"
)
_REACH = 300
"""Characters within which a sentence about the answer must end."""


def _announced_value(text: str, announcement: re.Match[str], closing: int) -> Interval | None:
    """Find the value that one announcement gives, or `None`; `closing` is where the last closing tag begins."""
    kind = announcement.lastgroup or ""
    start = announcement.end()
    if _SUPPOSED.search(text, max(0, announcement.start() - 24), announcement.start()):
        return None
    if kind == "tag":
        if closing >= start:
            return _content(text, start, text.index(_CLOSING_TAG, start))
        value = _value_after(_LEAD_AND_VALUE, text, start, len(text))  # the closing tag may be what stopped sampling
        return value if value and _UNITS_ONLY.fullmatch(text, value[1]) else None
    gap = _GAP.match(text, start)
    start = gap.end() if gap else start
    if code := _CODE.match(text, start):
        start = code.end()
    maths = _MATHS.match(text, start)
    if maths and maths.lastgroup and not _PROSE.search(_without_text(maths[maths.lastgroup])):
        return _content(text, *maths.span(maths.lastgroup))
    for pattern in (_LEAD_AND_VALUE, _IN_WORDS):
        value = _value_after(pattern, text, start, len(text))
        if value:
            return None if _is_asked_or_part_of_a_solution(text, announcement, start, value) else value
    choice = _CHOICE.match(text, start)
    if choice and choice.lastgroup:
        return choice.span(choice.lastgroup)
    return _value_in_sentence(text, start, must_be_last=not kind.endswith("is"))


def _without_text(maths: str) -> str:
    return re.sub(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s?\{[^{}]{0,100}\}|\\[a-zA-Z]+", "", maths)


def _is_asked_or_part_of_a_solution(text: str, announcement: re.Match[str], start: int, value: Interval) -> bool:
    ending = SENTENCE_END.search(text, value[1], value[1] + _REACH)
    if ending and ending.group()[0] in "?？":
        return True
    if "\n" in text[announcement.end() - 1 : start] and _LIST_ITEM.match(text, value[1]):
        return True  # "Answer:\n1. Find the cost"
    if (announcement.lastgroup or "").endswith("is"):
        return False
    first = _LEAD_AND_VALUE.match(text, start)
    worked_out = first is not None and first.end("value") < value[0]
    return worked_out and bool(_DIGIT.search(text, ending.end() if ending else value[1]))


def _value_in_sentence(text: str, start: int, *, must_be_last: bool) -> Interval | None:
    """Find the number of a sentence about the answer: the only, the emphasised, or the last that "is" points at."""
    ending = SENTENCE_END.search(text, start, start + _REACH)
    if ending is None and start + _REACH < len(text):
        return None
    end = ending.start() if ending else len(text)
    if (ending and ending.group()[0] in "?？") or _VERDICT.match(text, start, end):
        return None
    if _DENIED.search(text, start, end):
        contrasts = list(_BUT.finditer(text, start, end))
        if not contrasts:
            return None
        start = contrasts[-1].end()
    values = list(_values_in(text, start, end))
    if len(values) > 1:
        emphasised = [value for value in values if _EMPHASISED.search(text, start, value[0])]
        values = emphasised if len(emphasised) == 1 else values
    if len(values) > 1:
        values = [value for value in values if _POINTED_AT.search(text, max(start, value[0] - 20), value[0])][-1:]
    if not values or (must_be_last and _DIGIT.search(text, end)):
        return None
    return values[0]


def _stated_answer(text: str) -> AnswerText | None:
    announcements: list[re.Match[str]] = []
    position = 0
    for keyword in _KEYWORD.finditer(text):
        start = max(position, keyword.start() - _BEFORE_KEYWORD)
        reach = 12 if keyword.group() == "答" else _AFTER_KEYWORD
        announcement = _ANNOUNCEMENT.search(text, start, keyword.end() + reach)
        if announcement:
            announcements.append(announcement)
        # An announcement that holds this keyword would have been found: the next begins behind the keyword's start.
        position = announcement.end() if announcement else keyword.start() + 1
    if any(announcement.lastgroup == "letter" for announcement in announcements) and _OPTION_B.search(text):
        announcements = [announcement for announcement in announcements if announcement.lastgroup != "letter"]
    closing = text.rfind(_CLOSING_TAG)
    for announcement in reversed(announcements):
        value = _announced_value(text, announcement, closing)
        if value:
            return AnswerText(announcement.start(), *value)
    return None


# --- Hashes -------------------------------------------------------------------------------------------------------

_HASHES = re.compile(rf"#{{4,}}{BLANK}*\n?")
_HEADING = re.compile(rf"[.):：][*_]{{0,3}}{BLANK}+[*_]{{0,3}}[^\W\d_]")
_NUMBERED = re.compile(rf"^#{{1,6}}{BLANK}*[*_]{{0,3}}(\d{{1,2}})[.):：]", re.MULTILINE)
_CHOICE_ALONE = re.compile(r"[*_\s]{0,6}\(?(?P<value>[A-J])\)?[*_.]{0,4}[^\S\n]*(?:\n|\Z)")
_LAST_HEADING = re.compile(rf"^#{{1,3}}{BLANK}+", re.MULTILINE)


def _hashes_answer(text: str, boxed: AnswerText | None) -> AnswerText | None:
    numbered: dict[str, int] | None = None
    later = 0
    closing = text.rfind(_CLOSING_TAG)
    for hashes in reversed(list(_HASHES.finditer(text))):
        value = _value_after(_LEAD_AND_VALUE, text, hashes.end(), len(text))
        if value is None:
            choice = _CHOICE_ALONE.match(text, hashes.end())
            value = choice.span("value") if choice else None
        if value is None:
            line = _ANNOUNCEMENT.match(text, hashes.start()) or _ANNOUNCEMENT.match(text, hashes.end())
            value = _announced_value(text, line, closing) if line else None
        elif _HEADING.match(text, value[1]):
            if numbered is None:
                numbered = {match[1]: match.start() for match in reversed(list(_NUMBERED.finditer(text)))}
                later = max((answer.start for answer in (boxed, _stated_answer(text)) if answer), default=0)
            if _is_numbered_heading(text, value, numbered, later):
                continue
        if value:
            return AnswerText(hashes.start(), *value)
    return None


def _is_numbered_heading(text: str, value: Interval, numbered: dict[str, int], later: int) -> bool:
    """Whether "#### 2. Add the tips" heads a part of the solution, rather than give 2 as the answer.

    It does if its number continues an earlier one (`numbered`: first place of each), if it is 1 with a part below it,
    or if an answer of another kind comes after it (at `later`).
    """
    number = text[slice(*value)]
    if not number.isdecimal() or len(number) > 2:
        return False
    follows = numbered.get(str(int(number) - 1), value[0]) < value[0]
    return follows or (number == "1" and text.find("\n", value[1]) >= 0) or later > value[1]


def _last_heading_answer(text: str) -> AnswerText | None:
    r"""Find a number with its units that is a whole heading, "### 18", on the last line."""
    for heading in reversed(list(_LAST_HEADING.finditer(text, max(0, len(text) - _REACH)))):
        value = _value_after(_LEAD_AND_VALUE, text, heading.end(), len(text))
        if value and "\n" not in text[value[1] :].rstrip() and _UNITS_ONLY.fullmatch(text, value[1]):
            return AnswerText(heading.start(), *value)
    return None


# --- A run's own form -----------------------------------------------------------------------------------------------


def _pattern_answer(text: str, pattern: str | re.Pattern[str]) -> AnswerText | None:
    compiled, group = answer_pattern(pattern)
    found = [match for match in compiled.finditer(text) if match.start(group) < match.end(group)]
    return AnswerText(min(found[-1].start(), found[-1].start(group)), *found[-1].span(group)) if found else None


def _function_answer(text: str, function: Callable[[str], Interval | None]) -> AnswerText | None:
    interval = function(text)
    if interval is None:
        return None
    if not (
        isinstance(interval, tuple | list)
        and len(interval) == 2
        and all(isinstance(edge, int) and not isinstance(edge, bool) for edge in interval)
    ):
        raise TypeError(f"answer_format must return None or characters (start, end), got {interval!r}")
    start, end = interval
    if not 0 <= start < end <= len(text):
        raise ValueError(f"answer_format returned ({start}, {end}): empty or outside the text's {len(text)} characters")
    return AnswerText(start, start, end)


# --- All together ---------------------------------------------------------------------------------------------------


def _last_number(text: str) -> AnswerText | None:
    for start, end in reversed(sentence_intervals(text)):
        values = list(_values_in(text, start, end))
        if values:
            return AnswerText(values[-1][0], *values[-1])
    return None


def _marker_start(text: str, marker: int) -> int:
    r"""Include the words and signs that lead to a marker: "The answer is $" before `\boxed{18}`."""
    for _ in range(3):
        window = max(0, marker - 400)
        head = text[window:marker].rstrip(" \t\n*_$([{\\#")
        tail = max(0, len(head) - 140)
        found = _ANNOUNCED_AT_END.search(head, tail) if _KEYWORD.search(head, tail) else None
        if found is None:
            break
        marker = window + found.start()
    window = max(0, marker - 400)
    head = text[window:marker].rstrip(" \t\n*_$([{\\#")
    passed = text[window + len(head) : marker]
    return window + len(head) + len(passed) - len(passed.lstrip())


def locate_answer(text: str, rules: AnswerRules = USUAL_ANSWERS) -> AnswerText | None:
    """Find the answer as `answer_text_span` defines it, and where its marker begins; raises what that does."""
    answer_format = rules.answer_format
    said = _spoken(text)
    if answer_format is None:
        boxed = _boxed_answer(said)
        answer = _hashes_answer(said, boxed) or boxed or _stated_answer(said) or _last_heading_answer(said)
    elif isinstance(answer_format, str | re.Pattern):
        answer = _pattern_answer(said, answer_format)
    else:
        answer = _function_answer(text, answer_format)
    if answer is None:
        return _last_number(said) if rules.answer_fallback == "last_number" else None
    return answer._replace(marker=_marker_start(said, answer.marker))


def answer_text_span(
    text: str, *, answer_format: AnswerFormat | None = None, answer_fallback: str | None = None
) -> Interval | None:
    r"""Find the final answer in a completion's text, right or wrong; `None` where there is none.

    In this order: after the last `####` that an answer follows (not a numbered heading, "#### 2. Add the tips"); else
    inside the non-empty balanced `\boxed{}` or `\fbox{}` that opens last, so of nested ones the inner; else after the
    last statement: "the answer is 18", "Final Answer: 18", a heading or line "Answer" with 18 below it, "A: 18" at the
    start of a line, `<answer>18</answer>`, "答案是18", "【答案】18". Text between `<think>` and `</think>`, or after
    a `<think>` that is not closed, is never an answer.

    Currency signs, emphasis, brackets, `\boxed` and "the answer is" may stand between marker and number and are not
    part of it, nor are units and percent signs. The number may carry a sign (ASCII, Unicode minus or en dash, also
    before the currency sign: `-$5`), thousands separators, decimals (`18.00`, but not the full stop of `18.`), a power
    of ten (`1e6`), and may be a fraction, a ratio or a time of day (`5:30`). Of a chain `3 * 6 = 18` the answer is its
    last member; a sum without result (`36+36`) is returned whole, so that it does not pass for a number. A box, a tag
    or a formula after "the answer is" that holds anything but one number with its units is returned whole without outer
    blanks and `\text`. A statement may also give the letter of a choice ("(C)") or a number in words; where words
    stand before its number, it must be the sentence's only one, the emphasised one, or one that "is" or "but" points
    at. Statements that deny ("not 5"), ask or suppose ("if the answer is 5") give none.

    Args:
        text: decoded completion.
        answer_format: the run's own form, instead of all of the above: a regular expression whose one group, or group
            `answer`, is the answer (the last match counts; it reads the text with thoughts blanked out), or a function
            from the whole text to half-open characters or None.
        answer_fallback: "last_number" takes, where nothing is found so far, the last number of the last sentence that
            holds one; None takes nothing.

    Returns:
        Half-open character interval, never empty.

    Raises:
        TypeError, ValueError: a pattern that does not compile or lacks its group, a function that returns anything
            else, an unknown fallback; names the option and the value.
    """
    answer = locate_answer(text, AnswerRules(answer_format, answer_fallback))
    return None if answer is None else (answer.start, answer.end)
