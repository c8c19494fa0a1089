"""Draw README's picture, docs/completion.png, from a run by `--estimator masking`: `python -m docs.picture RUN`."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.patches import Rectangle

PICTURE = Path(__file__).with_name("completion.png")
_SHADES = LinearSegmentedColormap.from_list("weights", ["#9db8d2", "#ffffff", "#f2a154"])
_INK, _SOFT = "#1d2228", "#5b636d"
_POINTS = 9
_CHARACTER = 0.602 * _POINTS / 72  # inches, of the monospaced font


def last_completion(run: Path) -> dict[str, Any]:
    """Read the right completion of a run's last step that has the most spans, as `completions.jsonl` holds it."""
    lines = (run / "completions.jsonl").read_text(encoding="utf-8").splitlines()
    completions = [json.loads(line) for line in lines]
    last = completions[-1]["step"]
    return max((c for c in completions if c["step"] == last), key=lambda c: (c["reward"], len(c["spans"])))


def draw(completion: dict[str, Any], path: Path) -> None:
    """Draw a line of the completion a row: its tokens shaded by weight, the drops of its spans as bars, the weights.

    Args:
        completion: a record of `completions.jsonl`, with drops in nats.
        path: where to write the picture.
    """
    lines = _lines(completion)
    longest = max(sum(len(text) for text, _ in line["tokens"]) for line in lines)
    bar, value, weight_at = longest + 20, longest + 22, longest + 41  # columns, a character each
    width, height = weight_at + 9, len(lines) + 1.2
    figure = plt.figure(figsize=(width * _CHARACTER, height * 0.3), dpi=150)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(len(lines) - 0.4, -1.6))
    axes.axis("off")
    header = {"color": _SOFT, "fontsize": 8.5, "va": "center"}
    axes.text(1, -1, "completion", **header)
    axes.text(value, -1, "drop of log P(answer)", ha="center", **header)
    axes.text(weight_at, -1, "weight", ha="center", **header)
    norm = TwoSlopeNorm(1.0, 0.0, max(*completion["weights"], 2.0))
    largest = max(abs(span["drop"]) for span in completion["spans"])
    for y, line in enumerate(lines):
        plain = {"color": _INK, "va": "center"}
        x = 1
        for text, weight in line["tokens"]:
            axes.add_patch(Rectangle((x, y - 0.42), len(text), 0.84, color=_SHADES(norm(weight)), lw=0))
            for character in text:  # one by one, as the font's own advance is rounded to pixels
                axes.text(x + 0.5, y, character, fontsize=_POINTS, family="monospace", ha="center", **plain)
                x += 1
        for span in line["spans"]:
            length = max(14 * abs(span["drop"]) / largest, 0.15)
            axes.add_patch(Rectangle((bar - length, y - 0.3), length, 0.6, color="#c2452d", lw=0))
            axes.text(value, y, f"{span['drop']:z.2f} nats", fontsize=8.5, **plain)
        weights = " and ".join(f"{weight:g}" for weight in sorted({weight for _, weight in line["tokens"]} - {1.0}))
        said = f"{weights}, the answer" if line["answer"] else weights
        axes.text(weight_at, y, said, fontsize=8.5, ha="center", **plain)
    figure.savefig(path)
    plt.close(figure)


def _lines(completion: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of the text, each with its tokens and their weights, the spans that begin in it, and if it answers."""
    lines: list[dict[str, Any]] = [{"tokens": [], "spans": [], "answer": False}]
    answer, spans = completion["answer"], {span["start"]: span for span in completion["spans"]}
    for t, (token, weight) in enumerate(zip(completion["tokens"], completion["weights"], strict=True)):
        line = lines[-1]
        if t in spans:
            line["spans"].append(spans[t])
        line["answer"] |= answer is not None and answer["start"] <= t < answer["end"]
        if (text := token.replace("\n", "")) and not text.startswith("<|"):
            line["tokens"].append((text, weight))
        if "\n" in token:
            lines.append({"tokens": [], "spans": [], "answer": False})
    return [line for line in lines if line["tokens"]]


if __name__ == "__main__":
    draw(last_completion(Path(sys.argv[1])), PICTURE)
