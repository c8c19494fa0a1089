"""Define how a run reads its completions: its rules for spans and for answers."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ..options import Count, check_fields
from .arithmetic import ranked_math_intervals
from .latex import ranked_latex_intervals
from .patterns import Interval, sentence_intervals
from .python_code import ranked_python_intervals

Detector = Callable[[str], Iterable[Interval]]
DetectorName = Literal["math", "sentence", "latex", "python"]
Selection = Literal["first", "longest", "even", "last"]
Fallback = Literal["last_number"]

AnswerFormat = str | re.Pattern[str] | Callable[[str], Interval | None]
"""Type of a run's own form of answers."""

DETECTORS: dict[str, Callable[[str], Sequence[list[Interval]]]] = {
    "math": ranked_math_intervals,
    "sentence": lambda text: (sentence_intervals(text),),
    "latex": ranked_latex_intervals,
    "python": ranked_python_intervals,
}
"""Intervals by rank; those of a rank are taken before those of the next."""


@dataclass(frozen=True)
class SpanRules:
    """Rules for the spans of a completion; raises `ValueError` for an option that is not valid."""

    detector: DetectorName | Detector = "math"
    """Finder of spans, a name, or a function from the text before the answer's marker to half-open character intervals,
    most wanted first."""
    max_spans: Count = 10
    """Maximum spans per completion (K_max)."""
    selection: Selection = "first"
    """Spans that stay when there are more: "first" in the detector's order, "longest" in tokens, "last" in position, or
    "even", spread over the positions; "last" and "even" take arithmetic before sentences."""

    def __post_init__(self) -> None:
        check_fields(self)

    def ranked_intervals(self, text: str) -> Sequence[list[Interval]]:
        """Find the detector's intervals in a text by rank; raises `ValueError` for one that is empty or outside."""
        ranks = (list(self.detector(text)),) if callable(self.detector) else DETECTORS[self.detector](text)
        for index, (start, end) in enumerate(interval for rank in ranks for interval in rank):
            if not 0 <= start < end <= len(text):
                raise ValueError(
                    f"detector's interval {index} is [{start}, {end}): empty, reversed or outside the {len(text)} "
                    "characters of reasoning"
                )
        return ranks


@dataclass(frozen=True)
class AnswerRules:
    """Rules for the answer of a completion; raises `ValueError` for an option that is not valid."""

    answer_format: AnswerFormat | None = None
    """The run's own form of answers; None reads the usual ones. A regular expression whose one group, or group
    `answer`, is the answer (the last match counts; thoughts are blanked out before), or a function from the whole text
    to half-open characters or None."""
    answer_fallback: Fallback | None = None
    """\"last_number\" takes the last number if no answer is marked; None takes nothing."""

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.answer_format, str | re.Pattern):
            answer_pattern(self.answer_format)


@lru_cache(maxsize=64)
def answer_pattern(pattern: str | re.Pattern[str]) -> tuple[re.Pattern[str], str | int]:
    """Compile an answer's pattern and find its group that holds the answer."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"answer_format: the pattern {pattern!r} does not compile: {error}") from error
    if "answer" in compiled.groupindex:
        return compiled, "answer"
    if compiled.groups != 1:
        raise ValueError(
            f"answer_format: the pattern {compiled.pattern!r} must have one group, or one named 'answer', "
            f"it has {compiled.groups}"
        )
    return compiled, 1


USUAL_SPANS, USUAL_ANSWERS = SpanRules(), AnswerRules()
