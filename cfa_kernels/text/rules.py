"""Define how a run reads its completions: what counts as a span and what counts as the answer."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from .arithmetic import ranked_math_intervals
from .latex import ranked_latex_intervals
from .patterns import Interval, sentence_intervals
from .python_code import ranked_python_intervals

Detector = Callable[[str], Iterable[Interval]]
RankedDetector = Callable[[str], Sequence[list[Interval]]]
"""Intervals by rank; those of a rank are taken before those of the next."""

AnswerFormat = str | re.Pattern[str] | Callable[[str], Interval | None]
"""Type of a run's own form of answers, see `answer_text_span`."""

DETECTORS: dict[str, RankedDetector] = {
    "math": ranked_math_intervals,
    "sentence": lambda text: (sentence_intervals(text),),
    "latex": ranked_latex_intervals,
    "python": ranked_python_intervals,
}
SELECTIONS: tuple[str, ...] = ("first", "longest", "even", "last")
FALLBACKS = (None, "last_number")


@dataclass(frozen=True)
class SpanRules:
    """Rules for the spans of a completion."""

    detector: str | Detector = "math"
    """Finder of spans, a name or a function, see `detect_spans`."""
    max_spans: int = 10
    """Maximum spans per completion (K_max)."""
    selection: str = "first"
    """Which spans stay when there are more, see `detect_spans`."""

    def __post_init__(self) -> None:
        if not callable(self.detector):
            if not isinstance(self.detector, str):
                raise TypeError(f"detector must be a name or a function, got {self.detector!r}")
            if self.detector not in DETECTORS:
                raise ValueError(f"detector must be a function or one of {', '.join(DETECTORS)}, got {self.detector!r}")
        if self.selection not in SELECTIONS:
            raise ValueError(f"selection must be one of {', '.join(SELECTIONS)}, got {self.selection!r}")
        if isinstance(self.max_spans, bool) or not isinstance(self.max_spans, int):
            raise TypeError(f"max_spans must be an integer, got {self.max_spans!r}")
        if self.max_spans < 1:
            raise ValueError(f"max_spans must be at least 1, got {self.max_spans}")

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
    """Rules for the answer of a completion."""

    answer_format: AnswerFormat | None = None
    """The run's own form of answers, a pattern or a function, see `answer_text_span`; None reads the usual forms."""
    answer_fallback: str | None = None
    """\"last_number\" takes the last number where no answer is marked; None takes nothing."""

    def __post_init__(self) -> None:
        if self.answer_fallback not in FALLBACKS:
            raise ValueError(f"answer_fallback must be one of {FALLBACKS}, got {self.answer_fallback!r}")
        if isinstance(self.answer_format, str | re.Pattern):
            answer_pattern(self.answer_format)
        elif self.answer_format is not None and not callable(self.answer_format):
            raise TypeError(f"answer_format must be a pattern, a function or None, got {self.answer_format!r}")


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
