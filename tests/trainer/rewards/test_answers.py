"""Rewards and advantages: what counts as the right answer, and what a group's rewards become."""

import json
from fractions import Fraction

import pytest
import torch

from cfa_kernels import answer_text_span
from trainer.config import TrainConfig
from trainer.rewards.calls import group_advantages, load_reward
from trainer.rewards.numbers import exact_match, final_number, gold_number, parse_number

FORMS_OF_18 = [
    "#### 18",
    "####18",
    "#### $18",
    "#### **18**",
    r"#### \boxed{18}",
    "#### 18.",
    "#### 18.00",
    "#### +18",
    "#### 18 eggs for the next 7 days",
    "She sells 9*2=18.\n#### 17\nWait, that is wrong.\n#### 18",
    r"So she makes \boxed{18} dollars.",
    r"The total is $\boxed{\$18}$.",
    "The answer is 18.",
    "The final answer is 18 dollars a day",
    "She sells 9*2=18.\nA: 18",
    "**Final Answer:** $18.00",
    "The answer is:\n$$18$$",
    "<think>It is 17. #### 17</think><answer>18</answer>",
    "#### 1. Multiply\n9*2=18\n#### 2. Stop\nThe answer is 18.",
]


@pytest.mark.parametrize("text", FORMS_OF_18)
def test_a_right_answer_is_recognised_in_every_form(text: str) -> None:
    assert final_number(text) == 18
    assert exact_match(completions=[text], answer=["9*2=18\n#### 18"]) == [1.0]
    assert exact_match(completions=[text], answer=["#### 81"]) == [0.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### -5", -5),
        ("#### −5", -5),
        ("#### -$5", -5),
        ("#### 1,234", 1234),
        ("#### $1,234,567.50", Fraction("1234567.5")),
        (r"\boxed{1{,}234}", 1234),
        ("#### 10 000", 10000),
        ("#### 0.1", Fraction(1, 10)),
        ("#### 3/4", Fraction(3, 4)),
        (r"\boxed{\frac{3}{4}}", Fraction(3, 4)),
        ("#### 1 1/2", Fraction(3, 2)),
        ("#### 1e6", 10**6),
        ("#### 1.5e-3", Fraction(3, 2000)),
        ("#### 1.5 × 10^3", 1500),
        (r"\boxed{-2 \times 10^{-1}}", Fraction(-1, 5)),
    ],
)
def test_a_written_number_has_its_exact_value(text: str, value: Fraction) -> None:
    assert final_number(text) == value


@pytest.mark.parametrize(
    "text", ["", "18", "It costs 18 dollars.", "#### eighteen", r"\boxed{36+36}", "####", "#### 1/0", "9*2=18"]
)
def test_a_completion_without_an_announced_number_earns_nothing(text: str) -> None:
    assert exact_match(completions=[text], answer=["#### 18"]) == [0.0]


@pytest.mark.parametrize("text", ["18", " 18.0 ", "$18", "9*2=18\n#### 18"])
def test_a_gold_answer_is_a_solution_or_a_bare_number(text: str) -> None:
    assert gold_number(text) == 18


@pytest.mark.parametrize("text", ["eighteen", "18 or 19", "1.2.3", "--18", "1/2/3", "0x12", "1e", "1e9999", "5:30"])
def test_what_is_not_one_number_is_not_parsed(text: str) -> None:
    assert parse_number(text) is None


ENDS_IN_TOTAL = ["9*2=18, TOTAL 18", "#### 18", "TOTAL 17, so 18"]


def total_of(text: str) -> tuple[int, int] | None:
    start = text.find("TOTAL ") + 6
    return None if start < 6 else (start, start + 2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.0, 1.0, 0.0]),
        ({"answer_format": r"TOTAL (\d+)"}, [1.0, 0.0, 0.0]),
        ({"answer_format": "tests.trainer.rewards.test_answers:total_of"}, [1.0, 0.0, 0.0]),
        ({"credit_options": {"answer_fallback": "last_number"}}, [1.0, 1.0, 1.0]),
        ({"answer_format": r"SUM (\d+)", "credit_options": {"answer_fallback": "last_number"}}, [1.0, 1.0, 1.0]),
    ],
)
def test_the_grader_and_credit_read_answers_in_the_runs_own_format(options, expected) -> None:
    config = TrainConfig(**options)
    grade = load_reward("exact_match", **config.answer_options())
    assert grade(completions=ENDS_IN_TOTAL, answer=["#### 18"] * 3) == expected
    own = config.counterfactual().answers
    for text, reward in zip(ENDS_IN_TOTAL, expected, strict=True):
        span = answer_text_span(text, own)
        assert (span is not None and text[slice(*span)] == "18") == reward


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answer_format": "TOTAL"}, "answer_format: the pattern 'TOTAL' must have one group"),
        ({"answer_format": "(TOTAL"}, r"answer_format: the pattern '\(TOTAL' does not compile"),
        ({"answer_format": "no_such_module:f"}, "answer_format: cannot import 'no_such_module:f'"),
        ({"answer_format": "math:pi"}, "answer_format: 'math:pi' is a float, not a function"),
        ({"credit_options": {"answer_fallback": "first"}}, "answer_fallback must be one of .*, got 'first'"),
    ],
)
def test_a_bad_answer_format_ends_the_run_before_it_starts(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


def test_every_gsm8k_gold_answer_is_an_integer(gsm8k) -> None:
    lines = [line for name in ("train", "test") for line in (gsm8k / f"{name}.jsonl").read_text("utf-8").splitlines()]
    golds = [gold_number(json.loads(line)["answer"]) for line in lines]
    assert len(golds) == 8792
    assert all(gold is not None and gold.denominator == 1 for gold in golds)
    assert sum(gold < 0 for gold in golds) == 5


def test_advantages_are_centred_and_scaled_within_each_group() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    groups = rewards.double().view(2, 4)
    scales = {"group": groups.std(1, keepdim=True) + 1e-4, "batch": groups.std() + 1e-4, "none": 1.0}
    for name, scale in scales.items():
        expected = ((groups - groups.mean(1, keepdim=True)) / scale).flatten()
        torch.testing.assert_close(group_advantages(rewards, 4, name).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_of_equal_rewards_has_advantage_exactly_zero(scale: str) -> None:
    # 0.1 seven times: its mean in fp32 is not exactly 0.1
    advantages = group_advantages(torch.tensor([0.1] * 7 + [1.0] + [0.0] * 6), 7, scale)
    assert (advantages[:7] == 0).all()
    assert (advantages[7:] != 0).all()
