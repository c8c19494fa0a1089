"""Measure greedy accuracy on held-out problems."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.data import Row
from trainer.rewards import Reward, exact_match
from trainer.rollouts import Engine


@dataclass(frozen=True)
class Evaluation:
    """Result on N problems, in their order."""

    correct: list[bool]
    texts: list[str]
    mean_length: float  # tokens per completion

    @property
    def accuracy(self) -> float:
        """Share of problems solved, 0 to 1."""
        return sum(self.correct) / len(self.correct)


def evaluate(
    engine: Engine,
    rows: Sequence[Row],
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    max_completion_length: int,
    match: Reward = exact_match,
    advance: Callable[[int], None] = lambda _: None,
) -> Evaluation:
    """Complete every prompt greedily and `match` it with the row's answer; `advance(n)` reports progress.

    Raises:
        FloatingPointError: the model gave logits that are not finite; the message names the problems.
    """
    correct, texts, tokens = [False] * len(rows), [""] * len(rows), 0
    by_length = sorted(range(len(rows)), key=lambda i: len(prompts[i]))
    for start in range(0, len(rows), batch_size):
        batch = by_length[start : start + batch_size]
        rollouts = engine(
            [prompts[i] for i in batch],
            max_completion_length=max_completion_length,
            names=[f"held-out problem {i}" for i in batch],
        )
        matches = match(completions=rollouts.texts, answer=[rows[i]["answer"] for i in batch])
        for i, text, matched in zip(batch, rollouts.texts, matches, strict=True):
            correct[i], texts[i] = matched == 1, text
        tokens += int(rollouts.completion_mask.sum())
        advance(len(batch))
    return Evaluation(correct, texts, tokens / len(rows))
