"""Draw the run folder's `curves.png`."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainer.report.stages import STAGES

_BLUE, _ORANGE, _GREEN, _GREY = "#3366aa", "#dd7722", "#2a8a57", "#999999"


def draw_curves(path: Path, history: list[dict[str, float]], title: str) -> None:
    """Draw six panels from metrics by step; steps without a metric are left out of its curve."""
    # No pyplot: the figure needs neither a screen nor global state.
    figure = Figure(figsize=(13, 7))
    FigureCanvasAgg(figure)
    figure.subplots_adjust(left=0.055, right=0.99, bottom=0.07, top=0.89, hspace=0.34, wspace=0.14)
    figure.suptitle(title, fontsize=13)
    accuracy, reward, groups, entropy, drops, times = figure.subplots(2, 3).flatten()

    steps, values = _series(history, "eval_accuracy")
    accuracy.plot(steps, [100 * value for value in values], "o-", color=_GREEN)
    for step, value in zip(steps, values, strict=True):
        accuracy.annotate(f"{value:.1%}", (step, 100 * value), textcoords="offset points", xytext=(0, 8), ha="center")
    accuracy.margins(0.08, 0.25)
    accuracy.set_xlim(left=-0.1 * max(steps, default=1))
    accuracy.set_title("Held-out accuracy, greedy (%)")

    _smoothed(reward, history, "reward", _BLUE)
    reward.set_title("Mean reward of sampled completions")
    _smoothed(groups, history, "frac_reward_zero_std", _BLUE, complement=True)
    groups.set_title("Share of groups with an advantage")
    _smoothed(entropy, history, "entropy", _BLUE)
    entropy.set_title("Entropy (nats per token)")
    _smoothed(drops, history, "credit/drop_mean", _ORANGE)
    drops.set_title("Answer log-prob drop per masked span (nats)")
    if not drops.lines:
        drops.text(0.5, 0.5, "nothing is masked in this mode", ha="center", transform=drops.transAxes, color=_GREY)

    parts = {name: _series(history, f"time/{name}") for name in STAGES}
    steps = parts["generate"][0]
    colors = _BLUE, _ORANGE, _GREEN, _GREY
    times.stackplot(steps, [values for _, values in parts.values()], labels=list(parts), colors=colors, alpha=0.8)
    times.legend(loc="upper right", fontsize=8, ncols=4)
    times.margins(y=0.2)
    times.set_title("Seconds per step")
    for axes in (accuracy, reward, groups, entropy, drops, times):
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _series(history: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    entries = [(entry["step"], entry[name]) for entry in history if name in entry]
    return [step for step, _ in entries], [value for _, value in entries]


def _smoothed(axes: Axes, history: list[dict[str, float]], name: str, color: str, complement: bool = False) -> None:
    """Plot a noisy metric faintly and its trailing mean over a tenth of the run boldly."""
    steps, values = _series(history, name)
    if not values:
        return
    if complement:
        values = [1 - value for value in values]
    window = max(1, len(values) // 10)
    means = [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=1)
    axes.plot(steps, means, color=color, linewidth=2)
