"""Explain why a batch taught nothing, or why few of its completions got credit: for logs and warnings of trainers."""

from collections.abc import Sequence
from typing import NamedTuple

from ..text.offsets import decoded
from .assign import Credit
from .deferred import DeferredCredit

_FEW = 0.2  # share of the completions to score below which the line says why others were not


class Nothing(NamedTuple):
    """Reason for which a batch taught nothing or got little credit: in a few words, and with what to change."""

    what: str
    sentence: str


NOT_MIXED = Nothing(
    "no mixed group",
    "all completions of each group have one reward, so none has an advantage and rewards teach nothing: take problems "
    "that the policy solves sometimes, or more completions of each (num_generations)",
)
_LONGER = "let completions be longer (max_completion_length)"


def why_nothing(deferred: DeferredCredit, credit: Credit, truncated: Sequence[bool]) -> Nothing | None:
    """Explain why rewards taught nothing, credit changed nothing or few completions were scored; None if all is well.

    `credit` is that of the B completions of `deferred`; `truncated` says which were cut off at the length limit.
    """
    config, batch, count = deferred.config, deferred.batch, len(deferred.batch)
    counted = [True] * count if batch.mask is None else [bool(row.any()) for row in batch.mask]
    moved = [bool((row != 0).any()) for row in batch.advantages]
    if count and all(truncated) and not any(counted):
        sentence = f"all {count} completions were cut off at the length limit and are not in the loss: {_LONGER}"
        return Nothing("all truncated", f"{sentence}, or count those too (mask_truncated_completions)")
    if not any(moved):
        return NOT_MIXED
    if not any(c and m for c, m in zip(counted, moved, strict=True)):
        sentence = "only completions that were cut off, which are not in the loss, have an advantage"
        return Nothing("advantages on truncated only", f"{sentence}: {_LONGER}")
    due = deferred.to_score
    if not due or not config.runs_estimator:
        return None
    scored = [b for b in due if credit.spans[b]]
    if len(scored) < _FEW * len(due):
        what, reason = _why_not_scored(deferred, credit, [b for b in due if not credit.spans[b]], truncated)
        an = "a positive" if config.completions == "positive" else "an"
        return Nothing(
            f"{what} in most" if scored else what,
            f"credit/scored_fraction is {len(scored) / count:.2g}: of {len(due)} completions with {an} advantage "
            f"{f'only {len(scored)}' if scored else 'none'} was scored: {reason}",
        )
    lines = [credit.weights[b] - 1 if credit.added is None else credit.added[b] for b in scored]
    if any(bool((line.abs() > 1e-6).any()) for line in lines):
        return None
    return Nothing(
        "all weights 1",
        f"the credit of all {len(scored)} scored completions changes nothing, as their units differ in importance "
        "by rounding only: take smaller units (units, detector), or a policy whose answers need its reasoning",
    )


def _why_not_scored(
    deferred: DeferredCredit, credit: Credit, rows: Sequence[int], truncated: Sequence[bool]
) -> tuple[str, str]:
    unanswered = [b for b in rows if credit.answers[b] is None]
    if 2 * len(unanswered) < len(rows):
        return "no span", "answers were found, but no span before them; see the options `spans` and `units`"
    if 2 * (cut := sum(truncated[b] for b in unanswered)) >= len(unanswered):
        sentence = (
            f"no answer was found, and {cut} of the {len(unanswered)} without one were cut off at the length limit"
        )
        return "no answer, cut off", f"{sentence}: {_LONGER}"
    own = deferred.config.answers.answer_format
    ends = decoded(deferred.batch.rows.completions[unanswered[0]], deferred.tokenizer)[-60:]
    looked = (
        "Answers are read after ####, in \\boxed{} and after words such as 'the answer is'; for others give "
        "answers.answer_format or answers.answer_fallback='last_number'"
    ) if own is None else f"Only answers.answer_format={own!r} says what is one"  # fmt: skip
    return "no answer", f"no answer was found. {looked}. The first of these completions ends with {ends!r}"
