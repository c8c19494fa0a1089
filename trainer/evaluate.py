"""Measure on held-out problems how many are solved: greedily, and by at least one of k samples."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .config import TrainConfig
from .data import Row
from .processes import count, gather, own_share
from .rewards.calls import Reward, RewardLog, rewards_by
from .rewards.numbers import exact_match
from .rollouts.engine import Engine
from .state import arguments

_NORMAL = 1.959964  # quantile of the normal distribution, for 95 %
_STREAM = 2  # at the end of a sample's key: evaluation draws its own numbers


@dataclass(frozen=True)
class Evaluation:
    """Result on N problems, in their order."""

    correct: list[bool]
    mean_length: float  # tokens per completion
    pass_at: Mapping[int, float] = field(default_factory=dict)  # by k, 0 to 1

    @property
    def accuracy(self) -> float:
        """Share of problems solved greedily, 0 to 1."""
        return sum(self.correct) / len(self.correct)

    @property
    def metrics(self) -> dict[str, float]:
        """Figures to report; accuracy with its 95 % interval over problems drawn at random."""
        low, high = wilson_interval(sum(self.correct), len(self.correct))
        figures = {"eval_accuracy": self.accuracy, "eval_accuracy_low": low, "eval_accuracy_high": high}
        passes = {f"eval_pass@{k}": share for k, share in self.pass_at.items()}
        return {**figures, "eval_completions/mean_length": self.mean_length, **passes}


def evaluate(
    engine: Engine, rows: Sequence[Row], prompts: Sequence[Sequence[int]], config: TrainConfig, *,
    match: Reward = exact_match, advance: Callable[[int], object] = lambda _: None, step: int = 0,
) -> Evaluation:  # fmt: skip
    """Complete every prompt greedily, and by sampling `eval_samples` times, and score completions by `match`.

    A completion solves its problem if `match`, a reward function, gives 1 or more. Samples repeat at equal weights,
    whatever the step. Each process takes a share of the prompts, and all get the whole result; `advance(n)` hears of n
    more completions. Raises `FloatingPointError` for logits or rewards that are not finite, `RewardError` if `match`
    fails; the message names the problems.
    """

    def solve(
        problems: Sequence[int], keys: Sequence[tuple[int, ...]] = (), **options: float
    ) -> list[tuple[bool, int]]:
        results, share = dict[int, tuple[bool, int]](), own_share(range(len(problems)))
        # Prompts of like length go together, as a batch is padded to its longest.
        by_length = sorted(share, key=lambda at: len(prompts[problems[at]]))
        size = config.generation_batch_size // count()
        for batch in (by_length[start : start + size] for start in range(0, len(by_length), size)):
            chosen = [problems[at] for at in batch]
            names = [f"held-out problem {i}" for i in chosen]
            rollouts = engine(
                [prompts[i] for i in chosen], max_completion_length=config.max_completion_length, names=names,
                keys=[keys[at] for at in batch] if keys else None, **options,
            )  # fmt: skip
            columns, log = arguments([rows[i] for i in chosen], rollouts), RewardLog(step, config.max_steps)
            (rewards,) = rewards_by({"of evaluation": match}, names, columns, log).values()
            solved = [reward is not None and reward >= 1 for reward in rewards]
            results |= zip(batch, zip(solved, rollouts.rows.lengths, strict=True), strict=True)
            advance(len(batch))
        return [*itertools.chain.from_iterable(gather([results[at] for at in share]))]

    correct, lengths = map(list, zip(*solve(range(len(rows))), strict=True))
    passes = dict[int, float]()
    if n := config.eval_samples:
        # Without the step: all evaluations of a run draw the same numbers, so that only the weights differ.
        keys = [(config.seed, 0, i, s, _STREAM) for i in range(len(rows)) for s in range(n)]
        sampled = solve([key[2] for key in keys], keys, temperature=config.temperature, top_p=config.top_p)
        solved = [sum(one for one, _ in sampled[i * n : (i + 1) * n]) for i in range(len(rows))]
        sizes = sorted({n, *(2**i for i in range(n.bit_length()))})
        passes = {k: sum(pass_at(k, right, n) for right in solved) / len(rows) for k in sizes}
    return Evaluation(correct, sum(lengths) / len(rows), passes)


def wilson_interval(right: float, count: int) -> tuple[float, float]:
    """Compute the 95 % interval of a share, `right` of `count`: it has a width for none and for all (Wilson, 1927)."""
    share, spread = right / count, _NORMAL**2 / count
    centre = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def least_gain(count: int) -> float:
    """Give the smallest gain that an interval of so many problems tells from none, if a quarter of them change."""
    return _NORMAL * math.sqrt(0.25 / count)


def paired_gain(before: Evaluation, after: Evaluation) -> tuple[float, float, float]:
    """Compute the change in accuracy, problem by problem, and its 95 % interval; all are shares.

    Half a problem is added to each of the four counts of right and wrong before and after, so that no change is not
    certain either (Agresti and Min, 2005).
    """
    pairs = list(zip(before.correct, after.correct, strict=True))
    won, lost = (sum(a == old and b != old for a, b in pairs) for old in (False, True))
    count, gain = len(pairs) + 2, (won - lost) / len(pairs)
    centre = (won - lost) / count
    half = _NORMAL * math.sqrt(((won + lost + 1) / count - centre**2) / count)
    return gain, max(centre - half, -1.0), min(centre + half, 1.0)


def pass_at(k: int, right: int, samples: int) -> float:
    """Estimate without bias how probable it is that one of `k` samples is right, if `right` of `samples` were."""
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)
