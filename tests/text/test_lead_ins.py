"""Words that lead to an answer are no reasoning; of many spans those nearest to the answer stay, with numbers first."""

import pytest

from cfa_kernels import AnswerRules, SpanRules, detect_spans
from cfa_kernels.text.find import find_reasoning
from cfa_kernels.text.rules import USUAL_ANSWERS
from tests.support.small_tokenizers import FAST, encode, get_tokenizer

TOKENIZER = get_tokenizer(FAST[1])
PAPERS = AnswerRules(lead_in="statement")
LEAD_INS = [
    "Therefore, the total number of bolts in the robe is", "So", "Hence, in total, after all of the sales, Janet makes",
    "It follows that she earns a total of", "- Altogether that comes to", "所以一共是",
    "Finally the answer to the question would then be", "We conclude: he owes", "Thus, her profit (in dollars) is",
]  # fmt: skip
FORMS = ["\\boxed{{{}}}", "$\\boxed{{{}}}$", "\\[ \\boxed{{{}}} \\]", "**\\boxed{{{}}}**", "<answer>{}</answer>"]


def spans_of(text: str, answers: AnswerRules = USUAL_ANSWERS, tokenizer=TOKENIZER, **rules: object) -> list[str]:
    ids = encode(tokenizer, text)
    spans = detect_spans(ids, tokenizer, answers=answers, spans=SpanRules(**rules))
    return [tokenizer.decode(ids[slice(*span)]).strip() for span in spans]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lead_in", LEAD_INS)
def test_no_span_holds_a_word_that_leads_to_the_answer(lead_in: str, form: str) -> None:
    work, answer = "She has 16 eggs.\n16 - 3 = 13 eggs are left.", form.format(13)
    own = ["She has 16 eggs.", "16 - 3 = 13"]
    for before in ("\n", " "):
        for between in (" ", ": ", "\n" if lead_in.endswith(":") else " ", ":\n", " **"):
            text = f"{work}{before}{lead_in}{between}{answer} dollars."
            assert spans_of(text) == own, text
            assert "".join(spans_of(text, detector="sentence")) == "She has 16 eggs.16 - 3 = 13 eggs are left.", text
    assert len(spans_of(f"{work}\n{lead_in} {answer}", PAPERS)) >= 2
    stated = f"{work}\n{lead_in} #### 13"
    assert spans_of(stated) == own
    units = find_reasoning({0: encode(TOKENIZER, text)}, TOKENIZER)[0]
    assert units.end >= units.spans[-1].end


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("In 7 days, the total is \\boxed{126}", ["In 7 days,"]),
        ("In 7 days she makes \\boxed{126}", ["In 7"]),
        ("So she makes 9 * 2 = \\boxed{18} dollars", ["9 * 2 ="]),
        ("She has 5.\nTherefore\n\\boxed{5}", ["She has 5.", "Therefore"]),  # a line by itself leads nowhere
        ("She has 5.\nTherefore it is:\n\n\\[\n\\boxed{5}\n\\]", ["She has 5."]),
        ("Mr. Lee pays \\boxed{5}", []),
        ("Take \\(x\\): \\[ x + 1 = 6 \\] so that it is \\boxed{5}", ["\\[ x + 1 = 6 \\]"]),
        ("She has 5.\n## Final Answer\n\nThe total is $\\boxed{5}$", ["She has 5."]),
        ("She has 5.\n### Step 3: State it\nSo \\boxed{5}", ["She has 5."]),
        ("She has 5.\nThus we get:\n\n- Total: \\boxed{5}", ["She has 5."]),
    ],
)
def test_the_words_behind_the_last_other_number_lead_to_the_answer(text: str, spans: list[str]) -> None:
    assert spans_of(text) == spans


def test_neither_marker_nor_statement_holds_what_a_tool_wrote() -> None:
    def read(*parts: tuple[str, int]) -> tuple[str | None, list[str], str]:
        ids, mask = [], []
        for part, own in parts:
            ids += encode(TOKENIZER, part)
            mask += [own] * (len(ids) - len(mask))
        answer, end, spans = find_reasoning({0: ids}, TOKENIZER, masks={0: mask}, unanswered=True)[0]
        decoded = [TOKENIZER.decode(ids[slice(*span)]).strip() for span in spans]
        return answer and TOKENIZER.decode(ids[slice(*answer)]).strip(), decoded, TOKENIZER.decode(ids[end:]).strip()

    called = ("3 * 4 = 12. Let me see:\n<tool_call>12 - 5</tool_call>\n", 1)
    answer, spans, rest = read(called, ("<tool_response>7</tool_response>\n", 0), ("I see 7.\nThe answer is 7.", 1))
    assert (answer, spans, rest) == ("7", ["3 * 4 = 12", "Let me see:", "I see 7."], "The answer is 7.")
    assert read(("3 * 4 = 12. The answer is:", 1), ("\n17 ", 0), ("8 eggs", 1))[0] is None
    assert read(("3 * 4 = 12. The answer is:", 1), ("\n", 0), ("8 eggs", 1))[0] == "8"


PLAN = """To find the total we go step by step.

### Step 1: Count the eggs
First we need to know how many there are.
There are 16 eggs.

### Step 2: Take away 3 for breakfast
**Step 2.1: Subtract**
16 - 3 = 13
That leaves 13 eggs.

### Step 3: Sell the rest
1. Each egg costs 2 dollars.
2. So we multiply.
13 * 2 = 26

So the answer is: \\boxed{26}"""


@pytest.mark.parametrize(
    ("count", "spans"),
    [
        (3, ["16 - 3 = 13", "1. Each egg costs 2 dollars.", "13 * 2 = 26"]),
        (4, ["16 - 3 = 13", "That leaves 13 eggs.", "1. Each egg costs 2 dollars.", "13 * 2 = 26"]),
        (6, ["There are 16 eggs.", "16 - 3 = 13", "That leaves 13 eggs.", "1. Each egg costs 2 dollars.",
             "2. So we multiply.", "13 * 2 = 26"]),
    ],
)  # fmt: skip
def test_spans_with_numbers_nearest_to_the_answer_stay_before_plans_and_headings(count: int, spans: list[str]) -> None:
    assert spans_of(PLAN, max_spans=count) == spans
    everything = spans_of(PLAN, max_spans=99)
    assert set(spans) <= set(everything)
    assert [span for span in everything if span in spans] == spans
    assert spans_of(PLAN, PAPERS, max_spans=3, selection="first")[0] == "To find the total we go step by step."
