"""Measure on held-out problems how many are solved: greedily, and by at least one of k samples."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config import TrainConfig
from trainer.data import Row
from trainer.processes import gathered, own
from trainer.rewards import Reward, exact_match, rewards_by
from trainer.rollouts import Engine

_STREAM = 2  # at the end of a sample's key: evaluation draws numbers of its own


@dataclass(frozen=True)
class Draws:
    """Completions sampled for pass@k; equal ones draw equal numbers, at whatever step."""

    samples: int  # n of each problem
    pass_at: tuple[int, ...]  # the k, each at most n
    seed: int
    temperature: float
    top_p: float

    @classmethod
    def of(cls, config: TrainConfig) -> "Draws | None":
        """Read a run's settings; None where they ask for no samples."""
        if not config.eval_samples:
            return None
        return cls(config.eval_samples, config.pass_at, config.seed, config.temperature, config.top_p)


@dataclass(frozen=True)
class Evaluation:
    """Result on N problems, in their order."""

    correct: list[bool]
    texts: list[str]
    mean_length: float  # tokens per completion
    pass_at: Mapping[int, float] = field(default_factory=dict)  # by k, 0 to 1

    @property
    def accuracy(self) -> float:
        """Share of problems solved greedily, 0 to 1."""
        return sum(self.correct) / len(self.correct)

    @property
    def standard_error(self) -> float:
        """Standard error of the accuracy, as a mean over problems drawn at random."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / max(len(self.correct) - 1, 1))

    @property
    def metrics(self) -> dict[str, float]:
        """Figures to report."""
        figures = {"eval_accuracy": self.accuracy, "eval_accuracy_stderr": self.standard_error}
        passes = {f"eval_pass@{k}": share for k, share in self.pass_at.items()}
        return {**figures, "eval_completions/mean_length": self.mean_length, **passes}


def evaluate(
    engine: Engine,
    rows: Sequence[Row],
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    max_completion_length: int,
    match: Reward = exact_match,
    draws: Draws | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Evaluation:
    """Complete every prompt greedily, and by `draws` several times, and judge completions by `match`.

    A completion solves its problem where `match`, a reward function, gives 1 or more. `advance(n)` reports progress.

    Of several processes each takes a share of the prompts, and all get the whole result.

    Raises:
        FloatingPointError: the model gave logits, or `match` a reward, that are not finite; the message names the
            problems.
        RewardError: `match` raised or gave no rewards; the message names the problem.
    """

    def completed(problems: Sequence[int], **options: Any) -> list[tuple[bool, str, int]]:
        """Complete the prompts of problems, by number: whether solved, text and tokens of each."""
        keys, found = options.pop("keys", None), dict[int, tuple[bool, str, int]]()
        by_length = own(sorted(range(len(problems)), key=lambda at: len(prompts[problems[at]])))
        for start in range(0, len(by_length), batch_size):
            batch = by_length[start : start + batch_size]
            chosen = [problems[at] for at in batch]
            names = [f"held-out problem {i}" for i in chosen]
            rollouts = engine(
                [prompts[i] for i in chosen],
                max_completion_length=max_completion_length,
                names=names,
                **options if keys is None else {**options, "keys": [keys[at] for at in batch]},
            )
            columns = {name: [rows[i][name] for i in chosen] for name in rows[0]}
            arguments: dict[str, Sequence[Any]] = {"prompts": columns["question"], "completions": rollouts.texts}
            arguments |= {"completion_ids": rollouts.ids(), **columns}
            given = rewards_by("of evaluation", match, names, arguments)
            lengths = rollouts.completion_mask.sum(1).tolist()
            for at, one, text, length in zip(batch, given, rollouts.texts, lengths, strict=True):
                found[at] = one is not None and one >= 1, text, length
            advance(len(batch))
        everywhere = dict(itertools.chain.from_iterable(share.items() for share in gathered(found)))
        return [everywhere[at] for at in range(len(problems))]

    correct, texts, lengths = map(list, zip(*completed(range(len(rows))), strict=True))
    passes = dict[int, float]()
    if draws is not None:
        n, pairs = draws.samples, [(i, s) for i in range(len(rows)) for s in range(draws.samples)]
        keys = [(draws.seed, 0, i, s, _STREAM) for i, s in pairs]
        sampled = completed([i for i, _ in pairs], keys=keys, temperature=draws.temperature, top_p=draws.top_p)
        solved = [sum(one for one, _, _ in sampled[i * n : (i + 1) * n]) for i in range(len(rows))]
        passes = {k: sum(pass_at_k(n, c, k) for c in solved) / len(rows) for k in draws.pass_at}
    return Evaluation(correct, texts, sum(lengths) / len(rows), passes)


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Estimate the probability that one of k samples solves a problem, without bias, from more of them.

    1 - C(n - c, k) / C(n, k) with n `samples` of which c `solved` it: Chen et al. (2021), "Evaluating Large Language
    Models Trained on Code".
    """
    return 1 - math.comb(samples - solved, k) / math.comb(samples, k)
