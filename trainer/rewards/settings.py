"""Declare the rewards that come with the program, and the settings of rewards and evaluation."""

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class BuiltIn(NamedTuple):
    """Function of a reward, the kinds of rows that it judges, its own first, and the options that it takes."""

    function: str
    kinds: tuple[str, ...]
    options: tuple[str, ...]


BUILT_IN = {
    "exact_match": BuiltIn("trainer.rewards.numbers:exact_match", ("numbers",), ("answer_format", "answer_fallback")),
    "math_verify": BuiltIn("trainer.rewards.math.reward:MathReward", ("text", "numbers"), ("timeout",)),
    "code": BuiltIn("trainer.rewards.code.reward:CodeReward", ("mbpp",), ("timeout", "isolation")),
}


@dataclass
class RewardSettings:
    """Rewards of completions, and the judgement of held-out problems."""

    reward_funcs: list[str] = field(default_factory=lambda: ["exact_match"])
    """Reward functions, added up: "exact_match" (the number), "math_verify" (equal by math-verify), "code" (a program
    that passes its row's tests), or "module:function" with TRL's signature
    f(prompts=, completions=, completion_ids=, **columns) -> list of float or None."""
    reward_weights: list[float] = field(default_factory=list)
    """A factor for each of reward_funcs in the sum; by default 1. Metrics of each function are without it."""
    dataset_kind: Literal["auto", "numbers", "text", "mbpp"] = "auto"
    """Kind of the rows: numbers, a question and an answer in which a number can be read; text, a question and
    any answer; mbpp, the columns text or prompt, and test_list. auto is what evaluation's reward function judges:
    numbers for exact_match, mbpp for code, else text."""
    reward_timeout: float = 10.0
    """Seconds after which math_verify or code gives a completion up, with reward 0."""
    code_isolation: Literal["bubblewrap", "none"] = "bubblewrap"
    """Isolation of tested programs from this machine: bubblewrap, or none, which lets them do all that you may do."""
    eval_reward: str | None = None
    """Reward function by which a held-out problem counts as solved, where it gives 1 or more; by default the first of
    reward_funcs that comes with the program, else exact_match."""
    eval_samples: int = 0
    """Completions sampled for each held-out problem, beside the greedy one, for pass@1 and pass@eval_samples."""

    @property
    def grader(self) -> str:
        """Name the reward function that evaluation counts by."""
        return self.eval_reward or next((name for name in self.reward_funcs if name in BUILT_IN), "exact_match")

    @property
    def kind(self) -> str:
        """Name what each row must have."""
        own = BUILT_IN[self.grader].kinds[0] if self.grader in BUILT_IN else "text"
        return own if self.dataset_kind == "auto" else self.dataset_kind

    def check_rewards(self) -> None:
        """Reject values outside their range and rewards that cannot judge the rows, naming the setting."""
        if self.reward_weights and len(self.reward_weights) != len(self.reward_funcs):
            raise ValueError(
                f"reward_weights: {len(self.reward_weights)} weights for {len(self.reward_funcs)} reward_funcs "
                f"({', '.join(self.reward_funcs)}); give one for each, or none at all"
            )
        for name, weight in zip(self.reward_funcs, self.reward_weights, strict=False):
            if not math.isfinite(weight):
                raise ValueError(f"reward_weights must be finite, got {weight} for {name}")
        if not 0 < self.reward_timeout < math.inf:
            raise ValueError(f"reward_timeout must be positive and finite, got {self.reward_timeout}")
        if self.eval_samples < 0:
            raise ValueError(f"eval_samples must be at least 0, got {self.eval_samples}")
        for setting, names in (("reward_funcs", self.reward_funcs), ("eval_reward", [self.grader])):
            for name in names:
                if name in BUILT_IN and self.kind not in (kinds := BUILT_IN[name].kinds):
                    judged = " or ".join(kinds)
                    raise ValueError(
                        f"{setting}: {name} judges rows of dataset_kind {judged}, and these are {self.kind}"
                    )
