"""Find the answer and the reasoning spans of a completion, in sampled tokens."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..options import check_class
from ..span import Span, span_inside
from .answers import AnswerText, lead_in_start, locate_answer
from .markup import Speech, merged, read_speech, sign_names, unfinished_number
from .offsets import TokenOffsets, as_ids, token_offsets
from .patterns import LETTER_OR_DIGIT, Interval, holds_number
from .rules import USUAL_ANSWERS, USUAL_SPANS, AnswerRules, SpanRules

TokenIds = Sequence[int] | torch.Tensor
Mask = Sequence[float] | torch.Tensor


class Reasoning(NamedTuple):
    """Answer and reasoning of one completion, in its tokens."""

    answer: Span | None
    end: int  # tokens of reasoning: up to the answer's marker, all of them without an answer
    spans: list[Span]


def find_answer(
    token_ids: TokenIds,
    tokenizer: PreTrainedTokenizerBase,
    answers: AnswerRules = USUAL_ANSWERS,
    *,
    prompt: TokenIds | None = None,
    mask: Mask | None = None,
) -> Span | None:
    """Find every token of (T,) sampled ids that touches the `answer_text_span` of their text; None if it has none.

    Args:
        token_ids, tokenizer: what was sampled, and the tokenizer of its model.
        answers: rules for answers.
        prompt: (P,) ids before them, in which a thought may be open.
        mask: (T,) 1 on tokens that the policy wrote, 0 on others, such as a tool's; default all 1.
    """
    return _reasoning(_read(token_ids, tokenizer, answers, prompt, mask), None, answers).answer


def detect_spans(
    token_ids: TokenIds,
    tokenizer: PreTrainedTokenizerBase,
    *,
    answer: Span | None = None,
    spans: SpanRules = USUAL_SPANS,
    answers: AnswerRules = USUAL_ANSWERS,
    prompt: TokenIds | None = None,
    mask: Mask | None = None,
) -> list[Span]:
    """Find the reasoning spans of (T,) sampled ids, which counterfactual scoring masks one at a time.

    Spans end before the marker (`####`, `\\boxed{`, "the answer is") of `answer`, by default that of `find_answer`. A
    detector's intervals are widened to whole tokens in the detector's order; a token that an earlier interval or the
    marker holds is cut from a later one, which is dropped if no letter or digit remains or if an earlier one is inside.
    Thoughts are reasoning like other text. No span holds a token of `mask` 0, of a tool call, or of a sign of thoughts,
    tools and turns: an interval around one is split. `prompt` and `mask` as in `find_answer`.

    Returns disjoint non-empty spans in order of position (CF paper, section 3).
    """
    check_class(SpanRules, spans=spans)
    read = _read(token_ids, tokenizer, answers, prompt, mask)
    return _reasoning(read, spans, answers, answer, unanswered=True).spans


def find_reasoning(
    rows: Mapping[int, TokenIds],
    tokenizer: PreTrainedTokenizerBase,
    *,
    spans: SpanRules | None = USUAL_SPANS,
    answers: AnswerRules = USUAL_ANSWERS,
    unanswered: bool = False,
    prompts: Mapping[int, TokenIds] | None = None,
    masks: Mapping[int, Mask] | None = None,
) -> dict[int, Reasoning]:
    """Find answer, end of the reasoning and spans of completions by row; errors name the row.

    `spans=None` looks for no spans; `unanswered` also looks for spans in completions without an answer. `prompts` and
    `masks` are those of `find_answer` by row.
    """
    reasoning, texts = {}, dict[tuple[int, ...], str]()
    for row, token_ids in rows.items():
        try:
            before = tuple(as_ids(prompts[row])) if prompts and row in prompts else ()
            if before not in texts:  # completions of a group share theirs
                texts[before] = _prompt_text(before, tokenizer, answers)
            read = _read(token_ids, tokenizer, answers, texts[before], (masks or {}).get(row))
            reasoning[row] = _reasoning(read, spans, answers, unanswered=unanswered)
        except (TypeError, ValueError) as error:
            raise type(error)(f"row {row}: {error}") from error
    return reasoning


def content_text(
    token_ids: TokenIds,
    tokenizer: PreTrainedTokenizerBase,
    answers: AnswerRules = USUAL_ANSWERS,
    *,
    prompt: TokenIds | None = None,
    mask: Mask | None = None,
    truncated: bool = False,
) -> str:
    """Decode what a completion says: line breaks take the place of its thoughts and of what the policy did not write.

    `answer_text_span` finds the answer in this text that `find_answer`, with the same arguments, finds in the tokens,
    except that a `truncated` completion's text loses a number at its very end, which may not be whole.
    """
    return _read(token_ids, tokenizer, answers, prompt, mask, truncated=truncated)[1].content


_Read = tuple[TokenOffsets, Speech, bytearray]  # the last is 1 for tokens that the policy did not write


def _prompt_text(prompt: TokenIds, tokenizer: PreTrainedTokenizerBase, answers: AnswerRules) -> str:
    check_class(AnswerRules, answers=answers)
    return token_offsets(prompt, tokenizer, sign_names(answers.thought_tags)).text


def _read(
    token_ids: TokenIds,
    tokenizer: PreTrainedTokenizerBase,
    answers: AnswerRules,
    prompt: TokenIds | str | None,
    mask: Mask | None,
    *,
    truncated: bool = False,
) -> _Read:
    before = prompt if isinstance(prompt, str) else _prompt_text(() if prompt is None else prompt, tokenizer, answers)
    tags = answers.thought_tags
    offsets = token_offsets(token_ids, tokenizer, sign_names(tags), ends_shown=False)
    length = len(offsets.starts)
    others = _others(mask, length)
    foreign = [(int(offsets.starts[start]), int(offsets.ends[end - 1])) for start, end in _runs(others, 1, 0, length)]
    foreign += unfinished_number(offsets.text) if truncated else []
    return offsets, read_speech(offsets.text, prompt=before, foreign=merged(foreign), thought_tags=tags), others


def _others(mask: Mask | None, length: int) -> bytearray:
    if mask is None:
        return bytearray(length)
    values = np.asarray(mask.cpu() if isinstance(mask, torch.Tensor) else mask, np.float64)
    if values.shape != (length,) or not np.isin(values, (0, 1)).all():
        raise ValueError(f"mask must be 1 or 0 for each of {length} tokens, got {mask!r:.200}")
    return bytearray((values == 0).tobytes())


def _runs(flags: bytes | bytearray, wanted: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of 1 or of 0 between two places."""
    while (start := flags.find(wanted, start, end)) >= 0:
        stop = flags.find(1 - wanted, start, end)
        stop = end if stop < 0 else stop
        yield start, stop
        start = stop


def _reasoning(
    read: _Read, spans: SpanRules | None, answers: AnswerRules, answer: Span | None = None, *, unanswered: bool = False
) -> Reasoning:
    offsets, speech, others = read
    located = locate_answer(speech, answers)
    if answer is None and located:
        answer = Span(*offsets.tokens([(located.start, located.end)])[0])
        if others.find(1, *answer) >= 0:  # a token without text in its middle
            answer = located = None
    lead_in = partial(lead_in_start, speech) if answers.lead_in == "sentence" else None
    limit, token_limit = _reasoning_end(offsets, located, answer, lead_in)
    if spans is None or not (answer or unanswered):
        return Reasoning(answer, token_limit, [])
    for start, end in offsets.tokens(speech.no_reasoning):
        others[start:end] = b"\1" * (end - start)
    ranks = _disjoint_spans(offsets, spans.ranked_intervals(speech.reasoning[:limit]), others[:token_limit])
    return Reasoning(answer, token_limit, sorted(_selected(ranks, spans, offsets)))


def _reasoning_end(
    offsets: TokenOffsets, located: AnswerText | None, answer: Span | None, lead_in: Callable[[int], int] | None
) -> tuple[int, int]:
    """Find the end of the reasoning, in characters and in tokens: the answer's marker."""
    length = len(offsets.starts)
    if answer is None:
        return len(offsets.text), length
    start, end = span_inside("answer", answer, length)
    limit = marker = int(offsets.starts[start])
    if located and limit < located.end and located.start < offsets.ends[end - 1]:
        marker = located.marker  # else the caller's answer is not the one marked in the text
    marker = lead_in(marker) if lead_in else marker
    return min(limit, marker), min(start, offsets.tokens([(marker, limit + 1)])[0][0])


def _selected(ranks: list[list[Span]], rules: SpanRules, offsets: TokenOffsets) -> list[Span]:
    if rules.selection == "nearest" and not callable(rules.detector) and rules.detector != "python":

        def has_number(span: Span) -> bool:
            return holds_number(offsets.text[offsets.starts[span.start] : offsets.ends[span.end - 1]].strip())

        ranks = [sorted(rank, key=lambda span: (has_number(span), span), reverse=True) for rank in ranks]
    spans = list(itertools.chain.from_iterable(ranks))
    if rules.selection == "longest":
        spans.sort(key=lambda span: (span.start - span.end, span.start))
    if rules.selection in ("nearest", "first", "longest"):
        return spans[: rules.max_spans]
    spans = []
    for rank in map(sorted, ranks):
        count = min(rules.max_spans - len(spans), len(rank))
        step = (len(rank) - 1) / max(count - 1, 1)
        even = [len(rank) // 2] if count == 1 else [round(i * step) for i in range(count)]
        spans += rank[len(rank) - count :] if rules.selection == "last" else [rank[i] for i in even]
    return spans


def _disjoint_spans(offsets: TokenOffsets, ranks: Sequence[list[Interval]], occupied: bytearray) -> list[list[Span]]:
    """Widen intervals to whole tokens in order of rank, each token to the first interval that wants it.

    `occupied` is 1 for the tokens of the reasoning that no interval gets.
    """
    barred = bytes(occupied)
    spans: list[list[Span]] = [[] for _ in ranks]
    rank_of = [rank for rank, intervals in enumerate(ranks) for _ in intervals]
    for rank, wide in zip(rank_of, offsets.tokens([*itertools.chain.from_iterable(ranks)]), strict=True):
        for start, end in _runs(barred, 0, wide[0], min(wide[1], len(occupied))):
            while start < end and occupied[start]:
                start += 1
            while start < end and occupied[end - 1]:
                end -= 1
            if start >= end or occupied.find(1, start, end) >= 0:
                continue
            if (start, end) == wide or LETTER_OR_DIGIT.search(
                offsets.text, offsets.starts.item(start), offsets.ends.item(end - 1)
            ):
                occupied[start:end] = b"\1" * (end - start)
                spans[rank].append(Span(start, end))
    return spans
