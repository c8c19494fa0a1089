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
"""Type of a run's own form of answers, see `answer_text_span`."""

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
    """Finder of spans, a name or a function, see `detect_spans`."""
    max_spans: Count = 10
    """Maximum spans per completion (K_max)."""
    selection: Selection = "first"
    """Which spans stay when there are more, see `detect_spans`."""

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
    """The run's own form of answers, a pattern or a function, see `answer_text_span`; None reads the usual forms."""
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
