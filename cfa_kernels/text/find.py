"""Find the answer and the reasoning spans of a completion, in sampled tokens."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from ..options import check_class
from ..span import Span, span_inside
from .answers import AnswerText, locate_answer
from .offsets import TokenOffsets, token_offsets
from .patterns import LETTER_OR_DIGIT, Interval
from .rules import USUAL_ANSWERS, USUAL_SPANS, AnswerRules, SpanRules

TokenIds = Sequence[int] | torch.Tensor


class Reasoning(NamedTuple):
    """Answer and reasoning of one completion, in its tokens."""

    answer: Span | None
    end: int  # tokens of reasoning: up to the answer's marker, all of them without an answer
    spans: list[Span]


def find_answer(
    token_ids: TokenIds, tokenizer: PreTrainedTokenizerBase, answers: AnswerRules = USUAL_ANSWERS
) -> Span | None:
    """Find every token of (T,) sampled ids that touches the `answer_text_span` of their text; None if it has none."""
    return _reasoning(token_ids, tokenizer, None, answers).answer


def detect_spans(
    token_ids: TokenIds,
    tokenizer: PreTrainedTokenizerBase,
    *,
    answer: Span | None = None,
    spans: SpanRules = USUAL_SPANS,
    answers: AnswerRules = USUAL_ANSWERS,
) -> list[Span]:
    """Find the reasoning spans of (T,) sampled ids, which counterfactual scoring masks one at a time.

    Spans end before the marker (`####`, `\\boxed{`, "the answer is") of `answer`, by default that of `find_answer`. A
    detector's intervals are widened to whole tokens in the detector's order; a token that an earlier interval or the
    marker holds is cut from a later one, which is dropped if no letter or digit remains or if an earlier one is inside.

    Returns disjoint non-empty spans in order of position (CF paper, section 3).
    """
    check_class(SpanRules, spans=spans)
    return _reasoning(token_ids, tokenizer, spans, answers, answer, unanswered=True).spans


def find_reasoning(
    rows: Mapping[int, TokenIds],
    tokenizer: PreTrainedTokenizerBase,
    *,
    spans: SpanRules | None = USUAL_SPANS,
    answers: AnswerRules = USUAL_ANSWERS,
    unanswered: bool = False,
) -> dict[int, Reasoning]:
    """Find answer, end of the reasoning and spans of completions by row; errors name the row.

    `spans=None` looks for no spans; `unanswered` also looks for spans in completions without an answer.
    """
    reasoning = {}
    for row, token_ids in rows.items():
        try:
            reasoning[row] = _reasoning(token_ids, tokenizer, spans, answers, unanswered=unanswered)
        except (TypeError, ValueError) as error:
            raise type(error)(f"row {row}: {error}") from error
    return reasoning


def _reasoning(
    token_ids: TokenIds,
    tokenizer: PreTrainedTokenizerBase,
    spans: SpanRules | None,
    answers: AnswerRules,
    answer: Span | None = None,
    *,
    unanswered: bool = False,
) -> Reasoning:
    offsets = token_offsets(token_ids, tokenizer)
    located = locate_answer(offsets.text, answers)
    if answer is None and located:
        answer = Span(*offsets.tokens([(located.start, located.end)])[0])
    limit, token_limit = _reasoning_end(offsets, located, answer)
    if spans is None or not (answer or unanswered):
        return Reasoning(answer, token_limit, [])
    ranks = _disjoint_spans(offsets, spans.ranked_intervals(offsets.text[:limit]), token_limit)
    return Reasoning(answer, token_limit, sorted(_selected(ranks, spans)))


def _reasoning_end(offsets: TokenOffsets, located: AnswerText | None, answer: Span | None) -> tuple[int, int]:
    """Find the end of the reasoning, in characters and in tokens: the answer's marker."""
    length = len(offsets.starts)
    if answer is None:
        return len(offsets.text), length
    start, end = span_inside("answer", answer, length)
    limit = int(offsets.starts[start])
    if not located or limit >= located.end or located.start >= offsets.ends[end - 1]:
        return limit, start  # the caller's answer is not the one marked in the text
    return min(limit, located.marker), min(start, offsets.tokens([(located.marker, located.end)])[0][0])


def _selected(ranks: list[list[Span]], rules: SpanRules) -> list[Span]:
    spans = list(itertools.chain.from_iterable(ranks))
    if rules.selection == "longest":
        spans.sort(key=lambda span: (span.start - span.end, span.start))
    if rules.selection in ("first", "longest"):
        return spans[: rules.max_spans]
    spans = []
    for rank in map(sorted, ranks):
        last, count = len(rank) - 1, min(rules.max_spans - len(spans), len(rank))
        if rules.selection == "last":
            places: Iterable[int] = range(len(rank) - count, len(rank))
        elif count < 2:
            places = [len(rank) // 2] * count
        else:
            places = [round(i * last / (count - 1)) for i in range(count)]
        spans += [rank[i] for i in places]
    return spans


def _disjoint_spans(offsets: TokenOffsets, ranks: Sequence[list[Interval]], token_limit: int) -> list[list[Span]]:
    """Widen intervals to whole tokens in order of rank, each token to the first interval that wants it."""
    occupied = bytearray(token_limit)
    spans: list[list[Span]] = [[] for _ in ranks]
    rank_of = [rank for rank, intervals in enumerate(ranks) for _ in intervals]
    for rank, wide in zip(rank_of, offsets.tokens([*itertools.chain.from_iterable(ranks)]), strict=True):
        start, end = wide[0], min(wide[1], token_limit)
        while start < end and occupied[start]:
            start += 1
        while start < end and occupied[end - 1]:
            end -= 1
        if start >= end or occupied.find(1, start, end) >= 0:
            continue
        rest = offsets.text[offsets.starts[start] : offsets.ends[end - 1]]
        if (start, end) == wide or LETTER_OR_DIGIT.search(rest):
            occupied[start:end] = b"\1" * (end - start)
            spans[rank].append(Span(start, end))
    return spans
