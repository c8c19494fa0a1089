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
    """Reward function of the program: its place here, the kinds of rows that it reads, its own first, and its options.

    `right` says which completions get 1.
    """

    function: str
    kinds: tuple[str, ...]
    options: tuple[str, ...]
    right: str


BUILT_IN = {
    "exact_match": BuiltIn("numbers:exact_match", ("numbers",), _ANSWERS, "has the answer's number"),
    "math_verify": BuiltIn("math:MathReward", ("text", "numbers"), ("timeout",), "equals the answer for math-verify"),
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
