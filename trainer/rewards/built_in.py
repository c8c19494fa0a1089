"""Name the program's reward functions, the rows that they read, and what prompts for such rows ask; without torch."""

from collections.abc import Sequence
from typing import NamedTuple

ARGUMENTS = ("prompts", "completions", "completion_ids")
"""Arguments of every reward function, in addition to the columns of the data."""
CONTENTS = "completion_contents"
"""Completions without their thoughts, which prompts may open."""
OPTIONAL = (CONTENTS, "trainer_state", "log_metric", "log_extra")
"""Further arguments of functions that take them; the last three are TRL's."""
_ANSWERS = ("answer_format", "answer_fallback", "lead_in", "thought_tags")  # of `AnswerRules`


class BuiltIn(NamedTuple):
    """Reward function of the program: where it is, the kinds of rows that it reads, its own first, and its options.

    `grades` says whether 1 means a right answer, so that evaluation may count by it; a shaping reward does not grade.
    """

    function: str
    kinds: tuple[str, ...]
    options: tuple[str, ...]
    grades: bool = True


BUILT_IN = {
    "exact_match": BuiltIn(f"{__package__}.numbers:exact_match", ("numbers",), _ANSWERS),
    "math_verify": BuiltIn(f"{__package__}.math:MathReward", ("text", "numbers"), ("timeout",)),
}
INSTRUCTIONS = {
    "numbers": "Solve the problem step by step. End with a line of the form: #### <number>",
    "text": "Solve the problem step by step. Put your final answer within \\boxed{}.",
}
"""Text after the question, by the kind of rows."""


def require_rewards(names: Sequence[str]) -> None:
    """Raise `ValueError` for the name of a reward function that is neither the program's nor a reference."""
    for name in names:
        if ":" not in name and name not in BUILT_IN:
            known = ", ".join(BUILT_IN)
            raise ValueError(f"reward_funcs: {name!r} is neither one of {known} nor of the form 'module:function'")
