"""What a person reads in completions: nothing else is read, wherever a model runs on, hedges, lists or is cut off."""

import json
from pathlib import Path

import pytest

from cfa_kernels import AnswerRules, answer_text_span, detect_spans, find_answer
from cfa_kernels.text.find import content_text
from tests.support.small_tokenizers import BACKENDS, FAST, encode, get_tokenizer, wrap
from trainer.rewards.numbers import exact_match, final_number, parse_number

FORMS = ["#### {}", "The answer is {}.", "So \\boxed{{{}}}.", "**Answer:** {}"]
ROWS = Path(__file__).with_name("completions.jsonl")  # with what a person reads, and whether the usual rules find it
LAST = {"answer_fallback": "last_number"}


def test_no_completion_is_read_as_another_number_and_the_page_says_how_many_are_found() -> None:
    rows, found = [json.loads(line) for line in ROWS.read_text("utf-8").splitlines()], []
    for options in ({}, LAST):
        read = [final_number(one["text"], **options) for one in rows]
        gold = [one["number"] and parse_number(one["number"]) for one in rows]
        assert [i for i, (one, own) in enumerate(zip(read, gold, strict=True)) if one not in (None, own)] == []
        found.append([one is not None for one in read])
    assert found == [[one["found"] for one in rows], [one["number"] is not None for one in rows]]
    assert (sum(found[0]), sum(found[1]), len(rows)) == (38, 42, 60)  # as docs/spans.md says


HEADERS = [
    "Question: {}", "question: {}", "**Question:** {}", "**Question**: {}", "### Question\n{}", "Question 2: {}",
    "Question\n{}",
    "Q: {}", "Q2: {}", "Q. {}", "**Q2.** {}", "Problem 3. {}", "Problem #3: {}", "## Problem 3\n{}", "### Problem: {}",
    "Next question: {}", "Here is another problem:\n{}", "- Question: {}", "> Question: {}", "Question：{}",
    "Exercise 4. {}",
    "Example 2:\n{}", "问题：{}", "Human: {}", "USER: {}", "User:\n{}", "### User:\n{}", "user\n{}",
    "### Instruction:\n{}",
    "### Input\n{}", "Instruct: {}", "[Question]\n{}", "<question>{}</question>", "\\textbf{{Problem 2}}\n{}",
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", "<｜User｜>{}<｜Assistant｜>",
    "<|user|>\n{}<|assistant|>\n",
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "[INST] {} [/INST]", "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n", "<|endoftext|>{}", "</s>{}",
]  # fmt: skip


@pytest.mark.parametrize("header", HEADERS)
def test_what_follows_a_question_of_the_models_own_is_neither_an_answer_nor_a_span(header: str) -> None:
    for i, break_ in enumerate(("\n", "\n\n", "\r\n\r\n", "\n\n  ")):
        work, form = "The hats cost 3 * 6 = 18.\n93 - 18 = 75.\n", FORMS[i]
        text = work + form.format(75) + break_ + header.format("Tom has 4 + 5 pens.") + "\nAnswer: 4 + 5 = 9. "
        assert final_number(text + form.format(9)) == final_number(text + "\\boxed{9") == 75, text
        assert exact_match(completions=[text + form.format(9)] * 2, answer=["75", "9"]) == [1.0, 0.0]
        invented = work + break_ + header.format("Tom has 4 + 5 pens.") + "\n" + form.format(9)
        assert final_number(invented) is None
        assert (answer_text_span(invented, AnswerRules(r"(\d+)\D*\Z")) or (0,))[0] < len(work)
        for name in FAST[:2]:
            tokenizer = get_tokenizer(name)
            ids = encode(tokenizer, text + form.format(9))
            answer, spans = find_answer(ids, tokenizer), detect_spans(ids, tokenizer)
            assert "75" in tokenizer.decode(ids[slice(*answer)])
            assert spans[-1].end <= answer.start
            unanswered = encode(tokenizer, invented)
            texts = [tokenizer.decode(unanswered[slice(*span)]) for span in detect_spans(unanswered, tokenizer)]
            assert texts
            assert not any("4" in one or "9 * " in one for one in texts)


@pytest.mark.parametrize(
    "text",
    [
        "3 * 6 = 18. #### 57. Wait, that is wrong.\n#### 75",
        "Sure!\n\n### Problem\nMia has $93.\n\n### Solution\n#### 75",
        "Question: Mia has $93.\nAnswer: 93 - 18 = 75\n#### 75", "**Question:** Mia has $93.\n**Answer:** $75",
        "3 * 6 = 18.\nThe question is how much is left.\nProblem solved: \nAnswer: 75", "3 * 6 = 18\nUsers: 5\nA: 75",
        "Step 1: Read the problem.\n### Question\nMia has 93.\n#### 75",
        "<think>18.\nQuestion: or 17?\nUser: hm</think>#### 75",
        "9 * 2 <tool_call>9 * 2</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>18</tool_response><|im_end|>"
        "\n<|im_start|>assistant\nThe answer is 75.",
        "9 * 2 <|im_end|>\n<|im_start|>tool\n18<|im_end|>\n<|im_start|>assistant\n#### 75",
    ],
)  # fmt: skip
def test_a_question_that_is_restated_and_a_second_thought_end_nothing(text: str) -> None:
    assert final_number(text) == 75


def test_a_turns_end_separates_what_stands_beside_it_and_boxes_of_tokens_are_boxes() -> None:
    signs = ["<|im_end|>", "<|begin_of_box|>", "<|end_of_box|>"]
    special = wrap(BACKENDS[FAST[1]]())
    special.add_special_tokens({"additional_special_tokens": signs})
    for text, number in {
        "#### 35<|im_end|>4=10": "35",
        "The answer is <|begin_of_box|>37<|end_of_box|>.": "37",
        "So she has <|begin_of_box|>$37<|end_of_box|> marbles.": "37",
        "The answer is 12? No: <|begin_of_box|>37<|end_of_box|>": "37",
        "\\boxed{<|begin_of_box|>\\frac{37}{1}<|end_of_box|>}": "\\frac{37}{1}",
        "<think>So <|begin_of_box|>36<|end_of_box|>?</think>Answer: <|begin_of_box|>37<|end_of_box|>": "37",
        "It is <|begin_of_box|>36<|end_of_box|>. No, it is <|begin_of_box|>37": None,
    }.items():
        span = answer_text_span(text)
        assert (span and text[slice(*span)]) == number
        for tokenizer in (special, get_tokenizer(FAST[1])):
            ids = encode(tokenizer, text)
            answer = find_answer(ids, tokenizer)
            assert (answer and tokenizer.decode(ids[slice(*answer)]).strip(" $")) == number


@pytest.mark.parametrize(
    "last", ["\\boxed{18", "\\boxed{", "\\boxed", "\\boxed{}", "\\boxed{ }", "$\\boxed{\\frac{1}{2}$"]
)
def test_a_last_box_that_is_cut_or_empty_retracts_what_stands_before(last: str) -> None:
    for first in ("First \\boxed{17}.", "The answer is \\boxed{17}.", "The answer is 17, \\boxed{17}."):
        assert final_number(f"{first} Wait, that is wrong, it is {last}", **LAST) is None
    assert last == "\\boxed" or final_number(f"First \\boxed{{17}}. No: {last}. The answer is 18.") == 18


SENTENCES = [
    "Sarah earns $450 per week.", "After 9 weeks, Sarah has **450 dollars**.", "Sarah earns 9 * 50 = $450.",
    "They spent $450!",
    "Mr. Smith would earn $450.\n\nLet me know if you have questions!", "The area is **450 square meters**.",
]  # fmt: skip
OPEN_SENTENCES = [
    "Tom does not have 5.", "Tom has 5 or 6 marbles.", "It is between 5 and 10.", "There are 16 eggs. She eats 3.",
    "Is it 5?",
    "Janet has 16 eggs, of which 3 are eaten.", "Step 2 is next.", "First, we count 5 eggs.", "Tom has at least 5.",
    "Option 2 is right.", "1. First, we", "No, 5 is wrong.", "**5** or **6** eggs",
]  # fmt: skip


@pytest.mark.parametrize(
    "heading", ["**Answer:** {}", "Answer: {}", "### Answer\n{}", "**Final Answer:**\n\n{}", "The final answer is: {}"]
)
def test_a_sentence_with_one_number_behind_a_heading_or_a_colon_has_one_reading(heading: str) -> None:
    assert [final_number(heading.format(one)) for one in SENTENCES] == [450] * len(SENTENCES)
    assert [final_number(heading.format(one)) for one in OPEN_SENTENCES] == [None] * len(OPEN_SENTENCES)


HEDGES = [
    "5 or 6", "5, or 6.", "5 (or 6)", "5 to 6", "5 through 6", "5-6", "5 – 6", "5~6", "$5 to $6", "$5$ or $6$",
    "**5** or **6**",
    "5 or maybe 6", "5, or is it 6?", "5 or six", "5 or more", "5 and 6", "5 and a half", "between 5 and 10",
    "either 5 or 6",
    "3 hours and 30 minutes", "3 hours 30 minutes", "3 h 30 min", "5 feet, 6 inches", "18 dollars and 50 cents",
    "x = 5 and y = 6",
    "3 apples and 4 pears, 7 pieces", "not 5", "neither 5 nor 6",
]  # fmt: skip
PLAIN = [
    "18", "18.", "18 dollars", "about 18", "18, as 9 * 2 = 18.", "18 dollars and that is it",
    "18 to the nearest dollar", "18 (or $18)",
    "18 eggs for the next 7 days", "18 to 0 decimal places", "18 minutes: 7 + 11.",
]  # fmt: skip


@pytest.mark.parametrize("form", ["#### {}", "The answer is {}", "Answer: {}", "A: {}", "**Final Answer:** {}"])
def test_one_of_two_numbers_a_range_and_a_compound_measure_have_no_reading(form: str) -> None:
    for options in ({}, LAST):
        assert {hedge: final_number(form.format(hedge), **options) for hedge in HEDGES} == dict.fromkeys(HEDGES)
        assert {plain: final_number(form.format(plain), **options) for plain in PLAIN} == dict.fromkeys(PLAIN, 18)
    assert final_number(f"#### 4\nNo. {form.format('5 or 6')}") is None if "#" in form else True
    assert final_number(form.format("5 or so") if "#" in form else form.format("about 5 or so")) == 5


@pytest.mark.parametrize(
    "item",
    ["2. First, we", "2) Multiply", "2: Cost of", "(2) Multiply", "**2.** First", "**2. First**", "2.First",
    "2\\. First",
     "2 - Multiply", "2️⃣ Multiply", "12. Then we", "Step 2", "Step 2: Multiply", "Part 2"],
)  # fmt: skip
def test_the_number_of_an_item_behind_a_marker_is_no_answer_whether_or_not_a_line_follows(item: str) -> None:
    for text in (f"#### {item}", f"####{item}", f"So:\n#### {item}\nwe need to find the"):
        assert final_number(text) is None
    assert final_number(f"#### {item}", **LAST) is None
    assert final_number(f"#### 18\n#### {item}") == final_number(f"#### {item}\nThe answer is 18.") == 18
    assert final_number("#### 18. She makes 18 dollars.") == 18


@pytest.mark.parametrize("cut", ["10", "10,", "10,2", "10.", "1/", "$10", "10{,", "5 or 10", "10:"])
def test_a_number_at_the_very_end_of_a_truncated_completion_is_no_answer(cut: str) -> None:
    tokenizer = get_tokenizer(FAST[1])
    for form in ("#### {}", "The answer is {}", "<answer>{}"):
        text = form.format(cut)
        span = answer_text_span(text, truncated=True)
        assert span is None or parse_number(text[slice(*span)]) is None
        content = content_text(encode(tokenizer, text), tokenizer, truncated=True)
        assert len(content) == len(text)
        assert final_number(content) is None
    for whole in ("#### 18\nSo", "So \\boxed{18}", "#### 18 dollars", "#### 18\nIn all 1"):
        span = answer_text_span(whole, truncated=True)
        assert whole[slice(*span)] == "18"
