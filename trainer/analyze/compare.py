"""Compare runs in one table: settings that differ, figures, and means over seeds."""

import math
from collections.abc import Sequence
from pathlib import Path

import pandas

from ..report.runs import figures, read_metrics, read_settings, written
from ..settings import CHANGE_NO_RESULT


def comparison(folders: Sequence[Path]) -> pandas.DataFrame:
    """Tabulate runs, a column each, and the means of those that differ in seed and logging only, with their lowest and
    highest accuracy; a row is a setting that differs or a figure.

    Raises `ValueError` or `OSError` that names a folder, settings or a line of metrics that is not a run's.
    """
    names = [folder.resolve().name for folder in folders]
    names = [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]
    runs = pandas.DataFrame([figures(read_metrics(folder)) for folder in folders], index=names)
    settings = pandas.DataFrame([read_settings(folder) for folder in folders], index=names).astype(object)
    settings = settings.where(settings.notna(), "-").map(str).drop(columns="output_dir", errors="ignore")
    if runs.index.has_duplicates:
        raise ValueError(f"{runs.index[runs.index.duplicated()][0]}: is given twice")
    differ = settings.loc[:, settings.nunique() > 1]
    groups = settings.drop(columns=[*CHANGE_NO_RESULT, "seed"], errors="ignore").T.agg("\0".join)
    parts = [pandas.concat([differ, runs.map(written)], axis=1)]
    for _, members in runs.groupby(groups, sort=False) if len(settings.columns) else ():
        if len(members) > 1:
            mean, accuracies = members.mean(), members["held-out accuracy, %"]
            mean["low"], mean["high"] = accuracies.min(), accuracies.max()
            seeds = settings.loc[members.index, "seed"] if "seed" in settings else pandas.Series(["-"])
            name = f"mean of {len(members)} seeds" if seeds.is_unique else "same seed twice"
            shared = differ.loc[members.index].agg(lambda column: ", ".join(dict.fromkeys(column)))
            own = pandas.concat([shared, mean.map(written)])
            parts.append(own.to_frame(name).T)
    return pandas.concat(parts).T


def shown(table: pandas.DataFrame, width: int | None) -> str:
    """Write a table as text of at most so many columns, in blocks side by side where it is wider."""
    return table.to_string(line_width=width, float_format=lambda value: "-" if math.isnan(value) else f"{value:.4g}")
