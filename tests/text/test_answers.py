"""Where a text gives its answer, in the many forms that models write."""

import re
from pathlib import Path

import pytest

from cfa_kernels.text.answers import answer_text_span, locate_answer
from cfa_kernels.text.rules import AnswerRules
from tests.support.small_tokenizers import gsm8k_rows
from trainer.rewards.numbers import parse_number


def answer_of(text: str, **options: object) -> str | None:
    span = answer_text_span(text, AnswerRules(**options))
    return None if span is None else text[slice(*span)]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 18", "18"), ("####18", "18"), ("#### **18**", "18"), ("#### 18.00", "18.00"), ("#### +18", "+18"),
        ("#### $18", "18"), (r"#### \boxed{18}", "18"), ("#### -5", "-5"), ("#### -$5", "-$5"),
        ("#### 17\nWait, that is wrong.\n#### 18", "18"), ("#### 18\n#### ", "18"),
        ("#### 18 eggs are left for the next 7 days", "18"), ("#### 10 000", "10 000"),
        ("#### The answer is: 18", "18"), ("####\n18", "18"), ("#### 3/4", "3/4"), ("#### 1 1/2 cups", "1 1/2"),
        (r"#### \frac{3}{4}", r"\frac{3}{4}"), ("#### 3*6=$<<3*6=18>>18", "18"), ("#### Janet sells eggs", None),
        ("#### 1. Count the eggs\n#### 2. Sell them\nso \\boxed{18}", "18"), ("#### 2. Nothing boxed below", None),
        (r"\boxed{18}", "18"), (r"\boxed{18} and \boxed{19 which never ends", None), (r"\boxed{\text{18}}", "18"),
        (r"\boxed{\$18.50}", "18.50"), (r"\boxed{1{,}234}", "1{,}234"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"), (r"\boxed{ x^{2} + {y} }", "x^{2} + {y}"),
        (r"\boxed{36+36}", "36+36"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"The answer is 7. So \boxed{18}.", "18"),
        ("The answer is 16 - 7 = 9 eggs", "9"), ("The answer is no. There are 5 eggs.", None), ("", None),
        ("She makes 18 dollars.\nA: $18 a day", "18"), ("Answer: 18 (since 9 * 2 = 18)", "18"), ("Answer:\n- 18", "18"),
        ("#### Final Answer\n\n18", "18"), ("The answer is:\n$$18$$", "18"), ("The answer is:\n\\[\n18\n\\]", "18"),
        ("The answer is $2x+3$.", "2x+3"), ("The answer is $18 a day, $126 a week", "18"),
        ("The answer should be approximately 3.14.", "3.14"),
        ("The answer is 15 gallons * 8 pints / gallon = <<15*8=120>>120 pints", "120"), (r"\boxed{\text{(C)}}", "(C)"),
        ("<answer>18</answer>", "18"), ("<answer>x^2</answer>", "x^2"), ("<answer>18", "18"), (r"\fbox{5}", "5"),
        ("#### 1e6", "1e6"), (r"\boxed{1.5 \times 10^{3}}", r"1.5 \times 10^{3}"), ("#### 5:30", "5:30"),
        ("#### $1,234.50", "1,234.50"), ("#### 10 %", "10"), ("#### x = 5", "5"), (r"\boxed{18\ \text{cm}^2}", "18"),
        (r"\boxed{18^2}", "18^2"), ("#### 1. Find the cost\n2*3=6\n#### 2. Add\n6+1=7\nThe answer is 7.", "7"),
        ("#### **1. Find**\n2*3=6\n#### **2. Add**\n6+1=7", None), ("Answer:\n1. Find the cost\n2. Add", None),
        ("Answer: Janet has 16 eggs. She eats 3, so 13 are left.", None),
        ("The answer is 5. No, the answer is not 6.", "5"),
        ("So the answer is 5. Yes, the answer is correct since 2+3=5.", "5"),
        (r"<think>So \boxed{5}, wait, check again", None), (r"<think>try \boxed{5}? no</think>The answer is 7.", "7"),
        ("#### 3 - Sell\n9 * 2 = 18\n\nJanet makes \\boxed{18} dollars.", "18"),
        ("#### 3. 9 eggs\n9 * 2 = 18\nThe answer is 18.", "18"), ("\\boxed{5}\n#### 18 eggs\n9 * 2 = 18", "18"),
        (r"I try \boxed{5}.</think>So 18.", None), ("#### 4\n<think>#### 5</think>\n<think>#### 6", "4"),
    ],
)  # fmt: skip
def test_an_answer_is_found_in_every_form_without_its_units_and_not_in_a_thought(text: str, answer: str | None) -> None:
    assert answer_of(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("$12 + ($3 × 2) = $18", "18"), ("20% × 90 = 18", "18"), ("50% of 36 = 18.", "18"), ("2*(4+5) = 18.", "18"),
        ("2(9) = 18", "18"), ("36 * (1/2) = 18", "18"), ("100% - 82% = 18%", "18"), ("12 (eggs) + 6 = 18", "18"),
        ("1/2 of the 36 = 18", "18"), ("(16 - 3 - 4) * 2 = 18", "18"), ("18(9 * 2 = 18)", "18"),
        (r"180^\circ - 90^\circ = 90^\circ", "90"),
        ("(18 eggs)", "18"), ("12 * (3 + 4).", "12 * (3 + 4)"), ("5/x", "5/x"), ("5 + x", "5 + x"),
        ("5 ± 2", "5 ± 2"), ("(3, 4)", "(3, 4)"), ("5 kg * 2", "5 kg * 2"), ("10⁻³", "10⁻³"), ("1\u2009234",
        "1\u2009234"),
        ("2√3", "2√3"), (r"\sqrt{3}", r"\sqrt{3}"), ("60 km/h", "60"), ("18 cm^2", "18"), ("18 of the 24 eggs", "18"),
        ("25% of 40", "25"), ("18 (9 * 2 = 18)", "18"), ("18(eggs)", "18"), ("18 eggs - that is a lot", "18"),
        ("18, for 9 * 2 = 18", "18"), ("‑18", "‑18"), ("USD 18", "18"), ("Rs. 18", "18"), ("Rs.18", "18"), ("US$18",
        "18"),
        ("￥18", "18"), ("✅ 18", "18"),
    ],
)  # fmt: skip
def test_no_part_of_a_calculation_is_taken_for_its_result(text: str, answer: str) -> None:
    for form in ("#### {}", "The answer is {}", "Final Answer: {}", "A: {}", "### Answer\n{}"):
        assert answer_of(form.format(text)) == answer, form


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("**Answer:**\n\n16 - 3 - 4 = 9 eggs are left.\nSo she makes 9 * 2 = $18.", None),
        ("Answer: 16 - 3 - 4 = 9 eggs\n9 * 2 = $18", None), ("A: 16 - 3 - 4 = 9 eggs. 9 * 2 = $18.", None),
        ("We add up to get the answer\n9 eggs are left, which bring 18 dollars.", None),
        ("Answer: 9. Count\n10. Multiply: 9 * 2 = 18", None), ("A: 9\nB: 18\nC: 27\nIt is B, 18.", None),
        ("Answer: 18 eggs\nI hope this helps. 16 - 3 = 13.", "18"), ("Answer: 9 * 2 = 18\nFor 3 * 6 = 18.", "18"),
        ("Answer: 18. She makes 18.\nThat is it", "18"), ("The answer is 9 * 2 = 18. Check: 18 / 2 = 9.", "18"),
        ("Answer: x = 5\nCheck: 2 * 5 = 10", "5"), ("2. Answer: 18. Good.\n3. Check", "18"), ("A: 18\nSo B: 5", "18"),
        ("The answer is:\n```\n18\n```", "18"), ("The answer is:\n> 18", "18"), ("Answer： 18", "18"),
    ],
)  # fmt: skip
def test_a_label_above_a_solution_or_an_option_states_nothing(text: str, answer: str | None) -> None:
    assert answer_of(text) == answer


@pytest.mark.parametrize(
    "content",
    [
        "18元", "18 個", "￥18", r"18~\text{cm}", "18~cm^2", "~18~", r"18\quad\text{eggs}", r"\ 18\ ",
        r"18\textrm{ eggs}", r"\left(18\right)",
        r"18\text{ feet}/\text{second}", r"\$18/\text{hour}", r"\text{USD }18", r"\text{about }18", r"18\text{ cm}^{2}",
    ],
)  # fmt: skip
def test_one_number_is_read_in_a_box_whatever_its_units(content: str) -> None:
    assert answer_of(f"\\boxed{{{content}}}") == answer_of(f"The answer is $ {content}$.") == "18"


@pytest.mark.parametrize(
    "content",
    ["2x + 3y = 5", "5 x", "x = 5, y = 3", "12 (3 + 4)", r"18 \text{ or } 19", "18 m^2 + 2", "x^2 + y^2 = 25"],
)
def test_a_box_of_more_than_one_number_is_taken_whole(content: str) -> None:
    assert answer_of(f"\\boxed{{{content}}}") == content


@pytest.mark.parametrize(
    ("text", "answer", "marker"),
    [
        ("So it is.\n**Final Answer**\n\n$\\boxed{18}$", "18", "**Final"),
        ("Final Answer: The final answer is $18$.", "18", "Final Answer:"),
        ("It is. <answer>18</answer>", "18", "<answer>"),
        ("<think>hm</think>\n\n\\boxed{18}", "18", "\\boxed"),
        (r"So \boxed{180^\circ - 90^\circ = \boxed{90^\circ}}.", "90", r"\boxed{180"),
        (r"\boxed{\boxed{\boxed{x + 1}}}", "x + 1", r"\boxed{\boxed{\boxed"),
    ],
)
def test_a_marker_begins_with_the_words_before_it_or_the_outermost_box(text: str, answer: str, marker: str) -> None:
    located = locate_answer(text)
    assert located is not None
    assert text[located.start : located.end] == answer
    assert text[located.marker :].startswith(marker)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Therefore, the rope is 20 centimeters.", "20"), ("She has 3 + 4 = <<3+4=7>>7 eggs. That is all.", "7"),
        ("There are 16 eggs and $-2.50 of debt", "-2.50"), ("The area is 12 cm^2", "12"),
        ("It is 2√3.", "2√3"), (r"It is \sqrt{3}.", r"\sqrt{3}"), ("It is 5%-10%.", "10"), ("It fell by ‑18.", "‑18"),
        ("<think>It is 5.</think>So it is.", None), ("The answer is 18. She has 5 left.", "18"), ("None at all", None),
    ],
)  # fmt: skip
def test_the_last_number_counts_only_when_asked_for_and_nothing_is_marked(text: str, answer: str | None) -> None:
    assert answer_of(text, answer_fallback="last_number") == answer
    assert answer_of(text) == (answer if "answer" in text else None)


def in_braces(text: str) -> tuple[int, int] | None:
    return (text.rindex("{") + 1, text.rindex("}")) if "{" in text else None


@pytest.mark.parametrize(
    ("answer_format", "text", "answer"),
    [
        (r"RESULT=(\w+)", "RESULT=5 RESULT=18 #### 7", "18"), (r"(RESULT|TOTAL)=(?P<answer>\w+)", "TOTAL=18", "18"),
        (re.compile(r"result=(\w*)", re.IGNORECASE), "RESULT=18 RESULT=", "18"), (r"RESULT=(\w+)", "#### 7", None),
        (r"RESULT=(\w+)", "RESULT=18 <think>RESULT=5</think>", "18"), (in_braces, "{5} {18}", "18"),
    ],
)  # fmt: skip
def test_a_runs_own_format_replaces_the_usual_forms(answer_format: object, text: str, answer: str | None) -> None:
    assert answer_of(text, answer_format=answer_format) == answer
    assert answer_of(text + " 9", answer_format=answer_format, answer_fallback="last_number") == (answer or "9")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answer_format": "18"}, "answer_format: the pattern '18' must have one group.* it has 0"),
        ({"answer_format": 18}, "answer_format must be a str or a Pattern or a function or None, got 18"),
        ({"answer_format": lambda text: "18"}, r"answer_format must return .* \(start, end\), .* got '18'"),
        ({"answer_format": lambda text: (2, 9)}, r"answer_format must .* text's 7 characters, got \(2, 9\)"),
        ({"answer_fallback": "first"}, "answer_fallback must be one of 'last_number' or None, got 'first'"),
    ],
)
def test_a_bad_format_is_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        answer_of("#### 18", **options)


FORMS = [
    "A: {}", "#### {}", "Final Answer: {}", "**Answer:** ${}.", "The answer is {}.", "so $\\boxed{{{}}}$",
    "<answer>{}</answer>",
]  # fmt: skip


def test_real_solutions_give_their_recorded_answer_each_in_one_of_the_forms(gsm8k: Path) -> None:
    recorded = by_last_number = 0
    for row in gsm8k_rows(gsm8k, "model_solutions"):
        for key in row:
            if not key.startswith(("6b_", "175b_")):
                continue
            text = row[key]["solution"].rstrip()
            final = re.search(r"\nA: ?(-?[\d.,]*\d)[^\d\n]*\Z", text)
            if final is None:
                assert answer_of(text) is None
                continue
            recorded += 1
            assert answer_of(text) == final[1]
            work = text[: final.start() + 1]
            assert answer_of(work + FORMS[recorded % len(FORMS)].format(final[1])) == final[1]
            assert answer_of(work) is None
            last = answer_of(work, answer_fallback="last_number")
            by_last_number += last is not None and parse_number(last) == parse_number(final[1])
    assert (recorded, by_last_number) == (2633, 2508)  # as docs/spans.md says
