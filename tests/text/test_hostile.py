"""Text that no one writes but a model may sample: every reader of text is linear in it."""

import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfa_kernels.text.answers import answer_text_span
from cfa_kernels.text.rules import DETECTORS, AnswerRules
from tests.support.small_tokenizers import property_test
from trainer.rewards.numbers import parse_number

Read = Callable[[str], object]

READERS: dict[str, Read] = {
    **DETECTORS,
    "answer": lambda text: answer_text_span(text, AnswerRules(answer_fallback="last_number")),
    "prompt": lambda text: answer_text_span("#### 1", prompt=text),
    "number": parse_number,
}
LENGTH = 10_000
UNITS = [
    " ", "\t", "\r", "\u3000", "\n", " \n", "1", "1 ", "1,", "1,11,", ".", "1.", "(", ")", "[", "{", "}", "((1", "(1+",
    "f(1", "$", "$$", "$a$", "<<1", "<<1>>", "#### ", "#### 1. a\n", "+", "-", "1+", "1 a + 1 ", "=", "a=", "**", "\\",
    "\\\\", "\\boxed{", "\\boxed{}", "\\boxed 5", "\\frac{", "\\frac{1}{", "\\text{a}", "\\[", "\\(", "\\begin{align}",
    "\\end{align}", "a ", "ab-", "1 of ", "answer is ", "The answer to ", "nswer", "</answer>", "<answer>1",
    "A: x\nB: 1\n", "<think>", "'", '"', "'''", "```\n", "```python\n", "x=1;", "if a:\n ", "@a\n", "f'{", "!1",
    "1/2/", "1e5", "1:2", "www.", "\ud800", "a =", "the final ", "x x ", "1 eggs * (", "1(2)", "(1, 2", "1 % of ",
    "Answer: 1+1=2 ", "Answer\n1. a\n", "#### 1. a ", "<Answer>", "√", "A: 1\n", "\\text{ cm}^2",
    "\nQuestion: 1 ", "\nQ", "#### 2. a", "<|begin_of_box|>", "<|begin_of_box|>{", "<|end_of_box|>", "1 or ", "1 h ",
    "Answer: a 1 **2** ", "Answer:", "not ", "</s>", "<|im_start|>user", "\n# ",
    "<|start|>a.", "½", "（", "1（1", "个", "1个-", "1e", "1 m ", "1 ft. ", "1-", "1/", "f(1)", "1 + a = ", "a_1 + ",
    "<|start|>a to=b", "<|channel|>a", "python to=assistantfinal", "[|a", "]~b]a", "<seed:a", "<answer", "<search>",
]  # fmt: skip
SURROUNDINGS = [("", ""), ("She has 3 + 4 = 7 eggs.", ""), ("1", "1"), ("The answer is ", "}")]


def seconds(read: Read, text: str) -> float:
    """The least of three readings, of this process only; a short one is not measured again."""
    times = []
    for _ in range(3):
        start = time.process_time()
        read(text)
        times.append(time.process_time() - start)
        if times[-1] < 0.1:
            break
    return min(times)


def check_linear(read: Read, before: str, unit: str, after: str) -> None:
    def text(length: int) -> str:
        return before + (unit * length)[:length] + after

    # What is linear takes 8 times as long, what is quadratic 64 times. Idle machines take below 0.05 s for the whole.
    eighth = seconds(read, text(LENGTH // 8))
    assert eighth < 0.25, f"{LENGTH // 8} characters of {unit!r} take {eighth:.2f} s"
    whole = seconds(read, text(LENGTH))
    assert whole < max(0.25, 24 * eighth), f"{LENGTH} of {unit!r} take {whole:.2f} s, an eighth {eighth:.2f} s"
    assert whole < 1


@pytest.mark.parametrize("name", READERS)
def test_repetition_is_read_in_linear_time(name: str) -> None:
    for i, unit in enumerate(UNITS):
        check_linear(READERS[name], SURROUNDINGS[i % 4][0], unit, SURROUNDINGS[i % 4][1])
    for before, after in SURROUNDINGS:
        check_linear(READERS[name], before, " ", after)
    check_linear(READERS[name], "#### ", "a=", "")
    check_linear(READERS[name], "The answer is ", "the =", "")
    check_linear(READERS[name], "```python\n", " ", "")


@pytest.mark.parametrize("name", READERS)
@settings(property_test, max_examples=10)
@given(pieces=st.tuples(*[st.lists(st.sampled_from(UNITS), max_size=2).map("".join)] * 3))
def test_any_repetition_is_read_in_linear_time(name: str, pieces: tuple[str, str, str]) -> None:
    before, unit, after = pieces
    check_linear(READERS[name], before, unit or "x", after)
