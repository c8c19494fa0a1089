"""Define how a run reads its completions: its rules for spans and for answers."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..options import Count, check_fields, imported
from .arithmetic import ranked_math_intervals
from .latex import ranked_latex_intervals
from .patterns import Interval, sentence_intervals
from .python_code import ranked_python_intervals

Detector = Callable[[str], Iterable[Interval]]
Selection = Literal["nearest", "first", "longest", "even", "last"]

_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # "module:name"; as a pattern it would have no group

AnswerFormat = str | re.Pattern[str] | Callable[[str], Interval | None]

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

    detector: Literal["math", "sentence", "latex", "python"] | Detector = "math"
    """Finder of spans, a name, or a function from the text before the answer's marker to half-open character intervals,
    most wanted first."""
    max_spans: Count = 10
    """Maximum spans per completion (K_max)."""
    selection: Selection = "nearest"
    """Spans that stay when there are more: "nearest" to the answer, those with numbers before others and headings;
    "first" in the detector's order, as in the CF paper and for programs and your own detector under "nearest";
    "longest" in tokens; "last" in position; "even", spread over the positions. All but "longest" take arithmetic before
    sentences."""

    def __post_init__(self) -> None:
        check_fields(self)

    def ranked_intervals(self, text: str) -> Sequence[list[Interval]]:
        """Find the detector's intervals in a text by rank; raises `ValueError` for one that is empty or outside."""
        ranks = (list(self.detector(text)),) if callable(self.detector) else DETECTORS[self.detector](text)
        for index, (start, end) in enumerate(interval for rank in ranks for interval in rank):
            if not 0 <= start < end <= len(text):
                found = f"detector's interval {index} is [{start}, {end})"
                raise ValueError(f"{found}: empty, reversed or outside the {len(text)} characters of reasoning")
        return ranks


@dataclass(frozen=True)
class AnswerRules:
    """Rules for the answer of a completion; raises `ValueError` for an option that is not valid."""

    answer_format: AnswerFormat | None = None
    """The run's own form of answers; None reads the usual ones. A regular expression whose one group, or group
    `answer`, is the answer (the last match counts; thoughts are blanked out before), or a function from the whole text
    to half-open characters or None, also by "module:name"."""
    answer_fallback: Literal["last_number"] | None = None
    """\"last_number\" takes the last number if no answer is marked; None takes nothing."""
    lead_in: Literal["sentence", "statement"] = "sentence"
    """Words before an answer that are not reasoning: those of its sentence, behind its last other number, whatever they
    are, or, as in the CF paper, "statement", only known ones such as "the answer is"."""
    thought_tags: str = ""
    """Further signs between which the model thinks, openers and closers in turn with blanks between them: "<plan>
    </plan>". Those of common models are known."""

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.thought_tags.split()) % 2:
            raise ValueError(f"thought_tags must be openers and closers in turn, in pairs, got {self.thought_tags!r}")
        if isinstance(self.answer_format, str) and _REFERENCE.fullmatch(self.answer_format):
            object.__setattr__(self, "answer_format", imported("answer_format", self.answer_format))
        if isinstance(self.answer_format, str | re.Pattern):
            answer_pattern(self.answer_format)


def answer_pattern(pattern: str | re.Pattern[str]) -> tuple[re.Pattern[str], str | int]:
    """Compile an answer's pattern and find its group that holds the answer."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"answer_format: the pattern {pattern!r} does not compile: {error}") from error
    if "answer" not in compiled.groupindex and compiled.groups != 1:
        groups = f"must have one group, or one named 'answer', it has {compiled.groups}"
        raise ValueError(f"answer_format: the pattern {compiled.pattern!r} {groups}")
    return compiled, "answer" if "answer" in compiled.groupindex else 1


USUAL_SPANS, USUAL_ANSWERS = SpanRules(), AnswerRules()
