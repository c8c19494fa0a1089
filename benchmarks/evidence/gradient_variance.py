"""`python -m benchmarks evidence variance`: measure how much an update's gradient depends on the drawn completions.

One policy, the same problems, groups drawn many times: every kind of credit gets the same draws. IBPO
(arXiv 2605.16302) claims that credit on what matters lowers this variance.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.evidence.ablation import ARMS, PLAIN, arms_named
from benchmarks.harness.results import Pieces, interval, made_by, table
from trainer.cli import parse
from trainer.config import TrainConfig
from trainer.experimental.compare_and_correct import shape_rewards
from trainer.metrics import StageTimes
from trainer.rewards import group_advantages
from trainer.run import set_up
from trainer.state import Trainer
from trainer.step import draw as drawn
from trainer.step import rewarded, update


@dataclass(frozen=True)
class VarianceSettings:
    """Number of draws and groups."""

    draws: int = 24
    """Times the groups are drawn."""
    problems: int = 16
    """Problems of a batch, eight completions each."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Reject values outside their range, naming the setting."""
        if self.draws < 3:
            raise ValueError(f"draws must be at least 3, got {self.draws}")
        if self.problems < 1:
            raise ValueError(f"problems must be at least 1, got {self.problems}")


def run(
    pieces: Pieces, settings: VarianceSettings, *, arms: Sequence[str] | None = None, extra: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> dict[str, Any]:  # fmt: skip
    """Gradients of every arm under the same draws, and how much they scatter.

    Args:
        pieces: the figures of each arm.
        settings: how much.
        arms: names in `ablation.ARMS`; default all.
        extra: flags of the training program for every arm.
        say: prints progress, a line at a time.

    Raises:
        ValueError: an unknown arm.
    """
    chosen, plain = arms_named(arms), functools.cache(lambda: _gradients(PLAIN, settings, extra).mean(0))

    def work(arm: str) -> dict[str, Any]:
        vectors = _gradients(arm, settings, extra)
        return {"products": products(vectors).tolist(), "cosine": _cosine(vectors, plain())}

    result = {}
    for arm in chosen:
        record = pieces.get(arm, lambda: work(arm))  # noqa: B023
        own = np.array(record["products"])
        result[arm] = scatter(own) | {"cosine": record["cosine"]}
        if PLAIN in result and arm != PLAIN:
            result[arm]["of_plain"] = relative(own, np.array(pieces.get(PLAIN, dict)["products"]))
        say(f"{arm}: noise to signal {result[arm]['ratio']:.2f} ± {result[arm]['error']:.2f}")
    return {"settings": asdict(settings), "arms": result}


def products(vectors: np.ndarray) -> np.ndarray:
    """(R, R) float64 inner products of (R, D) vectors: all that the figures below need."""
    doubled = vectors.astype(np.float64)
    return doubled @ doubled.T


def scatter(products: np.ndarray) -> dict[str, float]:
    """Compute how much vectors scatter relative to their mean, without the bias of few draws.

    Args:
        products: (R, R) inner products of independent draws of one random vector, R >= 3.

    Returns:
        `variance`, the trace of the covariance; `signal`, the squared norm of the mean, from products of different
        draws only; `ratio`, the first by the second, with its jackknife standard `error` (nan where the signal is not
        above 0).
    """
    variance, signal = _moments(products)
    return {"variance": variance, "signal": signal, "ratio": _ratio(products),
            "error": _jackknife([_ratio(some) for some in _one_left_out(products)])}  # fmt: skip


def relative(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float | None]:
    """The ratio of ours over that of theirs, both from the same draws, which are left out together.

    Args:
        ours, theirs: (R, R) products, as for `scatter`.

    Returns:
        `value`, and `low` and `high`, 95 % by the jackknife of its logarithm: what both share falls out, so this is
        narrower than the two errors suggest. None where a signal is not above 0.
    """

    def difference(a: np.ndarray, b: np.ndarray) -> float:
        ratios = _ratio(a), _ratio(b)
        return math.log(ratios[0]) - math.log(ratios[1]) if min(ratios) > 0 else math.nan

    value = difference(ours, theirs)
    left = zip(_one_left_out(ours), _one_left_out(theirs), strict=True)
    error = _jackknife([difference(a, b) for a, b in left])
    if not math.isfinite(value + error):
        return {"value": None, "low": None, "high": None}
    return {"value": math.exp(value), "low": math.exp(value - 1.96 * error), "high": math.exp(value + 1.96 * error)}


def _ratio(products: np.ndarray) -> float:
    variance, signal = _moments(products)
    return variance / signal if signal > 0 else math.nan


def _one_left_out(products: np.ndarray) -> Iterator[np.ndarray]:
    for left in range(len(products)):
        keep = [i for i in range(len(products)) if i != left]
        yield products[np.ix_(keep, keep)]


def _jackknife(values: Sequence[float]) -> float:
    """The standard error of a statistic from its values with one draw left out each."""
    count, mean = len(values), sum(values) / len(values)
    return math.sqrt((count - 1) / count * sum((value - mean) ** 2 for value in values))


def _moments(products: np.ndarray) -> tuple[float, float]:
    count = len(products)
    signal = (products.sum() - np.trace(products)) / (count * (count - 1))
    return float(np.trace(products) / count - signal), float(signal)


def _cosine(vectors: np.ndarray, other: np.ndarray) -> float:
    mean = vectors.mean(0)
    return float(mean @ other / (np.linalg.norm(mean) * np.linalg.norm(other)))


def _gradients(arm: str, settings: VarianceSettings, extra: Sequence[str]) -> np.ndarray:
    """(R, D) fp32: the gradient of each draw's update, before clipping."""
    flags = [
        *ARMS[arm], "--device=cpu", "--learning_rate=1e-30", "--max_grad_norm=1e30", "--eval_problems=1",
        f"--seed={settings.seed}", *extra,
    ]  # fmt: skip
    trainer = set_up(parse(TrainConfig, flags, prog="", description=""))
    return np.stack([_gradient(trainer, draw, settings.problems) for draw in range(settings.draws)])


def _gradient(trainer: Trainer, draw: int, problems: int) -> np.ndarray:
    config = trainer.config
    keys = [(draw, 0, i, g) for i in range(problems) for g in range(config.num_generations)]
    rollouts = drawn(trainer, keys)
    times = StageTimes()
    shaped = shape_rewards(trainer, rewarded(trainer, keys, rollouts), times)
    advantages = group_advantages(shaped.rewards, config.num_generations, config.scale_rewards)
    mask = rollouts.completion_mask * ~rollouts.truncated[:, None]
    update(trainer, draw, rollouts, mask, advantages, shaped, times)
    trained = trainer.trained.values()
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in trained]).numpy()


def markdown(document: dict[str, Any]) -> str:
    """The table of the command."""
    settings, arms = document["settings"], document["arms"]
    rows = [
        [
            arm,
            f"{f['ratio']:.2f} ± {f['error']:.2f}",
            interval(f.get("of_plain")),
            f"{f['signal']:.3g}",
            f"{f['variance']:.3g}",
            f"{f['cosine']:.3f}",
        ]
        for arm, f in arms.items()
    ]
    return "\n".join([
        "# Variance of the gradient\n",
        f"{made_by(document)}. The embedded model before "
        f"training, {settings['problems']} problems, eight completions each, drawn {settings['draws']} times; each "
        "arm sees the same draws. Noise to signal is the trace of the covariance over the squared norm of the mean, "
        "with a jackknife standard error; beside plain DAPO's, draw by draw, with 95 % by the jackknife. The cosine is "
        "that of the arm's mean gradient with plain DAPO's.\n",
        table(
            ["credit", "noise to signal", "of plain DAPO's", "squared norm of the mean", "variance",
             "cosine with plain"],
            rows,
        ),
    ])  # fmt: skip
