"""Rewards: what counts as the right answer."""

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfa_kernels import answer_text_span
from trainer.config import TrainConfig
from trainer.rewards.calls import load_reward
from trainer.rewards.numbers import exact_match, final_number, gold_number, parse_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### -5", -5), ("#### −5", -5), ("#### -$5", -5), ("#### 1,234", 1234),
        ("#### $1,234,567.50", Fraction("1234567.5")), (r"\boxed{1{,}234}", 1234), ("#### 10 000", 10000),
        ("#### 0.1", Fraction(1, 10)), ("#### 3/4", Fraction(3, 4)), (r"\boxed{\frac{3}{4}}", Fraction(3, 4)),
        ("#### 1 1/2", Fraction(3, 2)), ("#### 1e6", 10**6), ("#### 1.5e-3", Fraction(3, 2000)),
        ("#### 1.5 × 10^3", 1500), (r"\boxed{-2 \times 10^{-1}}", Fraction(-1, 5)),
        (r"\boxed{1\frac{4}{7}}", Fraction(11, 7)), (r"\boxed{-2 \dfrac12}", Fraction(-5, 2)),
        (r"The answer is $3\,\tfrac 14$.", Fraction(13, 4)), ("The answer is 2½ cups", Fraction(5, 2)),
        ("A: 5 and 1/2", Fraction(11, 2)), ("#### ¾", Fraction(3, 4)), (r"So the sum is $\boxed 5$.", 5),
        (r"\boxed5", 5), (r"\boxed -7 as said", -7), (r"\boxed 36,000.", 36000), (r"\boxed\frac43", Fraction(4, 3)),
        (r"\fbox 12", 12), (r"\boxed{4} no, \boxed 5", 5), (r"\boxed 4 no, \boxed{5}", 5),
        (r"The answer is \frac 43", Fraction(4, 3)), (r"#### \frac{12}5", Fraction(12, 5)),
        (r"\boxed{\frac5{12}}", Fraction(5, 12)), (r"\boxed{\frac{-3}{4}}", Fraction(-3, 4)),
        ("#### 12,34,567", 1234567), ("#### 1,234,567,890", 1234567890), ("The answer is 5, since 2 + 3 = 5.", 5),
        ("The answer is 18!", 18), ("#### 5 cm²", 5), (r"#### 10,\!080", 10080),
        (r"\boxed{1,\!234,\!567}", 1234567), (r"The answer is $3\;\frac{1}{2}$.", Fraction(7, 2)),
        (r"\boxed{3\!\tfrac12}", Fraction(7, 2)), (r"So it is \boxed \$18.", 18), ("The answer is 1e5.", 100000),
        ("The answer is 2^{10} = 1024.", 1024), ("#### 3! = 6", 6), (r"#### 90^{\circ}", 90),
        (r"The answer is the 5^{th} day", 5), ("The answer is 18...", 18), ("The answer is _18_.", 18),
        ("#### ‑18", -18), ("#### 1\u2009234", 1234), ("#### -￥5", -5),
    ],
)  # fmt: skip
def test_a_written_number_has_its_exact_value(text: str, value: Fraction) -> None:
    assert final_number(text) == value


NO_NUMBERS = [
    "1,2,3", "99,0", "1,234,5", "1234,567", "0,123", "12,34", "1,23,4567", "3,14", "1.234.567", "1'000", "1_000",
    "10!", "5²", r"2\pi", "2π", r"2\sqrt{3}", "5^2", r"\frac123", "1/2/3", "12/05/2020", "2 4/3", "3+4", "1,2/3",
    "5;6", "2^{10}", "10^{-3}", "5**2", "12_8", "12_{8}", r"12_{\text{eight}}", r"0.\overline{3}", r"0.1\bar6",
    "0.(3)", "1e5.5", "1{,}23", r"1,\!23", r"1\ 23", "1 234,5", "5x", "2n", "5i", "1.5k", r"5\choose 2",
]  # fmt: skip


@pytest.mark.parametrize(
    "form", ["#### {}", r"\boxed{{{}}}", r"\boxed {}", "<answer>{}</answer>", "The answer is ${}$."]
)
def test_a_form_that_cannot_be_read_is_no_number_and_no_part_of_it_is(form: str) -> None:
    golds = ("1", "2", "5", "10", "123", "990", "12345", "1234567", "314")
    for number in NO_NUMBERS:
        text = form.format(number)
        assert final_number(f"#### 7\nNo. {text}" if "####" in form else text) is None, number
        assert parse_number(number) is None
        assert exact_match(completions=[text] * 9, answer=golds) == [0.0] * 9
        assert exact_match(completions=[f"#### {gold}" for gold in golds], answer=[number] * 9) == [0.0] * 9


@given(st.integers(0, 10**12), st.sampled_from([",", "{,}", "\\,", " ", "\u2009", "\u202f"]), st.integers(0, 10**6))
def test_thousands_are_read_with_their_separators_and_a_digit_more_or_less_makes_no_number(
    number: int, comma: str, other: int
) -> None:
    written = f"{number:,}".replace(",", comma)
    assert parse_number(written) == number
    assert parse_number(f"-${written}.50") == -number - Fraction(1, 2)
    assert parse_number(f"{written} {other + 1}/{other + 3}") == number + Fraction(other + 1, other + 3)
    head, _, last = written.rpartition(comma)
    if head:
        assert parse_number(f"{head}{comma}{last[1:]}") is None
        assert parse_number(f"{written}0") is None


@given(st.integers(0, 99), st.integers(1, 8), st.integers(9, 99), st.sampled_from(["frac", "dfrac", "tfrac", "cfrac"]))
def test_mixed_numbers_and_fractions_are_read_however_they_are_braced(
    whole: int, over: int, under: int, command: str
) -> None:
    value = whole + Fraction(over, under)
    forms = [
        f"{whole}\\{command}{{{over}}}{{{under}}}",
        f"{whole} \\{command}{{ {over} }}{{{under}}}",
        f"{whole} {over}/{under}",
    ]
    for form in forms:
        for text in (f"\\boxed{{{form}}}", f"#### {form}", f"The answer is {form}.", f"The answer is ${form}$."):
            assert final_number(text) == value, text
        assert parse_number(f"-{form}") == -value
    if under < 10:
        for form in (f"\\{command}{over}{under}", f"\\{command} {over}{under}", f"\\{command}{over}{{{under}}}"):
            assert final_number(f"\\boxed{{{form}}}") == final_number(f"#### {form}") == Fraction(over, under)


def test_a_completion_cut_in_a_thought_that_its_prompt_opened_earns_nothing() -> None:
    cut, finished = "9 * 2 = 18. So maybe the answer is 18. Wait", "9 * 2 = 17?\n</think>\nThe answer is 18."
    prompts = ["9 * 2?\nAssistant: <think>\n", [{"role": "user", "content": "9 * 2?"}]]
    options = {"answer": ["18", "18"], "prompts": prompts}
    assert exact_match(completions=[cut, cut], **options) == [0.0, 1.0]  # messages say nothing of the template
    assert exact_match(completions=[finished, finished], **options) == [1.0, 1.0]
    contents = ["\n" * len(cut), "\n" * 11 + "</think>\nThe answer is 18."]
    assert exact_match(completions=[cut, finished], completion_contents=contents, **options) == [0.0, 1.0]
    own = {"completions": ["[plan]#### 18"], "answer": ["18"]}
    assert (exact_match(**own), exact_match(**own, thought_tags="[plan] [/plan]")) == ([1.0], [0.0])


ENDS_IN_TOTAL = ["9*2=18, TOTAL 18", "#### 18", "TOTAL 17, so 18"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.0, 1.0, 0.0]),
        ({"answers.answer_format": r"TOTAL (\d+)"}, [1.0, 0.0, 0.0]),
        ({"answers.answer_fallback": "last_number"}, [1.0, 1.0, 1.0]),
    ],
)
def test_the_grader_and_credit_read_answers_in_the_runs_own_format(options, expected) -> None:
    own = TrainConfig(credit_options=options).counterfactual().answers
    grade = load_reward("exact_match", **vars(own))
    assert grade(completions=ENDS_IN_TOTAL, answer=["#### 18"] * 3) == expected
    for text, reward in zip(ENDS_IN_TOTAL, expected, strict=True):
        span = answer_text_span(text, own)
        assert (span is not None and text[slice(*span)] == "18") == reward


def test_every_gsm8k_gold_answer_is_an_integer(gsm8k) -> None:
    lines = [line for name in ("train", "test") for line in (gsm8k / f"{name}.jsonl").read_text("utf-8").splitlines()]
    golds = [gold_number(json.loads(line)["answer"]) for line in lines]
    assert len(golds) == 8792
    assert all(gold is not None and gold.denominator == 1 for gold in golds)
    assert sum(gold < 0 for gold in golds) == 5
