"""Thoughts, tool calls, turns and what others wrote: none of it is an answer, and no sign of it is a span."""

import functools
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from cfa_kernels import AnswerRules, SpanRules, answer_text_span, detect_spans, find_answer
from cfa_kernels.text import markup
from cfa_kernels.text.find import Reasoning, content_text, find_reasoning
from cfa_kernels.text.markup import THOUGHTS, sign_names
from cfa_kernels.text.offsets import token_offsets
from tests.support.small_tokenizers import (
    BACKENDS,
    FAST,
    byte_level,
    encode,
    get_tokenizer,
    property_test,
    snippets,
    wrap,
)

TAGS = [*THOUGHTS.items()]
FORMS = ["#### {}", "\\boxed{{{}}}", "The answer is {}.", "<answer>{}</answer>", "A: {}"]
EVERY = SpanRules("sentence", max_spans=99)


@functools.cache
def tokenizer_with(*special: str, backend: str = FAST[1]) -> PreTrainedTokenizerBase:
    tokenizer = wrap(BACKENDS[backend]())
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


HARMONY = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|return|>", "<|call|>", "<|constrain|>")
CHAT = ("<|im_start|>", "<|im_end|>")
ASSISTANT = "<|im_start|>assistant\n"


def read(text: str, tokenizer: PreTrainedTokenizerBase, *, prompt: str | None = None, **options: object):
    """The answer's text and those of the spans, by sentences."""
    ids = encode(tokenizer, text)
    before = None if prompt is None else encode(tokenizer, prompt)
    rules = AnswerRules(**options)
    answer = find_answer(ids, tokenizer, rules, prompt=before)
    spans = detect_spans(ids, tokenizer, prompt=before, spans=EVERY, answers=rules)
    if not callable(rules.answer_format):
        content = content_text(ids, tokenizer, rules, prompt=before)
        stated = answer_text_span(content, rules)
        assert (None if stated is None else content[slice(*stated)]) == spelled(ids, answer, tokenizer)
    return spelled(ids, answer, tokenizer), [spelled(ids, span, tokenizer) for span in spans]


def spelled(ids, span, tokenizer) -> str | None:
    return None if span is None else tokenizer.decode(ids[slice(*span)], skip_special_tokens=True).strip()


@pytest.mark.parametrize(("opener", "closer", "form"), [(*pair, FORMS[i % 5]) for i, pair in enumerate(TAGS)])
def test_no_answer_is_in_a_thought_whatever_its_signs_as_text_or_as_special_tokens(opener, closer, form) -> None:
    guess, answer = form.format(17), form.format(18)
    for tokenizer in (tokenizer_with(), tokenizer_with(opener, closer)):
        thought = f"{opener}Maybe {guess}\nNo, check."
        assert read(thought, tokenizer)[0] is None
        assert read(f"{thought}{closer}\n{answer}", tokenizer)[0] == "18"
        assert read(f"{thought}{closer}So it is.", tokenizer)[0] is None
        assert read(f"{answer}\n{opener}{guess}", tokenizer)[0] == "18"
        assert read(f"{answer}\n{opener}{guess}{closer}{opener}{guess}", tokenizer)[0] == "18"
        for prompt in (f"Question: 9 * 2?\nAnswer: {opener}\n", f"Q{opener}a{closer}\nA: {opener}"):
            assert read(f"Maybe {guess}\nNo, check.", tokenizer, prompt=prompt)[0] is None
            assert read(f"Maybe {guess}{closer}\n{answer}", tokenizer, prompt=prompt)[0] == "18"
    assert answer_text_span(guess, prompt=f"Q\nA: {opener}\n") is None
    assert answer_text_span(guess + closer) is None, "the closer alone tells that the prompt opened the thought"


@pytest.mark.parametrize(("opener", "closer"), TAGS)
def test_a_question_or_an_instruction_that_speaks_of_tags_opens_no_thought(opener, closer) -> None:
    tokenizer = tokenizer_with(opener, closer, *CHAT)
    for prompt in (
        f"Think between {opener} and {closer}. What is 9 * 2?\nAnswer:",
        f"Think after {opener}. What is 9 * 2?\nAnswer:",
        f"<|im_start|>system\nBegin with {opener}<|im_end|>\n<|im_start|>user\n9 * 2?<|im_end|>\n{ASSISTANT}",
        f"<|im_start|>user\n9 * 2? {opener}<|im_end|>\n{ASSISTANT}{opener}\n\n{closer}\n\n",
        f"<|im_start|>user\n9 * 2?<|im_end|>\n{ASSISTANT}Some {opener} is not at the turn's start",
    ):
        assert read("9 * 2 = 18\n#### 18", tokenizer, prompt=prompt)[0] == "18", prompt
    begun = f"<|im_start|>user\n9 * 2?<|im_end|>\n{ASSISTANT}{opener}\nLet me see."
    assert read("9 * 2 = 18\n#### 18", tokenizer, prompt=begun)[0] is None, "a thought may be begun in the prompt"


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<|channel|>analysis<|message|>The answer is 17? No: 9 * 2 = 18.<|end|><|start|>assistant<|channel|>final"
         "<|message|>Answer: 18<|return|>", "18"),
        ("<|channel|>analysis<|message|>#### 17<|end|><|start|>assistant<|channel|>final<|message|>It is 18.", None),
        ("<|channel|>analysis<|message|>9 * 2 = 18. So the answer is 18? Let me check", None),
        ("<|channel|>final<|message|>The answer is 18.<|return|>", "18"),
        ("<|channel|>commentary<|message|>I look it up. A: 17<|end|><|start|>assistant<|channel|>analysis<|message|>"
         "#### 16<|end|><|start|>assistant<|channel|>final<|message|>#### 18", "18"),
        ("<|channel|>commentary to=functions.calc <|constrain|>json<|message|>{\"a\": \"#### 17\"}<|call|>", None),
        ("<|channel|>analysis<|message|>#### 17<|end|><|start|>assistant to=functions.calc<|channel|>commentary json"
         "<|message|>{\"#### 16\"}<|call|><|start|>functions.calc to=assistant<|channel|>commentary<|message|>#### 15"
         "<|end|><|start|>assistant<|channel|>final<|message|>So #### 18", "18"),
        ("<|channel|>analysis<|message|>#### 17<|end|><|start|>assistant<|channel|>fin", None),
        ("<|channel|>analysis<|message|>#### 17<|end|><|start|>assistant<|channel|>final<|message|>", None),
    ],
)  # fmt: skip
def test_of_harmonys_channels_the_final_one_answers(completion, answer) -> None:
    for tokenizer in (tokenizer_with(*HARMONY), tokenizer_with()):
        found, spans = read(completion, tokenizer, prompt="<|start|>user<|message|>#### 1<|end|><|start|>assistant")
        assert found == answer
        text = "\n".join(spans)
        assert not re.search(r"<\||\||channel|message|assistant|functions|analysis|commentary|final\b", text)
    dropped = tokenizer_with(*HARMONY).decode(encode(tokenizer_with(*HARMONY), completion), skip_special_tokens=True)
    span = answer_text_span(dropped)
    assert (None if span is None else dropped[slice(*span)]) == answer, "also once special tokens were dropped"


def test_a_channel_that_the_prompt_opens_is_open() -> None:
    tokenizer, head = tokenizer_with(*HARMONY), "<|start|>user<|message|>9 * 2?<|end|><|start|>assistant<|channel|>"
    for prompt, answer in ((f"{head}analysis<|message|>", None), (f"{head}final<|message|>", "18"), (head[:-11], "18")):
        assert read("9 * 2 = 18. #### 18", tokenizer, prompt=prompt)[0] == answer
    closed = "9 * 2 = 17. #### 17<|end|><|start|>assistant<|channel|>final<|message|>#### 18"
    assert read(closed, tokenizer, prompt=f"{head}analysis<|message|>Well,")[0] == "18"


@pytest.mark.parametrize(
    "text",
    ["analysis of the costs: 9 * 2 = 18\n#### 18", "analysis: 9 * 2\n#### 18", "finally, it is\n#### 18",
     "final: #### 18", "Analysis\n#### 18", "commentary on it\n#### 18", "The assistant finally says\n#### 18"],
)  # fmt: skip
def test_words_that_harmony_also_uses_are_words(text) -> None:
    assert read(text, tokenizer_with())[0] == "18"


def test_thoughts_are_reasoning_and_their_signs_are_not() -> None:
    text = "<think>She has 16 eggs. She eats 3.</think>\n16 - 3 = 13.\n#### 13"
    for tokenizer in (tokenizer_with(), tokenizer_with("<think>", "</think>")):
        assert read(text, tokenizer)[1] == ["She has 16 eggs.", "She eats 3.", "16 - 3 = 13."]


def test_a_runs_own_tags_are_known_where_they_stand_and_no_others() -> None:
    text = "[plan]#### 17[/plan]<sketch>#### 16</sketch>\n#### 18\n[plan]#### 15"
    tags = "<sketch> </sketch> [plan] [/plan]"
    for tokenizer in (tokenizer_with(), tokenizer_with("[plan]", "[/plan]")):
        assert read(text, tokenizer)[0] == "15"
        assert read(text, tokenizer, thought_tags=tags) == ("18", ["#### 17", "#### 16"])
        assert read("#### 17", tokenizer, prompt="Q [plan]", thought_tags=tags)[0] is None
    with pytest.raises(ValueError, match=r"thought_tags must be openers and closers in turn, in pairs, got '<a>'"):
        AnswerRules(thought_tags="<a>")


@pytest.mark.parametrize(
    "call",
    [
        '<tool_call>\n{"name": "calc", "arguments": {"x": "9 * 2 = 17 #### 17"}}\n</tool_call>',
        "<tool_response>\n9 * 2 = 17\n#### 17\n</tool_response>",
        "<|tool_calls_section_begin|>9 * 2 = 17 #### 17<|tool_calls_section_end|>",
        "[TOOL_RESULTS]9 * 2 = 17 #### 17[/TOOL_RESULTS]",
        '[TOOL_CALLS]calc{"x": "#### 16"}[TOOL_RESULTS]9 * 2 = 17 #### 17[/TOOL_RESULTS]',
        "<|im_start|>user\n9 * 2 = 17 #### 17<|im_end|>\n<|im_start|>assistant\n",
        "<|start_header_id|>ipython<|end_header_id|>\n#### 17<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<｜User｜>9 * 2 = 17 #### 17<｜Assistant｜>",
        '<function=calc>{"x": "#### 17"}</function>',
        "<|tool_response|>9 * 2 = 17 #### 17<|/tool_response|>",
        "<|start|>python<|message|>9 * 2 = 17 #### 17<|end|><|start|>assistant<|channel|>final<|message|>",
        "<|start|>my-tool<|message|>The answer is 17.<|end|><|start|>assistant<|message|>",
        "<｜tool▁output▁begin｜>9 * 2 = 17 #### 17<｜tool▁output▁end｜>",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="calc">#### 17</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "<|tool_call_start|>#### 16<|tool_call_end|><|tool_response_start|>#### 17<|tool_response_end|>",
    ],
)
@pytest.mark.parametrize("as_special", [False, True])
def test_calls_responses_and_roles_are_neither_answers_nor_spans(call, as_special) -> None:
    signs = sorted({name for name in sign_names() if name in call})
    tokenizer = tokenizer_with(*CHAT, *signs) if as_special else tokenizer_with()
    text = f"I ask. {call} So 9 * 2 = 18. #### 18"
    assert read(text, tokenizer) == ("18", ["I ask.", "So 9 * 2 = 18."])
    assert read(f"#### 18 {call}", tokenizer)[0] == "18"
    assert read(f"<think>{call} Hm.</think> #### 18", tokenizer) == ("18", ["Hm."])


@pytest.mark.parametrize("name", ["answer", "response", "solution", "Answer"])
def test_tags_around_what_is_said_are_no_spans(name) -> None:
    tokenizer = tokenizer_with()
    said = f"<think>Hm. #### 17</think>\n<{name}>\nSo 9 * 2 = 18. It is \\boxed{{18}}.\n</{name}>"
    assert read(said, tokenizer) == ("18", ["Hm.", "#### 17", "So 9 * 2 = 18."])
    assert read(f"So it is. <{name}>It is 9 * 2.</{name}>\nA: 18", tokenizer)[1] == ["So it is.", "It is 9 * 2."]
    code = f'print("<{name}>", 18)'
    assert markup.read_speech(code).reasoning == code


@pytest.mark.parametrize("call", ["<search>", "<tool_call>", "<|python_tag|>", "<information>", "[TOOL_CALLS]"])
def test_a_prompt_that_speaks_of_calls_still_opens_a_thought_at_its_end(call) -> None:
    prompt = f"Call tools by writing {call}. What is 9 * 2? Assistant: <think>\n"
    assert answer_text_span("#### 17", prompt=prompt) is None
    assert answer_text_span("#### 17 no</think>\n#### 18", prompt=prompt) == (24, 26)
    assert answer_text_span("#### 17", prompt=f"Begin with <think>, call {call}. 9 * 2? A:") == (5, 7)


# --- What the policy did not write ----------------------------------------------------------------------------------


def joined(parts: list[tuple[str, int]], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    rows = [(encode(tokenizer, text), mask) for text, mask in parts]
    return [i for ids, _ in rows for i in ids], [mask for ids, mask in rows for _ in ids]


def read_masked(parts, tokenizer, *, prompt=None, spans=EVERY, **options):
    ids, mask = joined(parts, tokenizer)
    rules = AnswerRules(**options)
    before = None if prompt is None else {0: encode(tokenizer, prompt)}
    found = find_reasoning(
        {0: ids}, tokenizer, spans=spans, answers=rules, unanswered=True, prompts=before, masks={0: mask}
    )
    answer, _, units = found[0]
    assert all(mask[t] for span in [*units, *[answer] * (answer is not None)] for t in range(*span))
    return spelled(ids, answer, tokenizer), [spelled(ids, unit, tokenizer) for unit in units]


TOOL = "\nResult: 9 * 2 = 18\n#### 18\n"


@pytest.mark.parametrize(
    ("parts", "answer", "spans"),
    [
        ([("I compute it. ", 1), (TOOL, 0), ("Then 18 + 4 = 22. #### 22", 1)], "22",
         ["I compute it.", "Then 18 + 4 = 22."]),
        ([("I compute it. ", 1), (TOOL, 0), ("Then 18 + 4 = 22. I am done.", 1)], None,
         ["I compute it.", "Then 18 + 4 = 22.", "I am done."]),
        ([("#### 7", 1), (TOOL, 0)], "7", []),
        ([(TOOL, 0), ("#### 7", 1), (TOOL, 0), (" Done.", 1), (TOOL, 0)], "7", []),
        ([("The answer is ", 1), ("18.", 0), (" Or", 1), (" 5.", 0)], None, ["The answer is", "Or"]),
        ([("The total is 1", 1), ("8 eggs", 0), (" and more.", 1)], None, ["The total is 1", "and more."]),
    ],
)  # fmt: skip
def test_answers_and_spans_are_what_the_policy_wrote(parts, answer, spans) -> None:
    assert read_masked(parts, tokenizer_with()) == (answer, spans)


def test_an_answer_with_a_token_of_others_in_it_is_none_even_if_that_token_has_no_text() -> None:
    tokenizer = tokenizer_with()
    silent = tokenizer.pad_token_id
    ids = [*encode(tokenizer, "The answer is 1"), silent, *encode(tokenizer, "8 eggs")]
    assert spelled(ids, find_answer(ids, tokenizer), tokenizer) == "18"
    mask = [int(i != silent) for i in ids]
    assert find_answer(ids, tokenizer, mask=mask) is None
    assert find_reasoning({0: ids}, tokenizer, masks={0: mask}) == {0: Reasoning(None, len(ids), [])}


TURN = "<|im_end|>\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("parts", "answer"),
    [
        ([("<think>Hm.</think>I ask.", 1), (TURN.format("#### 17"), 0), ("#### 18", 1)], "18"),
        ([("<think>I ask.", 1), (TURN.format("#### 17"), 0), ("#### 18", 1)], "18"),  # a turn ends a thought
        ([("<think>I ask.", 1), (TURN.format("#### 17") + "<think>\n", 0), ("#### 18", 1)], None),
        ([("<think>I ask.", 1), (TURN.format("#### 17") + "<think>\n", 0), ("#### 18</think>#### 19", 1)], "19"),
        ([("I ask.", 1), (TURN.format("<think>"), 0), ("#### 18", 1)], "18"),  # a tool may say anything
        ([("<think><search>x</search>", 1), ("<information>#### 17</information>", 0), ("#### 18", 1)], None),
        ([("<think>So long", 1), ("\n</think>\n\n", 0), ("#### 18", 1)], "18"),  # a budget that ends thoughts
        ([("I ask. <tool_call>{}", 1), ("</tool_call>\n#### 17\n", 0), ("#### 18", 1)], "18"),
    ],
)
def test_what_others_write_may_open_and_close_a_thought(parts, answer) -> None:
    for tokenizer in (tokenizer_with(), tokenizer_with(*CHAT, "<think>", "</think>")):
        assert read_masked(parts, tokenizer)[0] == answer


POLICY = [
    "She has 16 eggs. ", "16 - 3 = 13", "\n", "So ", "#### 5", "\\boxed{6} ", "The answer is 7. ", "**", "3 * 4\n= 12 ",
    "\\[ a + 1", " = 2 \\]", "é🦆", "<think>", "</think>", "x ",
]  # fmt: skip
OTHERS = [
    "Result: 9 * 2 = 18\n#### 18\n", "\\boxed{17}", "The answer is 16.", " ", "\n", "14", "<think>?", "\\]", "$",
    "####", "Done. ", "<tool_response>#### 3</tool_response>",
]  # fmt: skip


@pytest.mark.parametrize(("name", "detector"), zip(FAST[:2] * 3, ["math", "latex", "sentence"] * 2, strict=True))
@property_test
@given(parts=st.lists(st.sampled_from([*((p, 1) for p in POLICY), *((o, 0) for o in OTHERS)]), max_size=14))
def test_what_a_tool_says_changes_neither_answer_nor_spans(name, detector, parts) -> None:
    tokenizer, spans = get_tokenizer(name), SpanRules(detector, max_spans=99)
    silent = [(text if mask else "\n" * len(text), mask) for text, mask in parts]
    for options in ({}, {"answer_fallback": "last_number"}):
        expected = read_masked(silent, tokenizer, spans=spans, **options)
        assert read_masked(parts, tokenizer, spans=spans, **options) == expected


def test_a_mask_that_is_no_mask_is_named() -> None:
    tokenizer = tokenizer_with()
    ids = encode(tokenizer, "16 - 3")
    for mask in ([1] * (len(ids) - 1), [2] * len(ids), [0.5] * len(ids)):
        with pytest.raises(ValueError, match=rf"row 4: mask must be 1 or 0 for each of {len(ids)} tokens, got"):
            find_reasoning({4: ids}, tokenizer, masks={4: mask})


SIGNS = [*itertools.chain(*THOUGHTS.items()), "<tool_call>", "</tool_call>", "<|im_end|>"]
BITS = [
    "assistant", "final", "analysis", "commentary to=functions.f json", "user\n", "\nuser\n", "<end_of_turn>", "<|",
    "[", "<", "<answer>", "</solution>", "[e~[", "<seed:x>", "[|endofturn|]", "tool", "ai\n", "f to=", "<SPECIAL_12>",
]  # fmt: skip
SIGN = re.compile("|".join(map(re.escape, SIGNS)))


def whole(text: str) -> list[tuple[int, int]]:
    return [(0, len(text))] if text else []


@pytest.mark.parametrize(
    ("name", "detector"),
    [*zip(FAST, ["math", "latex", "sentence", whole], strict=True), *((name, whole) for name in FAST[:-1])],
)
@property_test
@given(parts=st.lists(st.sampled_from([*POLICY, *SIGNS]), max_size=14))
def test_signs_are_no_spans(name, detector, parts) -> None:
    tokenizer = get_tokenizer(name)
    ids = encode(tokenizer, "".join(parts))
    offsets = token_offsets(ids, tokenizer)
    for start, end in detect_spans(ids, tokenizer, spans=SpanRules(detector, max_spans=99)):
        held = offsets.starts[start], offsets.ends[end - 1]
        assert not any(sign.start() < held[1] and held[0] < sign.end() for sign in SIGN.finditer(offsets.text))
    content = content_text(ids, tokenizer)
    stated, answer = answer_text_span(content), find_answer(ids, tokenizer)
    assert (stated is None) == (answer is None)
    assert stated is None or tuple(offsets.tokens([stated])[0]) == answer


@property_test
@given(st.lists(st.one_of(st.sampled_from([*POLICY, *SIGNS, *sign_names(), *BITS]), snippets(3)), max_size=8))
def test_a_text_that_is_taken_for_plain_holds_no_sign(parts) -> None:
    for text in ("".join(parts), "".join(parts).upper(), "".join(parts).lower()):
        speech, signs = markup.read_speech(text), markup._signs("")
        regions = markup._regions(text, markup._State(), [], signs)
        left_out = [interval for kind in ("turn", "sign", "call", "response", "reply") for interval in regions[kind]]
        assert speech.no_reasoning == markup.merged(left_out)
        others = [interval for kind in ("turn", "response", "thought") for interval in regions[kind]]
        assert speech.content == markup.blanked(text, others)
        assert len(speech.content) == len(speech.statement) == len(speech.reasoning) == len(text)


def test_tokenizers_with_special_signs_spell_what_others_decode() -> None:
    plain, special = wrap(byte_level(None)), tokenizer_with("[THINK]", "[/THINK]", backend=FAST[0])
    ids = encode(special, "[THINK]a 1[/THINK] b[THINK]<|eos|>[/THINK]")
    assert token_offsets(ids, special).text == "a 1 b"
    assert token_offsets(ids, special, frozenset(["[THINK]"])).text == "[THINK]a 1 b[THINK]"
    offsets = token_offsets(ids, special, frozenset(["[THINK]", "[/THINK]"]), ends_shown=False)
    assert offsets.text == "[THINK]a 1[/THINK] b"
    assert offsets.starts.tolist()[-3:] == offsets.ends.tolist()[-3:] == [len(offsets.text)] * 3
    assert token_offsets(encode(plain, "<think>a"), plain, sign_names()).text == "<think>a"
