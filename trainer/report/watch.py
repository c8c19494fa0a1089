"""Notice steps that nothing can be learnt from, and say once what to try."""

from collections.abc import Mapping

from trainer.config import TrainConfig
from trainer.report.metrics import Step
from trainer.rewards.numbers import final_number

PATIENCE = 5


class Watch:
    """Count, over steps in a row, what keeps a run from learning.

    Attributes:
        counts: steps in a row, so far, by cause; the cause that explains the others comes first.
    """

    def __init__(self, config: TrainConfig, counts: Mapping[str, int] | None = None) -> None:
        self._config = config
        self._reads_answers = any(name.rpartition(":")[2] == "exact_match" for name in config.reward_funcs)
        self._said = set[str]()
        self.counts = {"truncated": 0, "no answer": 0, "no advantage": 0} | dict(counts or {})

    def warning(self, result: Step) -> str | None:
        """Take in a step; say what to try once a cause has held for `PATIENCE` steps in a row."""
        metrics = result.metrics
        holds = {
            "truncated": metrics["completions/clipped_ratio"] == 1,
            "no answer": self._reads_answers and not self._any_answer(result.rollouts.texts),
            "no advantage": metrics.get("frac_reward_zero_std") == 1,
        }
        self.counts = {cause: self.counts[cause] + 1 if found else 0 for cause, found in holds.items()}
        if PATIENCE not in self.counts.values():
            return None
        cause = next(cause for cause, count in self.counts.items() if count >= PATIENCE)
        if cause in self._said:
            return None
        self._said.add(cause)
        steps = f"for {self.counts[cause]} steps in a row"
        if cause == "truncated":
            return (
                f"every completion was cut off at max_completion_length {self._config.max_completion_length} {steps}; "
                "raise it, or ask for shorter completions by --instruction"
            )
        if cause == "no answer":
            return f"no completion gave an answer that can be read {steps}; {self._what_is_read()}"
        return (
            f"no group had an advantage {steps} (mean reward {metrics['reward']:.2f}), so nothing is learnt; the "
            "problems are too hard or too easy for the model, or the temperature is too low"
        )

    def warning_of_held_out(self, texts: list[str]) -> str | None:
        """Say what to try where none of the held-out completions gives an answer."""
        if not self._reads_answers or self._any_answer(texts):
            return None
        return f"none of {len(texts)} held-out completions gives an answer that can be read; {self._what_is_read()}"

    def _any_answer(self, texts: list[str]) -> bool:
        return any(final_number(text, **self._config.answer_options()) is not None for text in texts)

    def _what_is_read(self) -> str:
        read = self._config.answer_format or "what follows ####, is in \\boxed{} or after 'the answer is'"
        return (
            f"what is read is {read} (--answer_format, --answer_fallback), what is asked for is "
            f"{self._config.instruction!r} (--instruction); completions may also be too short (--max_completion_length)"
        )
