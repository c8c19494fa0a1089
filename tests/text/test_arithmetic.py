"""Arithmetic, formulas and sentences in a text."""

import re
from pathlib import Path

import pytest

from cfa_kernels.text.arithmetic import ranked_math_intervals
from cfa_kernels.text.latex import ranked_latex_intervals
from cfa_kernels.text.patterns import sentence_intervals
from tests.support.small_tokenizers import gsm8k_rows

FAR = " ".join(["1,"] * 60)  # too many lexemes between a bracket and its other half


@pytest.mark.parametrize(
    ("text", "expressions"),
    [
        ("Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs", ["16 - 3 - 4 = <<16-3-4=9>>9"]),
        ("16 eggs - 3 eggs = 13 eggs left", ["16 eggs - 3 eggs = 13"]),
        ("Renée’s 25€ × 3 = 75€ total", ["25€ × 3 = 75€"]),
        ("20% of 50 = 10 and 5 boxes of 12 = 60", ["20% of 50 = 10", "5 boxes of 12 = 60"]),
        (
            r"\[ 3 \, \text{litres} \times 0.25 = 0.75 \, \text{litres} = 750 \, \text{ml} \]",
            [r"3 \, \text{litres} \times 0.25 = 0.75 \, \text{litres} = 750"],
        ),
        (
            r"\( (7 + 2) \times \text{rounds} = 9 \times 4 = 36 \)",
            [r"\( (7 + 2) \times \text{rounds} = 9 \times 4 = 36 \)"],
        ),
        (r"5 \text{ apples} and 6\; \text{kg}, or 12 \times \text{price}", []),
        ("The last shelf has 30 - 12 =`18` books, `5` and `6`", ["30 - 12 =`18`"]),
        ("`1800/6=<<1800/6=300>>300 and `16 - 3 = 13`", ["1800/6=<<1800/6=300>>300", "16 - 3 = 13"]),
        ("so x + 2x = 36, then 3x = 36", ["x + 2x = 36", "3x = 36"]),
        ("2 * (3 + 4) = 14", ["2 * (3 + 4) = 14"]),
        ("16 − 3 = 13 个，3 苹果 + 4 苹果 = 7", ["16 − 3 = 13", "3 苹果 + 4 苹果 = 7"]),
        ("half, 1/2, in 3-4 days on 12/05", []),
        ("2(3 + 4) = 14, x=2(28-2x)", ["2(3 + 4) = 14", "x=2(28-2x)"]),
        ("(so 3 + 4) * 2 = 14", ["(so 3 + 4) * 2 = 14"]),
        ("twice (3 + 4 = 7) is it, or 3 + 5) too", ["(3 + 4 = 7)", "3 + 5"]),
        (f"(over {FAR} 3 + 4) * 2 = 14", []),
        (f"2 * (3 + x {FAR}) = 14", []),
        ("From 2010-2012 we saw 3-4 people, or 2010 - 2012, or 3 - 4 people", []),
        ("2 x 4 lumber and 8x10 frames", []),
        ("so 12-5=7 or 2010-2012 = -2 or 2 x 4 = 8", ["12-5=7", "2010-2012 = -2", "2 x 4 = 8"]),
        ("On 5/6/2024, 2024-05-06 or 06-05-24 call 555-123-4567 or 1-800-555-1234", []),
        ("From 5:30 - 6:45, 6:45 pm - 5:30 am or 9 a.m. - 5 p.m., 9am - 5pm, see Chapter 3 - 2 and page 12 - 3", []),
        ("2024-05-06 = 2013, 5/6/2 = 0.4, Chapter 3 - 2 = 1", ["2024-05-06 = 2013", "5/6/2 = 0.4", "3 - 2 = 1"]),
        ("5 m * 3 m = 15 m², then 8 m² - 3 m² = 5 m²", ["5 m * 3 m = 15", "8 m² - 3 m² = 5"]),
        ("½ × 80 = 40, 1½ × 2 = 3 and 80 x ½ = 40", ["½ × 80 = 40", "1½ × 2 = 3", "80 x ½ = 40"]),
        ("（3＋4）×2＝14, 2（3 + 4）= 14", ["（3＋4）×2＝14", "2（3 + 4）= 14"]),
        ("sin(30°) = 0.5, log_2(8) = 3", ["sin(30°) = 0.5", "log_2(8) = 3"]),
        (r"f(3) = 2(3) + 1 = 7, \sin(30) = 0.5", ["f(3) = 2(3) + 1 = 7", r"\sin(30) = 0.5"]),
        ("so many eggs(3 + 4 = 7) and 共(3+4)×2=14个", ["(3 + 4 = 7)", "(3+4)×2=14"]),
        ("16个 - 3个 = 13个，9个×2元/个=18元。9個×2ドル=18ドル", ["16个 - 3个 = 13", "9个×2元/个=18", "9個×2ドル=18"]),
        ("5 ft. × 3 ft. = 15 sq. ft. and 6 sq. ft. / 2 = 3", ["5 ft. × 3 ft. = 15", "6 sq. ft. / 2 = 3"]),
    ],
)
def test_arithmetic_is_found_whole_and_no_ranges_sizes_and_names(text: str, expressions: list[str]) -> None:
    assert [text[slice(*interval)] for interval in ranked_math_intervals(text)[0]] == expressions


def test_real_solutions_keep_every_calculator_annotation_inside_arithmetic(gsm8k: Path) -> None:
    annotations = 0
    for text in [row["answer"] for row in gsm8k_rows(gsm8k, "test")]:
        intervals = ranked_math_intervals(text)[0]
        for annotation in re.finditer(r"<<[^<>]*>>", text):
            annotations += 1
            assert any(start <= annotation.start() and annotation.end() <= end for start, end in intervals)
    assert annotations > 4000


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Mr. Lee has 3.5 kg. He eats! Why?\nNo end", ["Mr. Lee has 3.5 kg.", "He eats!", "Why?", "No end"]),
        ("1. Count. 2. Sell.\n3. Stop", ["1. Count.", "2. Sell.", "3. Stop"]),
        ('He said "Yes." Then... nothing', ['He said "Yes."', "Then...", "nothing"]),
        ("她有16个。他呢？没有", ["她有16个。", "他呢？", "没有"]), ("  \n---\n* lead. \n", ["* lead."]), ("", []),
    ],
)  # fmt: skip
def test_sentences_end_at_full_stops_and_line_breaks(text: str, sentences: list[str]) -> None:
    assert [text[slice(*interval)] for interval in sentence_intervals(text)] == sentences


def latex(text: str) -> list[list[str]]:
    return [[text[slice(*interval)] for interval in rank] for rank in ranked_latex_intervals(text)]


@pytest.mark.parametrize(
    ("text", "equations", "others", "sentences"),
    [
        (r"So \[ x^2 = 5, \] now.", ["x^2 = 5,"], [], []),
        ("We go.\n$$\nx = 5\n$$\nDone.", ["x = 5"], [], ["We go.", "Done."]),
        ("\\[\r\n\r\na + b\r\n\r\n\\]\r\nDone.", ["a + b"], [], ["Done."]),
        (
            "\\begin{align*}\nx &= 1 \\\\\n &= 2 \\\\[2pt]\n&\\le y + \\$3\n\\end{align*}",
            ["x &= 1", "&= 2", r"&\le y + \$3"],
            [],
            [],
        ),
        (r"\[ A = \begin{aligned} a &= b \\ c &= d \end{aligned} \]", ["A =", "a &= b", "c &= d"], [], []),
        (
            r"\[ A = \begin{pmatrix} 1 \\ 2 \end{pmatrix} \\ B \]",
            [r"A = \begin{pmatrix} 1 \\ 2 \end{pmatrix}", "B"],
            [],
            [],
        ),
        (r"\[ f = \begin{cases} 1 \\ 2 \end{cases} \] \[ g \]", [r"f = \begin{cases} 1 \\ 2 \end{cases}", "g"], [], []),
        (
            r"\[ f = \begin{cases} 1 \end{array} \\ 2 \end{cases} \\ g \]",  # what ends nothing leaves `cases` open
            [r"f = \begin{cases} 1 \end{array} \\ 2 \end{cases}", "g"],
            [],
            [],
        ),
        ("\\begin{gather} \\begin{gather} a \\end{gather} b \\end{gather}\nIt is 5.", ["a", "b"], [], ["It is 5."]),
        (r"Let \(a + b\) be, $ c = d $ too. No $x$, \(y\).", ["c = d"], ["a + b"], [r"No $x$, \(y\)."]),
        ("Cut $$ x = 5\n\nNo. $$ y = 6 $$", ["x = 5", "y = 6"], [], ["No."]),
        ("", [], [], []),
    ],
)  # fmt: skip
def test_formulas_are_found_as_models_write_them_in_latex(
    text: str, equations: list[str], others: list[str], sentences: list[str]
) -> None:
    assert latex(text) == [equations, others, sentences]


def test_prices_in_real_problems_and_solutions_are_no_formulas(gsm8k: Path) -> None:
    texts = [row["answer"] for row in gsm8k_rows(gsm8k, "test")]
    assert sum(text.count("$") for text in texts) > 2000
    assert [text for text in texts if any(ranked_latex_intervals(text)[:2])] == []
