"""Measure greedy accuracy on held-out problems."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.data import Row
from trainer.processes import gathered, own
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

    Of several processes each takes a share of the prompts, and all get the whole result.

    Raises:
        FloatingPointError: the model gave logits that are not finite; the message names the problems.
    """
    found, tokens = dict[int, tuple[bool, str]](), 0
    by_length = own(sorted(range(len(rows)), key=lambda i: len(prompts[i])))
    for start in range(0, len(by_length), batch_size):
        batch = by_length[start : start + batch_size]
        rollouts = engine(
            [prompts[i] for i in batch],
            max_completion_length=max_completion_length,
            names=[f"held-out problem {i}" for i in batch],
        )
        matches = match(completions=rollouts.texts, answer=[rows[i]["answer"] for i in batch])
        found |= {i: (one == 1, text) for i, text, one in zip(batch, rollouts.texts, matches, strict=True)}
        tokens += int(rollouts.completion_mask.sum())
        advance(len(batch))
    shares = gathered((found, tokens))
    everywhere = {i: result for share, _ in shares for i, result in share.items()}
    correct, texts = zip(*(everywhere[i] for i in range(len(rows))), strict=True)
    return Evaluation([*correct], [*texts], sum(tokens for _, tokens in shares) / len(rows))
