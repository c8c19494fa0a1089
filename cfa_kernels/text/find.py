"""Find the answer and the reasoning spans of a completion, in sampled tokens.

Intervals of the text (`answers.py`, the detectors of `rules.py`) become whole tokens (`offsets.py`).
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from ..span import Span
from .answers import AnswerText, locate_answer
from .offsets import TokenOffsets, token_offsets
from .patterns import LETTER_OR_DIGIT, Interval
from .rules import USUAL_ANSWERS, USUAL_SPANS, AnswerFormat, AnswerRules, Detector, SpanRules


class Reasoning(NamedTuple):
    """Answer and reasoning of one completion, in its tokens."""

    answer: Span | None
    end: int  # tokens of reasoning: up to the answer's marker, all of them where there is no answer
    spans: list[Span]


def find_answer(
    token_ids: Sequence[int] | torch.Tensor,
    tokenizer: PreTrainedTokenizerBase,
    *,
    answer_format: AnswerFormat | None = None,
    answer_fallback: str | None = None,
) -> Span | None:
    """Find the answer a completion gives, right or wrong: every token that touches `answer_text_span`.

    Args:
        token_ids: (T,) sampled ids, a sequence of ints or an integer tensor; T may be 0.
        tokenizer: a transformers tokenizer.
        answer_format, answer_fallback: the run's own form of answers, and the fallback where none is found, as in
            `answer_text_span`.

    Returns:
        A non-empty span of completion tokens, or `None` when there is no answer.

    Raises:
        TypeError, ValueError: as `token_offsets` and `answer_text_span`.
    """
    rules = AnswerRules(answer_format, answer_fallback)
    offsets = token_offsets(token_ids, tokenizer)
    return _answer_tokens(offsets, locate_answer(offsets.text, rules))


def detect_spans(
    token_ids: Sequence[int] | torch.Tensor,
    tokenizer: PreTrainedTokenizerBase,
    *,
    answer: Span | None = None,
    detector: str | Detector = "math",
    max_spans: int = 10,
    selection: str = "first",
    answer_format: AnswerFormat | None = None,
    answer_fallback: str | None = None,
) -> list[Span]:
    """Find the reasoning spans of a completion that counterfactual scoring masks one at a time.

    Spans are before the answer's marker (`####`, `\\boxed{`, "the answer is"), or anywhere when there is no
    answer. A detector's intervals are widened to whole tokens in the detector's order; a token that an earlier
    interval or the marker holds is cut from a later one, which is dropped if no letter or digit remains or if
    an earlier one is inside it.

    Args:
        token_ids: (T,) sampled ids, a sequence of ints or an integer tensor; T may be 0.
        tokenizer: a transformers tokenizer.
        answer: the answer's tokens; `None` means `find_answer` is asked.
        detector: "math" (arithmetic, then sentences that overlap none of it), "latex" (equations, other formulas,
            then sentences that overlap none), "python" (statements of a program, then its comments), "sentence", or a
            function from the text before the marker to half-open character intervals, most wanted first.
        max_spans: the most spans returned, at least 1.
        selection: which spans stay when there are more: "first" in the detector's order; "longest" in tokens, the
            earlier of equals; "last" in position; "even", spread evenly over them in order of position, the first and
            the last included. "last" and "even" take arithmetic before sentences, as "first" does, and so with the
            ranks of "latex" and "python".
        answer_format, answer_fallback: as in `answer_text_span`; they also say where the marker of `answer` begins.

    Returns:
        Disjoint non-empty spans in order of position.

    Raises:
        TypeError: ids or `max_spans` that are not integers, a `detector` that is neither name nor function.
        ValueError: as `token_offsets`; an unknown `detector` or `selection`; `max_spans` below 1; an
            `answer` or an interval of the detector that is empty or outside the completion.

    Source: "Beyond Uniform Credit", section 3.
    """
    span_rules, answer_rules = SpanRules(detector, max_spans, selection), AnswerRules(answer_format, answer_fallback)
    offsets = token_offsets(token_ids, tokenizer)
    located = locate_answer(offsets.text, answer_rules)
    answer = _answer_tokens(offsets, located) if answer is None else answer
    limit, token_limit = _reasoning_end(offsets, located, answer)
    return _chosen_spans(offsets, span_rules.ranked_intervals(offsets.text[:limit]), token_limit, span_rules)


def find_reasoning(
    rows: Mapping[int, Sequence[int] | torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    *,
    spans: SpanRules | None = USUAL_SPANS,
    answers: AnswerRules = USUAL_ANSWERS,
    unanswered: bool = False,
) -> dict[int, Reasoning]:
    """Find answer, end of the reasoning and spans of completions by row number, each decoded once.

    Runs each step over all rows, which is faster than row by row. Raises as `find_answer` and `detect_spans`;
    errors about ids, the answer's format and the detector's intervals name the row.

    Args:
        rows: (T_b,) sampled ids by row number.
        tokenizer: a transformers tokenizer.
        spans: rules for spans; None looks for no spans.
        answers: rules for answers.
        unanswered: also look for spans where there is no answer.
    """
    offsets, located = dict[int, TokenOffsets](), dict[int, AnswerText | None]()
    for row, token_ids in rows.items():
        with _naming(row):
            offsets[row] = token_offsets(token_ids, tokenizer)
    for row, found in offsets.items():
        with _naming(row):
            located[row] = locate_answer(found.text, answers)
    tokens = {row: _answer_tokens(offsets[row], answer) for row, answer in located.items()}
    ends = {row: _reasoning_end(offsets[row], located[row], answer) for row, answer in tokens.items()}
    chosen: dict[int, list[Span]] = {row: [] for row in rows}
    for row, (limit, token_limit) in ends.items():
        if spans is not None and (unanswered or tokens[row]):
            with _naming(row):
                ranks = spans.ranked_intervals(offsets[row].text[:limit])
            chosen[row] = _chosen_spans(offsets[row], ranks, token_limit, spans)
    return {row: Reasoning(answer, ends[row][1], chosen[row]) for row, answer in tokens.items()}


@contextmanager
def _naming(row: int) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"row {row}: {error}") from error


def _answer_tokens(offsets: TokenOffsets, located: AnswerText | None) -> Span | None:
    return None if located is None else Span(*offsets.tokens([(located.start, located.end)])[0])


def _reasoning_end(offsets: TokenOffsets, located: AnswerText | None, answer: Span | None) -> tuple[int, int]:
    """Find where the reasoning ends, in characters and in tokens: at the answer's marker."""
    length = len(offsets.starts)
    if answer is None:
        limit, token_limit = len(offsets.text), length
    else:
        start, end = answer
        if not 0 <= start < end <= length:
            raise ValueError(f"answer must be a non-empty span inside the {length} tokens, got [{start}, {end})")
        limit, token_limit = int(offsets.starts[start]), start
        if located and not (limit < located.end and located.start < offsets.ends[end - 1]):
            located = None  # the caller's answer is not the one marked in the text
    if located:
        limit = min(limit, located.marker)
        token_limit = min(token_limit, offsets.tokens([(located.marker, located.end)])[0][0])
    return limit, token_limit


def _chosen_spans(
    offsets: TokenOffsets, ranks: Sequence[list[Interval]], token_limit: int, rules: SpanRules
) -> list[Span]:
    found = _disjoint_spans(offsets, ranks, token_limit)
    selection = rules.selection
    if selection in ("first", "longest"):
        spans = [span for rank in found for span in rank]
        if selection == "longest":
            spans.sort(key=lambda span: (span.start - span.end, span.start))
        return sorted(spans[: rules.max_spans])
    spans = []
    for rank in found:
        count = min(rules.max_spans - len(spans), len(rank))
        rank.sort()
        spans += rank[len(rank) - count :] if selection == "last" else [rank[i] for i in _spread(len(rank), count)]
    return sorted(spans)


def _spread(places: int, count: int) -> list[int]:
    """Choose `count` of so many places at even distances, with the first and the last; if `count` is 1, the middle."""
    if count < 2:
        return [places // 2] * count
    return [round(i * (places - 1) / (count - 1)) for i in range(count)]


def _disjoint_spans(offsets: TokenOffsets, ranks: Sequence[list[Interval]], token_limit: int) -> list[list[Span]]:
    """Widen intervals to whole tokens in the given order, each token to the first interval that wants it."""
    taken = bytearray(token_limit)
    spans: list[list[Span]] = [[] for _ in ranks]
    places = [rank for rank, intervals in enumerate(ranks) for _ in intervals]
    for place, wide in zip(places, offsets.tokens([*itertools.chain.from_iterable(ranks)]), strict=True):
        start, end = wide[0], min(wide[1], token_limit)
        while start < end and taken[start]:
            start += 1
        while start < end and taken[end - 1]:
            end -= 1
        if start >= end or taken.find(1, start, end) >= 0:
            continue
        if (start, end) != wide:
            rest = offsets.text[offsets.starts[start] : offsets.ends[end - 1]]
            if not LETTER_OR_DIGIT.search(rest):
                continue
        taken[start:end] = b"\1" * (end - start)
        spans[place].append(Span(start, end))
    return spans
