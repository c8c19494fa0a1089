"""README and docs/ in plain English: no house words, short sentences, at most two figures in each.

Code, tables, headings and the targets of links do not count; a bare number in code marks is a figure. Every page has
the same limits.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import REPOSITORY
from tests.support.prose import CODE_NUMBER

LONG = 25
"""Words above which a sentence is long."""
MANY = 2
"""Figures above which a sentence should be a table."""

HOUSE_WORDS = re.compile(
    r"\b(?:judg(?:e|es|ed|ing)|anew|beside|but for|of (?:its|their|your|our|one's) own|go(?:es|ing)? on|told|"
    r"as they come|lea(?:ve|ves|ving) out|left out)\b",
    re.IGNORECASE,
)
"""Score, again, next to, except, own, continue, pass, as sampled, omit: STYLE's words in their place."""

NOT_PROSE = re.compile(
    r"^```.*?^```$|^<!--.*?-->$|^\|.*?$|^#+ .*?$|!\[[^\]]*\]\([^)]*\)", re.DOTALL | re.MULTILINE
)  # code, comments, tables, headings, pictures
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
FIGURE = re.compile(r"(?<![\w.-])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?![\w.-]*\w)")  # no versions, no dates
SENTENCE_ENDS = re.compile(r"(?<=[.?!])(?<!eq\.)(?<!eqs\.)(?<!\bal\.)(?<!\.\.)[)\"]? |(?<=:) (?=[A-Z])")


class English(NamedTuple):
    """Counts of a page, or its limits: house words, and shares of sentences in percent."""

    house_words: int
    long: float
    figures: float


LIMIT = English(0, 4, 2)
"""Limits of every page."""


def sentences(text: str) -> list[str]:
    """The sentences of a page; code in backticks is one word, a bare number in backticks that number."""
    plain = CODE_NUMBER.sub(r"\1", NOT_PROSE.sub("\n\n", text))
    prose = LINK.sub(r"\1", re.sub(r"`[^`]*`", "code", plain))
    blocks = re.split(r"\n\s*\n|\n(?=- |\d+\. |\* )", prose)
    lines = (re.sub(r"^(?:- |\d+\. |\* )", "", " ".join(block.split())).replace("**", "") for block in blocks)
    return [each for line in lines for each in SENTENCE_ENDS.split(line) if each]


def count(text: str) -> English:
    every = sentences(text)
    share = 100 / max(len(every), 1)
    long = sum(len(each.split()) > LONG for each in every)
    figures = sum(len(FIGURE.findall(each)) > MANY for each in every)
    return English(sum(len(HOUSE_WORDS.findall(each)) for each in every), long * share, figures * share)


@pytest.mark.parametrize(
    "page", [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_a_page_is_plain_english(page: Path):
    text = page.read_text(encoding="utf-8")
    found, every = count(text), sentences(text)
    marked = [number[0] for number in CODE_NUMBER.finditer(NOT_PROSE.sub("\n\n", text))]
    assert not marked, f"numbers in code marks: name the setting (`top_p=0.95`), or write plain figures: {marked}"
    worst = [each for each in every if HOUSE_WORDS.search(each)]
    worst += [each for each in every if len(each.split()) > LONG or len(FIGURE.findall(each)) > MANY]
    assert all(a <= b for a, b in zip(found, LIMIT, strict=True)), "\n".join([f"{found}, limit {LIMIT}:", *worst])
