"""From sampled ids to the answer and the spans, on small tokenizers of each family and on real model output."""

import functools
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from cfa_kernels.span import Span
from cfa_kernels.text.answers import answer_text_span
from cfa_kernels.text.arithmetic import ranked_math_intervals
from cfa_kernels.text.find import Reasoning, detect_spans, find_answer, find_reasoning
from cfa_kernels.text.offsets import token_offsets
from cfa_kernels.text.rules import DETECTORS, AnswerRules, Selection, SpanRules
from tests.support.small_tokenizers import (
    FAST,
    TOKENIZERS,
    byte_level,
    completions,
    encode,
    get_tokenizer,
    gsm8k_rows,
    property_test,
    wrap,
)

SELECTIONS = get_args(Selection)
DIGITS = get_tokenizer("byte-level, single digits")


def span_texts(
    text: str, tokenizer: PreTrainedTokenizerBase, answer: Span | None = None, **options: object
) -> list[str]:
    ids = encode(tokenizer, text)
    offsets = token_offsets(ids, tokenizer)
    return [
        offsets.text[offsets.starts[s] : offsets.ends[e - 1]].strip()
        for s, e in detect_spans(ids, tokenizer, answer=answer, spans=SpanRules(**options))
    ]


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize(
    ("text", "spans"),
    [
        (
            "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\nShe is rich.\n"
            "She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18",
            ["16 - 3 - 4 = <<16-3-4=9>>9", "She is rich.", "9 * 2 = $<<9*2=18>>18"],
        ),
        (r"We know $16 - 7 = \boxed{9}$ and stop at 3 + 3 = 6.", ["$16 - 7 ="]),
        ("Renée’s 25€ × 3 = 75€. 她有苹果。🦆 quack\n#### 75", ["25€ × 3 = 75€", "她有苹果。", "🦆 quack"]),
        ("#### 16\nNo. 16 + 2 = 18\n#### 18", ["#### 16", "No.", "16 + 2 = 18"]),
        ("#### 18", []),
    ],
)
def test_spans_are_the_arithmetic_and_the_other_sentences_before_the_marker(
    name: str, text: str, spans: list[str]
) -> None:
    # Digits and letters decide; where a token boundary falls differently, signs at the edge may be cut or added.
    bare = functools.partial(re.sub, r"^\W+|[^\w€。]+$", "")
    expected = [bare(span) for span in spans]
    assert [bare(span) for span in span_texts(text, get_tokenizer(name))] == expected


@pytest.mark.parametrize(
    ("detector", "name"), [*(("math", name) for name in TOKENIZERS), *zip(list(DETECTORS)[1:], FAST, strict=False)]
)
@property_test
@given(data=st.data())
def test_spans_are_sorted_disjoint_inside_and_clear_of_the_answer(
    detector: str, name: str, data: st.DataObject
) -> None:
    tokenizer = get_tokenizer(name)
    ids = data.draw(completions(name))
    max_spans = data.draw(st.integers(1, 6))
    selection = data.draw(st.sampled_from(SELECTIONS))
    answer = find_answer(ids, tokenizer)
    rules = SpanRules(detector, max_spans, selection)
    spans = detect_spans(ids, tokenizer, spans=rules)
    assert len(spans) <= max_spans
    assert all(span.start < span.end for span in spans)
    bounds = [edge for span in spans for edge in span]
    assert bounds == sorted(bounds)
    assert all(0 <= edge <= len(ids) for edge in bounds)
    if answer:
        assert all(span.end <= answer.start for span in spans)
    assert spans == detect_spans(ids, tokenizer, answer=answer, spans=rules)
    found = find_reasoning({4: ids, 2: []}, tokenizer, spans=rules)
    assert found[4][::2] == (answer, spans if answer else [])
    assert found[2] == Reasoning(None, 0, [])


@pytest.mark.parametrize("name", TOKENIZERS)
@property_test
@given(data=st.data())
def test_the_answer_tokens_spell_only_the_answer_and_padding_changes_nothing(name: str, data: st.DataObject) -> None:
    tokenizer = get_tokenizer(name)
    ids = data.draw(completions(name))
    answer = find_answer(ids, tokenizer)
    padded = [*ids, tokenizer.eos_token_id, *[tokenizer.pad_token_id] * data.draw(st.integers(0, 3))]
    assert find_answer(padded, tokenizer) == answer
    assert detect_spans(padded, tokenizer) == detect_spans(ids, tokenizer)
    if answer is None:
        return
    offsets = token_offsets(ids, tokenizer)
    start, end = answer_text_span(offsets.text)
    if "\ufffd" not in offsets.text:
        text = tokenizer.decode(ids[slice(*answer)], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert offsets.text[start:end] in text
    touching = [t for t in range(len(ids)) if offsets.starts[t] < end and offsets.ends[t] > start]
    assert answer == Span(touching[0], touching[-1] + 1)


@pytest.mark.parametrize(
    ("selection", "max_spans", "kept"),
    [
        ("first", 3, "1 2 3"), ("last", 3, "5 6 7"), ("longest", 1, "c"), ("even", 3, "1 4 7"),
        ("even", 2, "1 7"), ("even", 1, "4"),
        ("even", 6, "1 2 3 5 6 7"), ("last", 8, "1 2 3 4 5 6 7 e"), ("even", 9, "a 1 2 3 4 5 6 7 e"),
        ("even", 99, "a 1 b 2 3 c 4 5 d 6 7 e"),
    ],
)  # fmt: skip
def test_last_and_even_prefer_arithmetic_and_even_keeps_both_ends(selection: str, max_spans: int, kept: str) -> None:
    text = "\n".join(
        f"{part} + 0 = {part}" if part.isdigit() else f"{part} word{'s' * 9 * (part == 'c')}."
        for part in "a1b23c45d67e"
    )
    found = span_texts(text + "\n#### 7", DIGITS, selection=selection, max_spans=max_spans)
    assert [span[0] for span in found] == kept.split()


def test_a_detector_of_ones_own_sees_the_reasoning_and_ranks_its_spans() -> None:
    texts = []

    def detector(text: str) -> list[tuple[int, int]]:
        texts.append(text)
        return [(6, 7), (2, 3), (4, 5), (0, 1)]

    for selection, kept in (("first", "bd"), ("last", "cd"), ("even", "ad")):
        found = span_texts("a b c d\n#### 4", DIGITS, selection=selection, detector=detector, max_spans=2)
        assert found == list(kept)
    assert set(texts) == {"a b c d\n"}


PAPERS = {"lead_in": "statement"}


@pytest.mark.parametrize(
    ("text", "rules", "answer", "spans"),
    [
        ("#### 5 eggs. Then RESULT=18", {"answer_format": r"RESULT=(\d+)"}, "18", ["#### 5 eggs."]),
        ("So RESULT=18", {"answer_format": lambda text: (10, 12)}, "18", []),
        ("3 + 4 = 7. So, 7 eggs", {"answer_fallback": "last_number"}, "7", ["3 + 4 = 7"]),
        ("#### 5 eggs. Then RESULT=18", {"answer_format": r"RESULT=(\d+)"} | PAPERS, "18", ["#### 5 eggs.", "Then"]),
        ("3 + 4 = 7. So, 7 eggs", {"answer_fallback": "last_number"} | PAPERS, "7", ["3 + 4 = 7", "So,"]),
    ],
)
def test_answer_and_spans_follow_the_runs_own_rules(text: str, rules: dict, answer: str | None, spans: list) -> None:
    ids = encode(DIGITS, text)
    answers = AnswerRules(**rules)
    found, _, detected = find_reasoning({3: ids}, DIGITS, answers=answers)[3]
    assert found == find_answer(ids, DIGITS, answers)
    assert (found and DIGITS.decode(ids[slice(*found)])) == answer
    assert [DIGITS.decode(ids[slice(*span)]).strip() for span in detected] == spans
    assert answer is None or detected == detect_spans(ids, DIGITS, answers=answers)


def test_a_given_answer_bounds_the_reasoning_whatever_the_text_marks() -> None:
    text = "We get 1 + 2 = 3. Then 4 + 5 = 9. Done"
    start = text.index("9")
    tokens = token_offsets(encode(DIGITS, text), DIGITS).tokens([(start, start + 1)])[0]
    assert span_texts(text, DIGITS, answer=Span(*tokens)) == ["1 + 2 = 3", "4 + 5 ="]


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([(0, 2), (1, 4)], [Span(0, 1), Span(1, 2)]),  # shares its first token: cut
        ([(2, 4), (0, 3)], [Span(0, 1), Span(1, 2)]),  # shares its last token: cut
        ([(2, 3), (0, 8)], [Span(1, 2)]),  # holds an earlier interval: dropped
        ([(0, 1), (1, 2)], [Span(0, 1)]),  # nothing left of the second
        ([(0, 8)], [Span(0, 4)]),
    ],
)
def test_overlaps_after_widening_are_settled_in_the_detectors_order(
    intervals: list[tuple[int, int]], expected: list[Span]
) -> None:
    tokenizer = wrap(byte_level(None))
    tokenizer.add_tokens(["ab", "cd", "--", "ef"])
    ids = tokenizer.convert_tokens_to_ids(["ab", "cd", "--", "ef"])
    assert detect_spans(ids, tokenizer, spans=SpanRules(lambda _: intervals)) == expected


@pytest.mark.parametrize(
    ("ids", "options", "error", "message"),
    [
        (torch.tensor([[5, 6]]), {}, TypeError, "token_ids must be 1-D and integers: 'list' object"),
        ([5, 6, -1], {}, ValueError, r"token_ids\[2\] is -1: an id is not negative; take padding off"),
        ([5, 6], {"answer": Span(1, 3)}, ValueError, r"answer: \(1, 3\) is not a non-empty span inside .* of 2 tokens"),
        ([5, 6], {"spans": SpanRules(lambda text: [(0, 1), (1, 9)])}, ValueError, r"detector's interval 1 is \[1, 9\)"),
        ([5, 6], {"spans": "math"}, ValueError, "spans must be of class SpanRules, got 'math'"),
    ],
)
@pytest.mark.parametrize("name", ["byte-level, merged digits", "characters"])
def test_bad_input_is_named(name: str, ids: object, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        detect_spans(ids, **{"tokenizer": get_tokenizer(name), **options})


# --- Real model output ----------------------------------------------------------------------------------------------


def test_selections_leave_out_of_real_solutions_what_the_docs_say(gsm8k: Path) -> None:
    rows = dict(enumerate(encode(DIGITS, row["answer"]) for row in gsm8k_rows(gsm8k, "test")))

    def spans_of(rules: SpanRules) -> list[list[Span]]:
        return [found.spans for found in find_reasoning(rows, DIGITS, spans=rules).values()]

    def left_out(wanted: list[list[Span]], chosen: list[list[Span]]) -> str:
        lost = sum(len({*some} - {*kept}) for some, kept in zip(wanted, chosen, strict=True))
        return f"{lost / sum(map(len, wanted)):.1%}".replace("%", " %")

    arithmetic = spans_of(SpanRules(lambda text: ranked_math_intervals(text)[0], 99))
    near = [spans[-max(1, len(spans) // 4) :] for spans in arithmetic]
    chosen = [spans_of(SpanRules(max_spans=3, selection=selection)) for selection in SELECTIONS]
    cells = [f"{left_out(arithmetic, kept)}, {left_out(near, kept)}" for kept in chosen]
    nearest = cells.pop(SELECTIONS.index("nearest"))
    assert nearest == cells[-1], "all arithmetic holds numbers"
    page = (Path(__file__).parents[2] / "docs" / "spans.md").read_text(encoding="utf-8")
    assert f"| GSM8K, published | 3 | {' | '.join(cells)} |" in page
