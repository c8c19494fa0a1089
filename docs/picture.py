"""Draw the picture of the README, `python -m docs.picture`: docs/completion.png, one completion under two credits."""

from pathlib import Path
from typing import Any

import matplotlib
import torch

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.patches import Rectangle

from cfa_kernels import counterfactual_credit
from cfa_kernels.credit.config import CounterfactualConfig
from examples import own_loop

PICTURE = Path(__file__).with_name("completion.png")
PANELS = {
    "prefix_gain_positive": ("what each step adds to P(answer)", "{:+z.2f}", 1.0),
    "cf": ("log P(answer) lost without it", "{:z.1f} nats", None),
}
"""By preset: what its bars show, how a value is written, and the value of a whole bar; None takes the largest."""

_SHADES = LinearSegmentedColormap.from_list("weights", ["#9db8d2", "#ffffff", "#f2a154"])
_NORM = TwoSlopeNorm(1.0, 0.0, 4.0)
_INK, _SOFT = "#1d2228", "#5b636d"
_POINTS = 9
_CHARACTER = 0.602 * _POINTS / 72  # inches, of the monospaced font


def panel(preset: str) -> list[dict[str, Any]]:
    """Score the right completion of `examples/own_loop.py`: its lines, each with tokens, weights and spans."""
    config = CounterfactualConfig.preset(preset)
    credit = counterfactual_credit(
        own_loop.model, own_loop.tokenizer, own_loop.rows, advantages=own_loop.advantages, config=config
    )
    values = {span.start: value for span, value in zip(credit.spans[0], credit.drop[0].tolist(), strict=True)}
    lines: list[dict[str, Any]] = [{"tokens": [], "values": [], "answer": False}]
    for t, (token, weight) in enumerate(zip(own_loop.completions[0], credit.weights[0].tolist(), strict=True)):
        text = own_loop.tokenizer.decode([int(token)])
        lines[-1]["values"] += [values[t]] if t in values else []
        lines[-1]["answer"] |= credit.answers[0].start <= t < credit.answers[0].end
        lines[-1]["tokens"] += [(text.replace("\n", ""), weight)] if text != "\n" else []
        if "\n" in text:
            lines.append({"tokens": [], "values": [], "answer": False})
    return lines


def draw(path: Path) -> None:
    """Draw a panel for each of `PANELS`: tokens shaded by weight, values of spans as bars, weights."""
    panels = {preset: panel(preset) for preset in PANELS}
    longest = max(sum(len(text) for text, _ in line["tokens"]) for lines in panels.values() for line in lines)
    bar, value, weight_at = longest + 20, longest + 22, longest + 41  # columns, a character each
    width, height = weight_at + 9, sum(len(lines) + 1.7 for lines in panels.values())
    figure = plt.figure(figsize=(width * _CHARACTER, height * 0.3), dpi=150)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height - 1, -1))
    axes.axis("off")
    y = 0.0
    for preset, lines in panels.items():
        shown, form, most = PANELS[preset]
        most = most or max(abs(x) for line in lines for x in line["values"])
        axes.text(1, y, f'credit="{preset}"', color=_INK, fontsize=8.5, va="center", weight="bold")
        axes.text(value, y, shown, ha="center", color=_SOFT, fontsize=8.5, va="center")
        axes.text(weight_at, y, "weight", ha="center", color=_SOFT, fontsize=8.5, va="center")
        for line in lines:
            y += 1
            _line(axes, line, y, (bar, value, weight_at), form, most)
        y += 1.7
    figure.savefig(path)
    plt.close(figure)


def _line(axes: Axes, line: dict[str, Any], y: float, columns: tuple[int, int, int], form: str, most: float) -> None:
    bar, value, weight_at = columns
    plain: dict[str, Any] = {"color": _INK, "va": "center"}
    x = 1
    for text, weight in line["tokens"]:
        axes.add_patch(Rectangle((x, y - 0.42), len(text), 0.84, color=_SHADES(_NORM(weight)), lw=0))
        for character in text:  # one by one, as the font's own advance is rounded to pixels
            axes.text(x + 0.5, y, character, fontsize=_POINTS, family="monospace", ha="center", **plain)
            x += 1
    for each in line["values"]:
        length = max(14 * abs(each) / most, 0.15)
        axes.add_patch(Rectangle((bar - length, y - 0.3), length, 0.6, color="#c2452d", lw=0))
        axes.text(value, y, form.format(each), fontsize=8.5, **plain)
    last = line["tokens"][-1][1] if line["answer"] else max(line["tokens"], key=lambda pair: abs(pair[1] - 1))[1]
    weights = f"{last:.2f}, the answer" if line["answer"] else f"{last:.2f}"
    axes.text(weight_at, y, weights, fontsize=8.5, ha="center", **plain)


if __name__ == "__main__":
    torch.manual_seed(0)
    draw(PICTURE)
