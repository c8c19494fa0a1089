"""Declare the rewards that come with the program, and the settings of rewards and evaluation."""

from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from cfa_kernels.options import NOT_NEGATIVE, POSITIVE


class BuiltIn(NamedTuple):
    """Function of a reward, the kinds of rows that it judges, its own first, and the options that it takes."""

    function: str
    kinds: tuple[str, ...]
    options: tuple[str, ...]


BUILT_IN = {
    "exact_match": BuiltIn("trainer.rewards.numbers:exact_match", ("numbers",), ("answer_format", "answer_fallback")),
    "math_verify": BuiltIn("trainer.rewards.math:MathReward", ("text", "numbers"), ("timeout",)),
    "code": BuiltIn("trainer.rewards.code:CodeReward", ("mbpp",), ("timeout", "isolation")),
}
INSTRUCTIONS = {
    "numbers": "Solve the problem step by step. End with a line of the form: #### <number>",
    "text": "Solve the problem step by step. Put your final answer within \\boxed{}.",
    "mbpp": "Answer with the program in one block of Python, between a line ```python and a line ```.",
}
"""Text after the question, by the kind of rows."""


@dataclass
class RewardSettings:
    """Rewards of completions, and the judgement of held-out problems."""

    reward_funcs: list[str] = field(default_factory=lambda: ["exact_match"])
    """Reward functions, added up: "exact_match" (the number), "math_verify" (equal by math-verify), "code" (a program
    that passes its row's tests), or "module:function" with TRL's signature
    f(prompts=, completions=, completion_ids=, **columns) -> list of float or None."""
    reward_weights: list[float] = field(default_factory=list)
    """Factors of reward_funcs in the sum, one for each; by default 1. Metrics of each function leave them out."""
    reward_timeout: Annotated[float, POSITIVE] = 10.0
    """Seconds after which math_verify and code give up on a completion, with reward 0."""
    code_isolation: Literal["bubblewrap", "none"] = "bubblewrap"
    """Isolation of tested programs from this machine: bubblewrap, or none, which lets them do all that you may do."""
    eval_reward: str | None = None
    """Reward function that evaluation counts by: a problem is solved if it gives 1 or more. By default the first of
    reward_funcs that comes with the program, else exact_match. Rows must be of the kind that it judges."""
    eval_samples: Annotated[int, NOT_NEGATIVE] = 0
    """Completions sampled for each held-out problem, beside the greedy one, for pass@1 and pass@eval_samples."""

    @property
    def grader(self) -> str:
        """Name of the reward function that evaluation counts by."""
        return self.eval_reward or next((name for name in self.reward_funcs if name in BUILT_IN), "exact_match")

    @property
    def kind(self) -> str:
        """Kind of the rows: numbers, with an answer in which a number can be read; text, with any; or mbpp."""
        return BUILT_IN[self.grader].kinds[0] if self.grader in BUILT_IN else "text"

    def check_rewards(self) -> None:
        """Reject values outside their range and rewards that cannot judge the rows, naming the setting."""
        if not self.reward_funcs:
            raise ValueError("reward_funcs must name at least one function, got none")
        if self.reward_weights and len(self.reward_weights) != len(self.reward_funcs):
            names = ", ".join(self.reward_funcs)
            sizes = f"{len(self.reward_weights)} weights for {len(self.reward_funcs)} reward_funcs ({names})"
            raise ValueError(f"reward_weights: {sizes}; give one for each, or none at all")
        for name in self.reward_funcs:
            if name in BUILT_IN and self.kind not in BUILT_IN[name].kinds:
                own, other = " or ".join(BUILT_IN[name].kinds), f"eval_reward {self.grader} {self.kind}"
                raise ValueError(f"reward_funcs: {name} judges rows of {own}, and {other}")
