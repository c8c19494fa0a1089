"""Read the numbers that completions and data sets give as answers, and reward those that are equal."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import fields
from fractions import Fraction
from typing import Any

from cfa_kernels import AnswerRules, answer_text_span

_LONGEST = 1000  # characters of a number: Python reads no integer of more than 4,300 digits
_MINUS = str.maketrans({"−": "-", "–": "-", "－": "-", "‑": "-"})
_CURRENCY = r"(?:\\?[$€£¥￥₹])?"
_COMMA = r"(?:,(?:\\!)?|\{,\}|\\,|[ \u00a0\u2009\u202f])"  # between thousands
_WHOLE = rf"(?:[1-9]\d{{0,2}}(?:{_COMMA}\d{{3}})+|[1-9]\d?(?:,\d\d)+,\d{{3}}|\d+)(?!\d)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*{_CURRENCY}\s*(?:(?P<whole>{_WHOLE})\s+(?:and\s+)?(?=[1-9]\d*\s*/))?"
    rf"(?P<over>[+-]?{_DECIMAL})(?:\s*/\s*(?P<under>[+-]?{_DECIMAL}))?\s*{_CURRENCY}"
)
_SEPARATORS = re.compile(r"\\[,!]|[{}, \u00a0\u2009\u202f]")
_PART = r"(?:\{\s*([^{}]+?)\s*\}|(\d))"
_FRAC = re.compile(rf"(?:\\[,;:! ]|\s){{0,4}}\\[dtc]?frac\s?{_PART}\s?{_PART}(?!\d)")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_POWER_OF_TEN = re.compile(
    r"(?<!\s)\s*+(?:[×*x·⋅]|\\times|\\cdot)\s*10\^(?:(?P<bare>\d{1,3})|\{(?P<braced>-?\d{1,3})\})\Z"
    r"|[eE](?P<exponent>[+-]?\d{1,3})\Z"
)


def parse_number(text: str) -> Fraction | None:
    """Read the exact value of a written number; None if it is none.

    Forms are `-$1,234.50`, `10 000`, `1.5 × 10^3`, `3/4`, `\\frac{3}{4}`, `\\frac34` and mixed numbers, `1 1/2`,
    `1\\frac{1}{2}`, `1½`. Commas and blanks separate thousands; with others between its digits (`1,2,3`, `99,0`) a text
    is no number.
    """
    text = text.strip().translate(_MINUS)
    if len(text) > _LONGEST:
        return None
    power = _POWER_OF_TEN.search(text)
    scale = Fraction(10) ** int(power["bare"] or power["braced"] or power["exponent"]) if power else 1
    text = text[: power.start()] if power else text
    text = _FRAC.sub(lambda frac: " {}{}/{}{}".format(*(part or "" for part in frac.groups())), text)
    text = _VULGAR.sub(lambda sign: " " + unicodedata.normalize("NFKC", sign[0]).replace("⁄", "/"), text)
    match = _NUMBER.fullmatch(text.strip())
    if match is None or (match["sign"] and match["over"][0] in "+-"):
        return None
    parts = match.group("whole", "over", "under")
    whole, over, under = (
        Fraction(_SEPARATORS.sub("", part or empty)) for part, empty in zip(parts, "011", strict=True)
    )
    if under == 0 or (parts[0] and over >= under):
        return None
    value = (whole + over / under) * scale
    return -value if match["sign"] == "-" else value


def final_number(text: str, *, prompt: str = "", **options: Any) -> Fraction | None:
    """Read the number a completion gives as its answer, None if it gives none.

    `prompt` is the text before it, which may open a thought; `options` are those of `AnswerRules`.
    """
    span = answer_text_span(text, AnswerRules(**options), prompt=prompt)
    return None if span is None else parse_number(text[slice(*span)])


def gold_number(answer: str) -> Fraction | None:
    """Read the number of a data set's answer column: that of a worked solution, or the bare number."""
    number = final_number(answer)
    return parse_number(answer) if number is None else number


def exact_match(
    *, completions: Sequence[str], answer: Sequence[str], completion_contents: Sequence[str] | None = None,
    prompts: Sequence[Any] | None = None, **others: Any,
) -> list[float | None]:  # fmt: skip
    """Give 1 where the completion's number equals that of the data set's answer, else 0.

    Contents are read in the place of completions if they are given; else a prompt that is a text may open a thought for
    its completion. Options are those of `AnswerRules`, by their names.
    """
    options = {entry.name: others[entry.name] for entry in fields(AnswerRules) if entry.name in others}
    before = [""] * len(completions)
    if prompts is not None and completion_contents is None:
        before = [prompt if isinstance(prompt, str) else "" for prompt in prompts]
    texts = zip(completion_contents or completions, before, strict=True)
    numbers = (final_number(text, prompt=prompt, **options) for text, prompt in texts)
    golds = map(gold_number, answer)
    return [float(number is not None and number == gold) for number, gold in zip(numbers, golds, strict=True)]
