"""Draw the steps of a result file: `python -m benchmarks plots benchmarks/results/FILE.json` writes a PNG beside it."""

import argparse
import json
from pathlib import Path
from typing import Any


def plot_steps(figures: list[dict[str, Any]], path: Path) -> None:
    """Draw the time of a training step, credit and update stacked, one panel per workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

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
    """Draw the steps that a result file holds, beside it; return the paths of the pictures."""
    figures = json.loads(results.read_text())["parts"].get("step", {}).get("figures")
    if not figures:
        return []
    picture = results.with_name(f"{results.stem}-step.png")
    plot_steps(figures, picture)
    return [picture]


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
            print(f"{file}: it holds no figures of steps, so there is nothing to draw")
            status = 1
    return status
