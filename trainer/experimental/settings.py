"""Declare the settings of experiments; they are flags and YAML names of the training program like all others."""

import string
from dataclasses import dataclass
from typing import Literal


@dataclass
class CorrectionSettings:
    """Settings of `compare_and_correct`."""

    compare_and_correct: bool = False
    """After IBPO: the policy rewrites wrong completions beside correct siblings; what it gets right raises their reward
    before the group is compared, and only tokens that the correction edits get credit. One more generation a step."""
    correction_reward: float = 0.3
    """By how much the reward of a wrong completion rises if its correction is correct: IBPO's lambda times rho."""
    correction_references: int = 1
    """Maximum correct siblings shown beside a wrong completion, nearest by edit distance first."""
    correction_credit: Literal["right", "all"] = "right"
    """Completions whose unedited tokens lose credit: those with a right correction, or all that were corrected."""
    correction_template: str = (
        "{question}\n\nThis attempt is wrong:\n{attempt}\n\nThis is correct:\n{references}\n\n"
        "Write the attempt again, corrected. Keep what is right in it and change only what is wrong."
    )
    """Prompt that asks for a correction, in place of the question; holds {question}, {attempt} and {references}."""

    def check_corrections(self, num_generations: int) -> None:
        """Reject values outside their range, naming the setting."""
        if not 0 <= self.correction_reward < float("inf"):
            raise ValueError(f"correction_reward must be finite and at least 0, got {self.correction_reward}")
        if not 1 <= self.correction_references < num_generations:
            raise ValueError(
                f"correction_references must be at least 1 and less than num_generations ({num_generations}), "
                f"got {self.correction_references}"
            )
        try:
            held = {name for _, name, _, _ in string.Formatter().parse(self.correction_template) if name is not None}
        except ValueError as problem:
            raise ValueError(f"correction_template: {problem}; write literal braces twice") from problem
        if held != {"question", "attempt", "references"}:
            raise ValueError(
                "correction_template must hold {question}, {attempt} and {references} and no other field, "
                f"got {sorted(held)}"
            )
