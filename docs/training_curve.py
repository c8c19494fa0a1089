"""Draw the curve of docs/training_run.md from its result file, `python -m docs.training_curve`: training_curve.png."""

import json
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot as plt

RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "evidence-training-pretrained.json"
PICTURE = Path(__file__).with_name("training_curve.png")
_LINE = {"color": "#2f6db5", "lw": 1.6, "marker": "o", "ms": 4}


def draw(result: Path, path: Path) -> None:
    """Draw the reward of each step and of blocks of steps, and held-out accuracy, with 95 % intervals.

    A block's interval is two standard errors, of steps that scatter alike around the means of all blocks.
    """
    run = json.loads(result.read_text("utf-8"))
    steps, rewards = np.array([(one["step"], one["reward"]) for one in run["steps"]]).T
    blocks = [(steps >= low) & (steps <= high) for low, high in (one["steps"] for one in run["means of steps"])]
    scatter = sum(rewards[own].var() * own.sum() for own in blocks) / sum(own.sum() - 1 for own in blocks)
    errors = [2 * (scatter / own.sum()) ** 0.5 for own in blocks]
    at, accuracy, low, high = np.array(
        [[e[k] for k in ("step", "accuracy", "low", "high")] for e in run["accuracy, %"]]
    ).T

    plt.rcParams.update({"font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.7), dpi=150, layout="constrained", width_ratios=(3, 2))
    left.plot(steps, rewards, color=_LINE["color"], alpha=0.4, lw=0.9)
    left.errorbar([steps[b].mean() for b in blocks], [rewards[b].mean() for b in blocks], errors, **_LINE)
    left.set(title="Reward, mean over a step's completions", xlabel="step")
    right.errorbar(at, accuracy, [accuracy - low, high - accuracy], **_LINE)
    right.set(title="Held-out accuracy, greedy, %", xlabel="step")
    for axes in (left, right):
        axes.grid(axis="y", color="#c9ccd1", lw=0.5)
    figure.savefig(path)


if __name__ == "__main__":
    draw(RESULT, PICTURE)
