"""Draw pictures of a result file: `python -m benchmarks plots benchmarks/results/FILE.json` writes PNGs beside it."""

import argparse
import json
from pathlib import Path
from typing import Any

LABELS = {"spans": "spans per completion (K)", "completion": "completion length (tokens)", "group": "group size (G)"}


def _pyplot() -> Any:
    """Matplotlib without a display, imported only where something is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def predict_growth(figures: list[dict[str, Any]]) -> None:
    """Add to each point of a sweep the seconds that token counts predict.

    They are the contender's own tokens at that point times its seconds per token at its largest point.
    """
    for figure in figures:
        line = [f for f in figures if (f["axis"], f["name"]) == (figure["axis"], figure["name"])]
        largest = max(line, key=lambda f: f["value"])
        per_token = largest["seconds"]["median"] / largest["tokens_fed"]
        figure["predicted_seconds"] = per_token * figure["tokens_fed"]


def plot_growth(figures: list[dict[str, Any]], path: Path) -> None:
    """Time against K, completion length and G, with the line that token counts predict."""
    pyplot = _pyplot()
    axes_names = [axis for axis in LABELS if any(figure.get("axis") == axis for figure in figures)]
    canvas, panels = pyplot.subplots(1, len(axes_names), figsize=(4.6 * len(axes_names), 3.8), squeeze=False)
    for panel, axis in zip(panels[0], axes_names, strict=True):
        on_axis = [figure for figure in figures if figure.get("axis") == axis]
        for color, name in enumerate(dict.fromkeys(figure["name"] for figure in on_axis)):
            line = sorted((f for f in on_axis if f["name"] == name), key=lambda f: f["value"])
            x, y = [f["value"] for f in line], [f["seconds"]["median"] for f in line]
            low, high = [f["seconds"]["min"] for f in line], [f["seconds"]["max"] for f in line]
            panel.plot(x, [f["predicted_seconds"] for f in line], "--", color=f"C{color}", linewidth=1)
            errors = [[m - lo for m, lo in zip(y, low, strict=True)], [hi - m for m, hi in zip(y, high, strict=True)]]
            panel.errorbar(x, y, yerr=errors, fmt="o", color=f"C{color}", label=name, capsize=2)
        panel.set_xlabel(LABELS[axis])
        panel.set_ylabel("seconds (median, min to max)")
        panel.set_ylim(bottom=0)
        panel.set_xticks(sorted({figure["value"] for figure in on_axis}))
    panels[0][0].legend(title="dashed: predicted by tokens fed", fontsize=8, title_fontsize=8)
    canvas.tight_layout()
    canvas.savefig(path, dpi=120)
    pyplot.close(canvas)


def plot_steps(figures: list[dict[str, Any]], path: Path) -> None:
    """Draw the time of a training step, credit and update stacked, one panel per workload."""
    pyplot = _pyplot()
    groups = list(dict.fromkeys(figure["group"] for figure in figures))
    canvas, panels = pyplot.subplots(len(groups), 1, figsize=(8, 3.8 * len(groups)), squeeze=False)
    for panel, group in zip(panels[:, 0], groups, strict=True):
        bars = sorted((f for f in figures if f["group"] == group), key=lambda f: -f["seconds"]["median"])
        names = [f["name"] for f in bars]
        medians = [f["seconds"]["median"] for f in bars]
        credit, update = ([f[f"{part}_seconds"] for f in bars] for part in ("credit", "update"))
        panel.barh(names, credit, color="C1", label="credit")
        drawn = panel.barh(names, update, left=credit, color="C0", label="update")
        trl = next((f["seconds"]["median"] for f in bars if f["name"] == "TRL"), None)
        labels = [f"{m:.3g} s" + (f", {m / trl:.2f} of TRL" if trl else "") for m in medians]
        panel.bar_label(drawn, labels=labels, padding=4, fontsize=8)
        panel.set_xlim(0, max(medians) * 1.45)
        panel.set_title(group, fontsize=10)
        panel.set_xlabel("seconds (median)")
        panel.legend(fontsize=8, loc="lower right" if len(bars) < 3 else "upper right")
    canvas.tight_layout()
    canvas.savefig(path, dpi=120)
    pyplot.close(canvas)


def plot_results(results: Path) -> list[Path]:
    """Write every picture that a result file holds figures for; return their paths."""
    parts = json.loads(results.read_text())["parts"]
    figures = {name: part.get("figures", []) for name, part in parts.items()}
    drawings = (
        ("sweeps", plot_growth, [figure for figure in figures.get("scoring", []) if "axis" in figure]),
        ("step", plot_steps, figures.get("step", [])),
    )
    written = []
    for name, draw, chosen in drawings:
        if chosen:
            written.append(results.with_name(f"{results.stem}-{name}.png"))
            draw(chosen, written[-1])
    return written


def main(argv: list[str]) -> int:
    """Draw the pictures of each file named; 1 where one holds no figures to draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks plots", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a result file of `speed`")
    status = 0
    for file in parser.parse_args(argv).files:
        pictures = plot_results(file)
        for picture in pictures:
            print(f"== {picture}")
        if not pictures:
            print(f"{file}: it holds no figures of sweeps, scoring or steps, so there is nothing to draw")
            status = 1
    return status
