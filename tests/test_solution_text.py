"""Arithmetic and sentences in a text."""

import time

import pytest

from cfa_kernels.answer_text import answer_text_span
from cfa_kernels.solution_text import math_intervals, sentence_intervals


@pytest.mark.parametrize(
    ("text", "expressions"),
    [
        ("Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs", ["16 - 3 - 4 = <<16-3-4=9>>9"]),
        ("She makes 9 * 2 = $<<9*2=18>>18 and 48/2=24", ["9 * 2 = $<<9*2=18>>18", "48/2=24"]),
        ("He has <<5+3=8>>8 eggs", ["<<5+3=8>>8"]),
        ("16 eggs - 3 eggs = 13 eggs left", ["16 eggs - 3 eggs = 13"]),
        ("15 cups of lemonade per hour * 4 hours", ["15 cups of lemonade per hour * 4"]),
        ("$200 + $5/person = $205", ["$200 + $5/person = $205"]),
        ("Renée’s 25€ × 3 = 75€ total", ["25€ × 3 = 75€"]),
        ("12 ÷ 4 · 2 = 6", ["12 ÷ 4 · 2 = 6"]),
        ("$1,250.50 + $.50 = $1,251", ["$1,250.50 + $.50 = $1,251"]),
        ("costs $350 000 x 5/100 = 17 500.", ["$350 000 x 5/100 = 17 500"]),
        ("20% of 50 = 10 and 5 boxes of 12 = 60", ["20% of 50 = 10", "5 boxes of 12 = 60"]),
        (r"\frac{1}{6} \times 36 = 6", [r"\frac{1}{6} \times 36 = 6"]),
        (r"16 \div 4 \cdot 2 = 8", [r"16 \div 4 \cdot 2 = 8"]),
        (r"16 \text{ eggs} - 3 \text{ eggs} = 13", [r"16 \text{ eggs} - 3 \text{ eggs} = 13"]),
        ("so x + 2x = 36, then 3x = 36", ["x + 2x = 36", "3x = 36"]),
        ("2 * (3 + 4) = 14", ["2 * (3 + 4) = 14"]),
        ("2x3 and 4 x 5", ["2x3", "4 x 5"]),
        ("3 times 4 equals 12", ["3 times 4 equals 12"]),
        ("16-3-4 eggs", ["16-3-4"]),
        ("4455-4545 = -90", ["4455-4545 = -90"]),
        ("5 + 3\n= 8\n5 eggs", ["5 + 3\n= 8"]),
        ("16 − 3 = 13 个，3 苹果 + 4 苹果 = 7", ["16 − 3 = 13", "3 苹果 + 4 苹果 = 7"]),
        ("- 16 - 3 = 13", ["16 - 3 = 13"]),
        ("the rest, 16 - 7 =", ["16 - 7 ="]),
        ("half, 1/2, in 3-4 days on 12/05", []),
        ("He has 16 eggs and eats 3", []),
        ("a - b = c is no number, nor A/B", []),
        ("a 3-D printer, 5 T-shirts", []),
    ],
)
def test_arithmetic_is_found_as_models_write_it(text: str, expressions: list[str]) -> None:
    found = [text[slice(*interval)] for interval in math_intervals(text)]
    sentences = [text[slice(*interval)] for interval in sentence_intervals(text)]
    assert [part for part in found if part not in sentences or part in expressions] == expressions


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Mr. Lee has 3.5 kg. He eats! Why?\nNo end", ["Mr. Lee has 3.5 kg.", "He eats!", "Why?", "No end"]),
        ("1. Count. 2. Sell.\n3. Stop", ["1. Count.", "2. Sell.", "3. Stop"]),
        ('He said "Yes." Then... nothing', ['He said "Yes."', "Then...", "nothing"]),
        ("她有16个。他呢？没有", ["她有16个。", "他呢？", "没有"]),
        ("  \n---\n* lead. \n", ["* lead."]),
        ("", []),
    ],
)
def test_sentences_end_at_full_stops_and_line_breaks(text: str, sentences: list[str]) -> None:
    assert [text[slice(*interval)] for interval in sentence_intervals(text)] == sentences


@pytest.mark.parametrize(
    "unit",
    [
        "1",
        "(",
        "1,",
        "1,11,",
        "<<1",
        "a ",
        "1 ab ",
        "\\boxed{",
        "#### 1. a ",
        "\\frac{",
        "answer is ",
        "a=",
        "1 of ",
        "- ",
    ],
)
def test_degenerate_repetition_is_read_in_linear_time(unit: str) -> None:
    def seconds(length: int) -> float:
        text = (unit * length)[:length] + r"\boxed{$"
        times = []
        for _ in range(3):
            start = time.process_time()
            answer_text_span(text)
            math_intervals(text)
            times.append(time.process_time() - start)
        return min(times)

    # Sixteen times the text: quadratic matching would take 256 times as long.
    assert seconds(32_000) < 64 * max(seconds(2_000), 2e-4)
