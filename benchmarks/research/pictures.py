"""Draw what the alignment's result files hold: cosine against the batch's size, gain against the density."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.research.alignment import MAIN, sizes_of
from benchmarks.research.arms import PLAIN

LINES = (PLAIN, "CF", "CF where right", "prefix gain where right, spans open", "permuted where right", "ceiling")
"""Arms that are drawn, where they were measured."""


def draw(documents: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw both pictures of alignments in regimes; returns their paths, none without a document."""
    chosen = sorted((one for one in documents if one.get("density")), key=lambda one: -one["density"])
    if not chosen:
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = dict(zip(LINES, ("C7", "C0", "C1", "C3", "C5", "C2"), strict=True))
    lines = -(-len(chosen) // 3)
    sizes, panels = pyplot.subplots(
        lines, 3, figsize=(9.6, 3.2 * lines), squeeze=False, sharey=True, layout="constrained"
    )
    for spare in panels.flat[len(chosen) :]:
        spare.set_axis_off()
    for panel, one in zip(panels.flat, chosen, strict=False):
        groups = sizes_of(one["arms"][PLAIN])
        counts = [size * one["settings"]["group"] for size in groups]
        for name in (name for name in LINES if name in one["arms"]):
            points = [one["arms"][name][str(size)] for size in groups]
            panel.errorbar(
                counts, [at["cosine"] for at in points], [at["error"] for at in points], label=name,
                color=colours[name], marker="o", markersize=3, linewidth=1.2, capsize=2,
            )  # fmt: skip
        panel.set_xscale("log", base=2)
        panel.set_xticks(counts, [str(count) for count in counts])
        panel.set_title(f"{one['settings']['regime']}: {one['density']:.0%} of tokens in steps", fontsize=9)
        panel.set_xlabel("completions in a batch")
        panel.set_ylabel("cosine with the true gradient")
    parts = {name: part for panel in panels.flat for part, name in zip(*panel.get_legend_handles_labels(), strict=True)}
    shown = [name for name in LINES if name in parts]
    sizes.legend([parts[name] for name in shown], shown, fontsize=8, ncols=3, loc="outside lower center")
    canvas, panel = pyplot.subplots(figsize=(7.2, 3.6), layout="constrained")
    densities = [one["density"] for one in chosen]
    for name in LINES[1:]:
        found = [(one["density"], one["arms"][name][str(MAIN)]) for one in chosen if name in one["arms"]]
        ratios, errors = ([at[key] for _, at in found] for key in ("ratio", "ratio_error"))
        panel.errorbar(
            [x for x, _ in found], ratios, errors, label=name, color=colours[name], marker="o", markersize=4,
            linestyle="none", capsize=2,
        )  # fmt: skip
    places = np.geomspace(densities[0], densities[-1], 50)
    law = np.sqrt(densities[0] / places)
    panel.plot(places, law, color="black", linewidth=0.8, linestyle="--", label="root of the inverse density")
    panel.set_xscale("log")
    panel.set_xticks(densities, [f"{one['settings']['regime']}\n{one['density']:.0%}" for one in chosen], fontsize=7)
    panel.minorticks_off()
    panel.set_xlabel("share of tokens in steps and answer")
    panel.set_ylabel(f"cosine, ratio to plain's, {MAIN * chosen[0]['settings']['group']} completions")
    panel.legend(fontsize=7)
    paths = [folder / "evidence-alignment-sizes.png", folder / "evidence-alignment-density.png"]
    for drawn, path in zip((sizes, canvas), paths, strict=True):
        drawn.savefig(path, dpi=120)
        pyplot.close(drawn)
    return paths
