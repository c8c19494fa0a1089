"""From sampled token ids to the answer and the reasoning spans of one completion.

First stop after the rollouts: scoring masks the spans found here and asks how the answer's probability moves.
Intervals of the text (`solution_text.py`) become whole sampled tokens (`token_offsets.py`).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from ..solution_text import LETTER_OR_DIGIT, Interval, ranked_latex_intervals, ranked_math_intervals, sentence_intervals
from ..span import Span
from .answers import AnswerFormat, AnswerText, check_answer_options, locate_answer
from .offsets import TokenOffsets, token_offsets
from .python_code import ranked_python_intervals

Detector = Callable[[str], Iterable[Interval]]
RankedDetector = Callable[[str], Sequence[list[Interval]]]
"""Intervals by rank, those of a rank wanted before those of the next."""


class Reasoning(NamedTuple):
    """What credit needs to know of one completion's text."""

    answer: Span | None
    end: int  # tokens of reasoning: up to the answer's marker, all of them where there is no answer
    spans: list[Span]


DETECTORS: dict[str, RankedDetector] = {
    "math": ranked_math_intervals,
    "sentence": lambda text: (sentence_intervals(text),),
    "latex": ranked_latex_intervals,
    "python": ranked_python_intervals,
}
SELECTIONS: tuple[str, ...] = ("first", "longest", "even", "last")


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
        answer_format, answer_fallback: the run's own form of answers, and what counts where none is found, as in
            `answer_text_span`.

    Returns:
        A non-empty span of completion tokens, or `None` when there is no answer.

    Raises:
        TypeError, ValueError: as `token_offsets` and `answer_text_span`.
    """
    offsets = token_offsets(token_ids, tokenizer)
    located = locate_answer(offsets.text, answer_format=answer_format, answer_fallback=answer_fallback)
    return _answer_tokens(offsets, located)


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

    Spans lie before the answer's marker (`####`, `\\boxed{`, "the answer is"), or anywhere when there is no
    answer. A detector's intervals are widened to whole tokens in the detector's order; a token that an earlier
    interval or the marker holds is cut from a later one, which is dropped if no letter or digit remains or if
    an earlier one lies inside it.

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
        TypeError: ids or `max_spans` that are no integers, a `detector` that is neither name nor function.
        ValueError: as `token_offsets`; an unknown `detector` or `selection`; `max_spans` below 1; an
            `answer` or an interval of the detector that is empty or outside the completion.

    Source: "Beyond Uniform Credit", section 3; the settled rule on spans in the method notes, item 3.
    """
    find_intervals = checked_span_options(detector, max_spans, selection)
    offsets = token_offsets(token_ids, tokenizer)
    located = locate_answer(offsets.text, answer_format=answer_format, answer_fallback=answer_fallback)
    limit, token_limit = _reasoning_end(offsets, located, answer)
    ranks = _checked_intervals(find_intervals, offsets.text[:limit])
    return _chosen_spans(offsets, ranks, token_limit, max_spans, selection)


def find_answers(
    rows: Mapping[int, Sequence[int] | torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    *,
    answer_format: AnswerFormat | None = None,
    answer_fallback: str | None = None,
) -> dict[int, Span | None]:
    """`find_answer` of completions by row number. Raises as that does; errors name the row."""
    located = _located_answers(rows, tokenizer, answer_format, answer_fallback)
    return {row: _answer_tokens(offsets, answer) for row, (offsets, answer) in located.items()}


def find_answers_and_spans(
    rows: Mapping[int, Sequence[int] | torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    *,
    detector: str | Detector = "math",
    max_spans: int = 10,
    selection: str = "first",
    answer_format: AnswerFormat | None = None,
    answer_fallback: str | None = None,
) -> dict[int, tuple[Span | None, list[Span]]]:
    """`find_answer`, and `detect_spans` where there is one, of completions by row number; as `find_reasoning`."""
    found = find_reasoning(
        rows, tokenizer, detector=detector, max_spans=max_spans, selection=selection, answer_format=answer_format,
        answer_fallback=answer_fallback,
    )  # fmt: skip
    return {row: (reasoning.answer, reasoning.spans) for row, reasoning in found.items()}


def find_reasoning(
    rows: Mapping[int, Sequence[int] | torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    *,
    detector: str | Detector | None = "math",
    max_spans: int = 10,
    selection: str = "first",
    unanswered: bool = False,
    answer_format: AnswerFormat | None = None,
    answer_fallback: str | None = None,
) -> dict[int, Reasoning]:
    """Answer, end of the reasoning and spans of completions by row number, each decoded once.

    Step by step over all rows, which is a fifth quicker than row by row. Raises as `find_answer` and `detect_spans`;
    errors about ids, the answer's format and the detector's intervals name the row.

    Args:
        rows, tokenizer, max_spans, selection, answer_format, answer_fallback: as there.
        detector: as in `detect_spans`; None looks for no spans.
        unanswered: also look for spans where there is no answer.
    """
    find_intervals = None if detector is None else checked_span_options(detector, max_spans, selection)
    located = _located_answers(rows, tokenizer, answer_format, answer_fallback)
    answers = {row: _answer_tokens(offsets, answer) for row, (offsets, answer) in located.items()}
    ends = {row: _reasoning_end(*located[row], answer) for row, answer in answers.items()}
    ranks = {}
    for row, (limit, _) in ends.items():
        if find_intervals is not None and (unanswered or answers[row]):
            with _naming(row):
                ranks[row] = _checked_intervals(find_intervals, located[row][0].text[:limit])
    spans = {
        row: _chosen_spans(located[row][0], found, ends[row][1], max_spans, selection) for row, found in ranks.items()
    }
    return {row: Reasoning(answer, ends[row][1], spans.get(row, [])) for row, answer in answers.items()}


@contextmanager
def _naming(row: int) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"row {row}: {error}") from error


def _located_answers(
    rows: Mapping[int, Sequence[int] | torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    answer_format: AnswerFormat | None,
    answer_fallback: str | None,
) -> dict[int, tuple[TokenOffsets, AnswerText | None]]:
    check_answer_options(answer_format, answer_fallback)
    offsets, located = {}, {}
    for row, token_ids in rows.items():
        with _naming(row):
            offsets[row] = token_offsets(token_ids, tokenizer)
    for row, found in offsets.items():
        with _naming(row):
            located[row] = (
                found,
                locate_answer(found.text, answer_format=answer_format, answer_fallback=answer_fallback),
            )
    return located


def _answer_tokens(offsets: TokenOffsets, located: AnswerText | None) -> Span | None:
    return None if located is None else Span(*offsets.tokens([(located.start, located.end)])[0])


def checked_span_options(detector: str | Detector, max_spans: int, selection: str) -> RankedDetector:
    """What finds the intervals, ranked; raises `TypeError` or `ValueError` that names a bad option."""
    find_intervals = _resolve_detector(detector)
    if selection not in SELECTIONS:
        raise ValueError(f"selection must be one of {', '.join(SELECTIONS)}, got {selection!r}")
    if isinstance(max_spans, bool) or not isinstance(max_spans, int):
        raise TypeError(f"max_spans must be an integer, got {max_spans!r}")
    if max_spans < 1:
        raise ValueError(f"max_spans must be at least 1, got {max_spans}")
    return find_intervals


def _resolve_detector(detector: str | Detector) -> RankedDetector:
    if callable(detector):
        find_intervals = detector
        return lambda text: (list(find_intervals(text)),)
    if not isinstance(detector, str):
        raise TypeError(f"detector must be a name or a function, got {detector!r}")
    if detector not in DETECTORS:
        raise ValueError(f"detector must be a function or one of {', '.join(DETECTORS)}, got {detector!r}")
    return DETECTORS[detector]


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
            located = None  # the caller's answer is another than the one marked in the text
    if located:
        limit = min(limit, located.marker)
        token_limit = min(token_limit, offsets.tokens([(located.marker, located.end)])[0][0])
    return limit, token_limit


def _checked_intervals(find_intervals: RankedDetector, text: str) -> Sequence[list[Interval]]:
    ranks = find_intervals(text)
    for index, (start, end) in enumerate(itertools.chain.from_iterable(ranks)):
        if not 0 <= start < end <= len(text):
            raise ValueError(
                f"detector's interval {index} is [{start}, {end}): empty, reversed or outside the {len(text)} "
                "characters of reasoning"
            )
    return ranks


def _chosen_spans(
    offsets: TokenOffsets, ranks: Sequence[list[Interval]], token_limit: int, max_spans: int, selection: str
) -> list[Span]:
    found = _disjoint_spans(offsets, ranks, token_limit)
    if selection in ("first", "longest"):
        spans = [span for rank in found for span in rank]
        if selection == "longest":
            spans.sort(key=lambda span: (span.start - span.end, span.start))
        return sorted(spans[:max_spans])
    spans = []
    for rank in found:
        room = min(max_spans - len(spans), len(rank))
        rank.sort()
        spans += rank[len(rank) - room :] if selection == "last" else [rank[i] for i in _spread(len(rank), room)]
    return sorted(spans)


def _spread(count: int, room: int) -> list[int]:
    """`room` of `count` places at even distances, the first and the last included; the middle one if one is asked."""
    if room < 2:
        return [count // 2] * room
    return [round(i * (count - 1) / (room - 1)) for i in range(room)]


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
