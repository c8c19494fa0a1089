"""Find the final answer in a completion's text, as characters. docs/spans.md lists its forms."""

import re
from collections.abc import Callable
from typing import NamedTuple

from ..options import check_class
from .markup import Speech, read_speech, unfinished_number
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
    """Characters of an answer and of the marker before it: `marker <= start < end`; empty, it retracts those before."""

    marker: int
    start: int
    end: int


_COLON = rf"{BLANK}?[:：]"
_TEXT = r"\\(?:text(?:bf|it|rm|sf)?|math(?:bf|it|rm)|mbox)\s?"
_SPACE = r"(?:\\[,;:! ]|\\(?:q?quad|left|right|(?:display|text)style)(?![a-zA-Z]))"
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
    rf"(?:{ANNOTATION}|{BLANK}|{CURRENCY}|(?!{_TUPLE})[(\[{{]|[*_`~≈=:：}}<\"'“‘]|\\[(\[]|{_SPACE}|\\approx"
    r"|[←-⇿☀-➿\ufe0f\U0001f300-\U0001faff]"  # "✅ 18", "→ 18"
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

# What makes a number one of two, or a part of a measure: "5 or 6", "between 5 and 10", "3 hours 30 minutes".
_WORDS = r"(?:[%°*_$)]|\\\$|\s?(?!(?:or|and|to|through)\b)[^\W\d_]{1,20}(?!\s?=)){0,4}+"
_PART = (
    r"(?:(?:year|month|week|day|ho?u?r|min(?:ute)?|sec(?:ond)?|dollar|cent|pound|lb|ounce)s?|oz|[hms]|f[oe]*t"
    r"|in(?:ches)?)"
)
_OTHER = re.compile(
    rf"{BLANK}?{_PART},?{BLANK}?(?:and{BLANK})?\d{{1,4}}{BLANK}?{_PART}\b"
    rf"|{_WORDS},?\s?\(?(?:\b(?:(?P<and>and)|or|to|through|vs|maybe|possibly|perhaps)\b\.?|[~&]){BLANK}?"
    r"(?:(?:is it|maybe|perhaps|possibly|even|about|around|[^\W\d_]\s?=)\s?){0,2}"
    rf"(?:[*_$]{{0,3}}{CURRENCY}?(?P<other>{_VALUE})(?!\s(?:decimal|significant|d\.p|places))"
    r"|(?:more|less|fewer|one|two|three|four|five|six|seven|eight|nine|ten|an?\shalf|half)\b|\s{0,40}\Z)",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"(?i)(?:\b(?:not|never|n?either|nor|between)|n['’]t)\b[^\d\n]{0,30}\Z"
    r"|\b(?:step|part|case|stage|option|choice|question|problem|equation|method)\W{1,3}\Z"
)
_OPEN_WORDS = re.compile(
    r"(?i)\b(?:not|no|never|n?either|n?or|between|unless|if|maybe|perhaps|might|may|unsure|unknown|wrong"
    r"|incorrect|least|most|more than|less than|fewer|over|under|first|need|let|start|begin|option|choice|case|part"
    r"|step|stage|method|equation|question|problem)\b|n['’]t\b|\?"
)
_HEADING_LABEL = re.compile(r"\W{0,8}(?i:step|part|case|stage)\s\d{1,3}\b|#{1,6}\W{0,4}\d{1,2}\s?[^\w\s]")
_BOLD = re.compile(r"\*\*([^*\n]{1,80})\*\*")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
# A number of a list's item with words behind it.
_ITEM = re.compile(
    rf"[*_]{{0,3}}(?:{BLANK}?\\?[.):：、]|\ufe0f?\u20e3|{BLANK}[-–—|])(?:[^\w\n]|_){{0,40}}+[^\W\d_][^\n]{{0,300}}"
)


def _with(tail: re.Pattern[str], text: str, value: Interval, limit: int) -> Interval:
    rest = tail.match(text, value[1], limit)
    return (value[0], rest.end()) if rest else value


def _value_at(text: str, position: int, limit: int) -> Interval | None:
    """Find the value that words and signs lead to; of a chain `3 * 6 = 18` its last member, a sum without one whole."""
    match, value = _LEAD_AND_VALUE.match(text, position, limit), None
    while match:
        value = match.span("value")
        match = _EQUALS_VALUE.match(text, value[1], limit)
    return value and _with(_NO_RESULT, text, value, limit)


def _spoken_value(text: str, position: int, tail: re.Pattern[str] = _VALUE_TAIL) -> Interval | None:
    """Find the value in a sentence or on a line, with what makes it another number or none."""
    value = _value_at(text, position, len(text))
    return value and _with(tail, text, value, len(text))


def _is_one_of_two(text: str, value: Interval, sentence: int | None = None) -> bool:
    """Tell whether a value is one of two that differ, a range's end or a part of a measure."""
    other = _OTHER.match(text, value[1])
    if other is None or other["other"] == text[slice(*value)]:
        return False
    # In a sentence, two values with "and" between them are two facts, but for "between" and the like.
    return sentence is None or not other["and"] or bool(_DENIED.search(text, sentence, value[0]))


def _numbers_item(text: str, value: Interval, most: int) -> bool:
    """Tell whether a value up to `most` is the number of a list's item, whose words do not repeat it."""
    number, item = text[slice(*value)], _ITEM.match(text, value[1])
    is_small = number.isdecimal() and int(number[:4]) <= most
    return item is not None and is_small and number not in _NUMBER.findall(item[0])


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
    rf"(?P<end><\|end_of_box\|>)|(?P<opens>(?P<begin><\|begin_of_box\|>)|\\(?:boxed|fbox)\s{{0,3}}(?:\{{|\Z))"
    rf"|\\(?:boxed|fbox)\s{{0,3}}(?:\\\$)?(?P<bare>{_SUM}(?:{_TAIL}|!)?|[a-zA-Z](?![a-zA-Z]))|\\.|[{{}}]",
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
    rf"(?P<tag><(?i:answer)>)|(?P<letter>^[*_> \t]{{0,8}}A[*_]{{0,3}}{_COLON}(?!{_OPTIONS}))|{_STATEMENT}", re.MULTILINE
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
        if value and not ((part and part["label"]) or _numbers_item(text, value, 99)):  # "#### 2. Add the tips"
            return AnswerText(hashes.start(), value[0], value[0] if _is_one_of_two(text, value) else value[1])
    return None


def _boxed_answer(text: str) -> AnswerText | None:
    """Find the box that opens last; its marker is the outermost box around it. Cut or empty it retracts the others."""
    boxes: list[tuple[int, int, int]] = []
    opened: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text) if any(sign in text for sign in (r"\boxed", r"\fbox", "_of_box|>")) else ():
        opening = None
        if brace["bare"]:
            boxes.append((brace.start(), *brace.span("bare")))
        elif brace["end"] and any(one["begin"] for one in opened):
            while not (opening and opening["begin"]):
                opening = opened.pop()
        elif brace.group() == "}":
            opening = opened.pop() if opened and not opened[-1]["begin"] else None  # only its end closes a box token
        elif brace["opens"] or brace.group() == "{":
            opened.append(brace)
        if opening and opening["opens"]:
            boxes.append((opening.start(), opening.end(), brace.start()))
    boxes.sort(reverse=True)
    cut = max((brace.start() for brace in opened if brace["opens"]), default=-1)
    if cut > max((start for start, _, _ in boxes), default=-1):
        return AnswerText(cut, cut, cut)
    for own, start, end in boxes:
        marker = min(first for first, _, last in boxes if first <= own and end <= last)
        if value := _content(text, start, end):
            return AnswerText(marker, *value)
        if marker == own and len(boxes) > 1:
            return AnswerText(own, own, own)
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
            is_heading = not announcement["letter"] and (not announcement["verb"] or ":" in text[start : start + 5])
            value = _sentence_value(text, start) if value is None and is_heading else value
            if value and speech.text[start : value[1]] != text[start : value[1]]:
                value = None  # a tool wrote in between
        if value:
            return AnswerText(announcement.start(), value[0], value[0] if _is_one_of_two(text, value) else value[1])
    return None


def _sentence_value(text: str, position: int) -> Interval | None:
    """Find the number behind a heading, if its sentence has but one, or one in bold, and leaves nothing open."""
    gap = _GAP.match(text, position)
    position = gap.end() if gap else position
    for start, end in sentence_intervals(text[position : position + 400])[:1]:
        start, end = position + start, position + end
        bold = [part.span(1) for part in _BOLD.finditer(text, start, end) if re.search(r"\d", part[1])]
        first, last = bold[0] if len(bold) == 1 else (start, end)
        number = _VALUE_IN_TEXT.search(text, first, last)
        value = _spoken_value(text, number.start("value")) if number else None
        if value is None or value[1] > last or re.search(r"\d", text[value[1] : last]):
            return None
        behind = _NUMBER.findall(text, end, end + 2000)
        is_open = _OPEN_WORDS.search(text, start, end) or label_length(text[start:end])
        return None if is_open or {*behind} - {text[slice(*value)]} else value  # more numbers: a solution begins
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
    if _numbers_item(text, value, 1):  # "Answer: 1. First, we"
        return None
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
    for start, end in reversed(sentence_intervals(text)):
        label = _HEADING_LABEL.match(text, start, end)
        position, before, value = label.end() if label else start, None, None
        while match := _VALUE_IN_TEXT.search(text, position, end):
            before, value = value, _with(_VALUE_TAIL, text, match.span("value"), end)
            position = value[1]
        if value:
            is_second = before and _is_one_of_two(text, before, start)
            is_open = is_second or _is_one_of_two(text, value, start) or _DENIED.search(text, start, value[0])
            return None if is_open else AnswerText(value[0], *value)
    return None


def _own_answer(speech: Speech, own: str | re.Pattern[str] | Callable[[str], Interval | None]) -> AnswerText | None:
    """Find the answer in the run's own format; what is not content is cut off its ends, and makes it none inside."""
    if isinstance(own, str | re.Pattern):
        compiled, group = answer_pattern(own)
        found = [AnswerText(match.start(), *match.span(group)) for match in compiled.finditer(speech.content)]
    else:
        interval = own(speech.content) if speech.content.strip() else None  # a thought that never ended has none
        is_pair = isinstance(interval, tuple | list) and list(map(type, interval)) == [int, int]
        if interval is not None and not (is_pair and 0 <= interval[0] < interval[1] <= len(speech.text)):
            raise ValueError(
                f"answer_format must return None or (start, end), not empty and inside the text's {len(speech.text)} "
                f"characters, got {interval!r}"
            )
        found = [AnswerText(interval[0], *interval)] if interval else []
    for marker, start, end in reversed(found):
        if speech.content[start:end] != speech.text[start:end]:
            start, end = trimmed(speech.content, start, end)
        if start < end and speech.content[start:end] == speech.text[start:end]:
            return AnswerText(min(marker, start), start, end)
    return None


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
        marker = _heading_start(text, _clause_start(text, marker))
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
    other = _boxed_answer(speech.statement)
    if other is None or other.start == other.end:
        stated = _stated_answer(speech)
        other = stated if stated and (other is None or stated.marker > other.marker) else other
    # Hashes with words behind the number and a line below may be a heading: "#### 3 - Revenue".
    return hashes if hashes and not (other and other.start > hashes.end) else other


def locate_answer(text: str | Speech, rules: AnswerRules = USUAL_ANSWERS) -> AnswerText | None:
    """Find the answer as `answer_text_span` defines it, and where its marker begins; raises what that does."""
    check_class(AnswerRules, answers=rules)
    speech = text if isinstance(text, Speech) else read_speech(text, thought_tags=rules.thought_tags)
    own = rules.answer_format
    answer = _usual_answer(speech) if own is None else _own_answer(speech, own)
    if answer is None:
        return _last_number(speech.statement) if rules.answer_fallback == "last_number" else None
    if answer.start == answer.end:
        return None
    return answer._replace(marker=_marker_start(speech, answer.marker))


def answer_text_span(
    text: str, answers: AnswerRules = USUAL_ANSWERS, *, prompt: str = "", truncated: bool = False
) -> Interval | None:
    r"""Find the final answer in a completion's text, right or wrong: half-open characters, or `None`.

    The answer follows the last `####` that a number follows, but no heading; else it is inside the box (`\boxed{}`,
    `\fbox{}`) that opens last; else it follows the last statement: "the answer is 18", "Answer: 18", "A: 18" at the
    start of a line, `<answer>18</answer>`. Thoughts (`<think>` and the like, also one that the `prompt` before the
    text opens), calls of tools and their results hold no answer, nor does what follows once the text asks the next
    question itself. If the text is `truncated`, a number at its very end may not be whole and is none. `answers` may
    replace these forms; raises `ValueError` if its function returns no interval.
    """
    foreign = unfinished_number(text) if truncated else ()
    speech = read_speech(text, prompt=prompt, foreign=foreign, thought_tags=answers.thought_tags)
    answer = locate_answer(speech, answers)
    return None if answer is None else (answer.start, answer.end)
