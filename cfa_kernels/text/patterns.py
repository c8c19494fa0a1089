"""Find numbers and sentences in a text, as character intervals, for all modules of this package."""

import re

Interval = tuple[int, int]
"""Half-open characters of a text."""

# Every repetition is bounded or cannot overlap itself, so that matching is linear in whatever a model emits.

BLANK = r"[^\S\n]"
GROUP = r"\{(?:[^{}\n]|\{[^{}\n]{0,60}\}){1,60}\}"
DIGITS = (
    r"(?:\d{1,2}(?:,\d\d){1,4},\d{3}(?!\d)"  # 12,34,567
    r"|\d{1,3}(?:[ \u00a0\u2009\u202f]\d{3}){1,4}(?![\d,])"  # 12 345
    r"|\d+(?:(?:,(?:\\!)?|\{,\}|\\,)\d{3}(?!\d)){0,9}(?:\.\d+)?|\.\d+)"
)
FRACTION = rf"\\[dtc]?frac\s?(?:{GROUP}|\d)\s?(?:{GROUP}|\d)"
MINUS = r"\-−–－‑"  # for use inside [...]
CURRENCY = r"(?:\\?\$|[€£¥￥₹])"
ANNOTATION = r"<<[^<>\n]{0,200}>>"
EQUALS = r"(?:&?[=＝]=?(?!>)&?|[≈≅≤≥]|\\(?:approx|leq?|geq?)(?![a-zA-Z]))"

LETTER_OR_DIGIT = re.compile(r"[^\W_]")
# One class of characters first, for which the engine skips over a text in less than half of the time.
SENTENCE_END = re.compile(
    r"[\n.!?…。！？](?:(?<=\n)|(?<=[.!?…])[.!?…]{0,5}[\"'”’)\]*_]{0,4}(?=\s|\Z)|(?<=[。！？])[”’」』）]{0,4})"
)
_NO_SENTENCE_END = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|St|Jr|Sr|vs|approx|e\.g|i\.e)|(?:^|\n|[.!?]\s)\s?\d{1,3})\Z")


def sentence_intervals(text: str) -> list[Interval]:
    """Find sentences and lines with a letter or digit, in order of position, without outer blanks.

    A sentence ends at a line break, at `. ! ?` before a blank, or at their CJK forms; not after a title
    ("Mr."), nor after the number of a list item.
    """
    ends = [
        end.end()
        for end in SENTENCE_END.finditer(text)
        if end.group() != "." or not _NO_SENTENCE_END.search(text, max(0, end.start() - 8), end.start())
    ]
    sentences = zip([0, *ends], [*ends, len(text)], strict=True)
    return [trimmed(text, *sentence) for sentence in sentences if LETTER_OR_DIGIT.search(text, *sentence)]


_NUMBER_OF_PART = re.compile(
    r"[\W_]{0,8}(?:(?i:step|part|case|stage)\s{1,2})?\d{1,3}\s?[*_]{0,3}[.):][\s*_]{0,8}(?!\d)"
)
HEADING = re.compile(r"\s*(?:#{1,6}\s.*|[*_]{2}[^*_\n]*[*_]{2}\W*)", re.DOTALL)


def label_length(sentence: str) -> int:
    """Count the characters of the number of a list's item or a solution's part that a sentence begins with."""
    label = _NUMBER_OF_PART.match(sentence)
    return label.end() if label else 0


def holds_number(sentence: str) -> bool:
    """Tell whether a sentence computes or states something: it has a digit beyond its label and is not a heading."""
    return bool(re.search(r"\d", sentence[label_length(sentence) :])) and not HEADING.fullmatch(sentence)


def sentences_outside(text: str, occupied: list[Interval]) -> list[Interval]:
    """Find the sentences that overlap none of `occupied`, which are disjoint and in order."""
    following, outside = iter([*occupied, (len(text), len(text))]), list[Interval]()
    start, end = next(following)
    for sentence in sentence_intervals(text):
        while end <= sentence[0] and end < len(text):
            start, end = next(following)
        if start >= sentence[1] or end <= sentence[0]:
            outside.append(sentence)
    return outside


def trimmed(text: str, start: int, end: int) -> Interval:
    """Cut the outer blanks off an interval."""
    content = text[start:end]
    return start + len(content) - len(content.lstrip()), start + len(content.rstrip())
