"""Draw the figure of an analysis: its tables at a glance."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from trainer.analyze.tables import Cell, Table

_BLUE, _ORANGE, _GREY = "#3366aa", "#dd7722", "#999999"


def draw_analysis(path: Path, tables: Mapping[str, Table], drops: list[float], title: str) -> None:
    """Draw six panels; one that has nothing to show says so."""
    figure = Figure(figsize=(14, 8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, parse_math=False)
    spread, patterns, places, kinds, weights, gradient = figure.subplots(2, 3).flatten()

    spread.set_title("Drops of masked spans")
    if drops:
        spread.hist(drops, bins=min(60, max(10, len(drops) // 10)), color=_BLUE)
        spread.axvline(0, color=_GREY, linewidth=1)
        spread.set_yscale("symlog")
    _bars(patterns, "Pattern enrichment, critical over low spans", tables.get("patterns"), 5, mark=1.0)
    _intervals(places, "Mean drop by place and correctness", [tables.get("thirds"), tables.get("correctness")])
    _bars(kinds, "Mean drop by kind", tables.get("kinds"), 2)
    _bars(weights, "ESS ratio (blue) and top 10 % mass (orange)", tables.get("concentration"), 8, second=9)
    found = tables.get("gradient")
    named = found and Table("", (), [[f"{row[0]}: {row[1]}", *row[2:]] for row in found.rows])
    _bars(gradient, "Share of tokens (blue) and of gradient (orange)", named, 1, second=3)
    for axes in figure.axes:
        axes.title.set_fontsize(10)
        if not axes.has_data():
            axes.text(0.5, 0.5, "nothing to show", ha="center", transform=axes.transAxes, color=_GREY)
            axes.set(xticks=[], yticks=[])
        axes.grid(alpha=0.25, axis="x")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _bars(
    axes: Axes, title: str, table: Table | None, column: int, *, second: int | None = None, mark: float = 0.0
) -> None:
    """Draw horizontal bars of one column of a table by its first one, a second column beside it."""
    axes.set_title(title)
    rows = [row for row in (table.rows if table else []) if row[column] is not None or second is not None]
    if not rows:
        return
    columns = [(column, _BLUE)] if second is None else [(column, _BLUE), (second, _ORANGE)]
    height = 0.8 / len(columns)
    for i, (place, color) in enumerate(columns):
        heights = [y + (i - (len(columns) - 1) / 2) * height for y in range(len(rows))]
        axes.barh(heights, [_number(row[place]) for row in rows], height, color=color)
    axes.axvline(mark, color=_GREY, linewidth=1)
    _name_rows(axes, [str(row[0]) for row in rows])


def _intervals(axes: Axes, title: str, tables: list[Table | None]) -> None:
    """Draw means with their intervals from tables that hold name, count, mean, low and high."""
    axes.set_title(title)
    rows = [row for table in tables if table for row in table.rows]
    if not rows:
        return
    means = [_number(row[2]) for row in rows]
    errors = [[mean - _number(row[3]) for mean, row in zip(means, rows, strict=True)],
              [_number(row[4]) - mean for mean, row in zip(means, rows, strict=True)]]  # fmt: skip
    axes.errorbar(means, range(len(rows)), xerr=[[max(0.0, x) for x in side] for side in errors], fmt="o", color=_BLUE)
    _name_rows(axes, [f"{row[0]} ({row[1]})" for row in rows])


def _name_rows(axes: Axes, names: list[str]) -> None:
    shown = [name if len(name) <= 34 else f"{name[:33]}…" for name in names]
    axes.set_yticks(range(len(names)))
    axes.set_yticklabels(shown, fontsize=8, parse_math=False)
    axes.invert_yaxis()


def _number(cell: Cell) -> float:
    return float(cell) if isinstance(cell, int | float) else 0.0
