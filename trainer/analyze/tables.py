"""Tabulate runs side by side, drops of masked spans by content, place and correctness, how concentrated weights are.

Drops are positive for spans that matter. The tables follow section 4.3 of "Beyond Uniform Credit", with classes cut at
quantiles, as the paper's cuts have other units, and "Outcome-Grounded Advantage Reshaping".
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas

from cfa_kernels.text.arithmetic import ranked_math_intervals

from ..report.runs import Sample, figures, read_metrics, read_settings, written
from ..settings import CHANGE_NO_RESULT

CLASSES = ("distractor", "no effect", "low", "moderate", "important", "critical")


def comparison(folders: Sequence[Path]) -> pandas.DataFrame:
    """Tabulate what differs in the settings of runs and their figures, a column each, with means over seeds.

    Raises `ValueError` or `OSError` that names a folder, twice given or no run's, or settings or a line of metrics.
    """
    names = [str(folder) for folder in folders]
    runs = pandas.DataFrame([figures(read_metrics(folder)) for folder in folders], index=names)
    for folder in folders:  # settings tell runs apart
        if not (folder / "config.yaml").is_file():
            raise ValueError(f"{folder}: has no config.yaml; name the folder of a run")
        if len(same := [str(other) for other in folders if other.samefile(folder)]) > 1:
            raise ValueError(f"{' and '.join(same)} are one run; name each run once")
    settings = pandas.DataFrame([read_settings(folder) for folder in folders], index=names).astype(object)
    settings = settings.where(settings.notna(), "-").map(str).drop(columns="output_dir", errors="ignore")
    table = pandas.concat([settings.loc[:, settings.nunique() > 1], runs.map(written)], axis=1).T
    groups = settings.drop(columns=[*CHANGE_NO_RESULT, "seed"], errors="ignore").T.agg("\0".join)
    for _, members in runs.groupby(groups, sort=False):
        if len(members) > 1:
            mean, accuracies = members.mean(), members["held-out accuracy, %"]
            mean["low"], mean["high"] = accuracies.min(), accuracies.max()
            table[f"mean of {len(members)} like {members.index[0]}"] = mean.map(written)
    return table.fillna("")


def analyse(samples: Sequence[Sample]) -> dict[str, pandas.DataFrame]:
    """Make all tables, by title; those about spans only if a span was masked.

    A drop within 0.001 nats of 0 is no effect. Raises `ValueError` for no sample, or for drops in different units.
    """
    if not samples:
        raise ValueError("there is no completion; was log_completions 0, or did the run end in its first step?")
    units = sorted({sample["drops_unit"] for sample in samples if sample["spans"]})
    if len(units) > 1:
        raise ValueError(f"samples: drops must be in one unit, got {', '.join(units)}")
    spans, verdicts = _spans(samples), [sample["correct"] for sample in samples if sample["correct"] is not None]
    overview = {
        "completions": len(samples),
        "tokens": sum(len(sample["tokens"]) for sample in samples),
        "completions known to be right or wrong": len(verdicts),
        "correct": sum(verdicts),
        "masked spans": len(spans),
    }
    tables = {"Overview": pandas.DataFrame({"value": overview})}
    if len(spans):
        drops, noise = spans["drop"].to_numpy(), 1e-3 if units == ["nats"] else 0.0
        cuts = np.quantile(drops[drops > noise], [0.1, 0.6, 0.9]) if (drops > noise).any() else [noise] * 3
        edges = [np.nextafter(-noise, -1), noise, *cuts]
        spans["class"] = np.array(CLASSES)[np.searchsorted(edges, drops)]
        counts = spans["class"].value_counts().reindex(CLASSES, fill_value=0)
        classes = {"drop above": [-math.inf, *edges], "spans": counts, "share": counts / len(spans)}
        tables |= {
            f"Drops of masked spans, {units[0]}": spans["drop"].describe([0.05, 0.25, 0.5, 0.75, 0.95]).to_frame(),
            "Classes of drops, cut at the 0.9, 0.6 and 0.1 quantiles of those that hurt": pandas.DataFrame(classes),
            "Drop by place": _means(spans, "third"),
            "Drop by correctness": _means(spans, "correct"),
        }
        if (spans["length"] > 1).any():  # the text of a single token says little of content
            tables["Drop by kind of content"] = _means(spans, "kind")
    tables["Concentration, over completions that train"] = _concentration(samples)
    return {title: table for title, table in tables.items() if len(table)}


def _spans(samples: Sequence[Sample]) -> pandas.DataFrame:
    rows = []
    for i, sample in enumerate(samples):
        reasoning = max(sample["answer"][0] if sample["answer"] else len(sample["tokens"]), 1)
        verdict = {True: "correct", False: "wrong", None: None}[sample["correct"]]
        for span in sample["spans"]:
            third = ("early", "middle", "late")[min(2, int(1.5 * (span["start"] + span["end"]) / reasoning))]
            kind = "calculation" if ranked_math_intervals(span["text"])[0] else "statement"
            rows.append((i, span["end"] - span["start"], span["drop"], third, verdict, kind))
    return pandas.DataFrame(rows, columns=["sample", "length", "drop", "third", "correct", "kind"])


def _means(spans: pandas.DataFrame, column: str) -> pandas.DataFrame:
    """Mean drops by the values of a column, with 95 % intervals whose unit is the completion."""
    rows = {}
    for name, inside in spans.groupby(column, sort=False):
        mean, count = inside["drop"].mean(), len(inside)
        off = 1.96 * math.sqrt((inside["drop"] - mean).groupby(inside["sample"]).sum().pow(2).sum()) / count
        rows[name] = [count, mean, mean - off, mean + off, (inside["class"] == "critical").mean()]
    return pandas.DataFrame.from_dict(rows, orient="index", columns=["spans", "mean", "low", "high", "critical"])


def _concentration(samples: Sequence[Sample]) -> pandas.DataFrame:
    """Ranges of the tokens' numbers; the ESS ratio `(sum w)^2 / (T sum w^2)` and the share of `sum |w|` that the
    largest tenth hold are taken per completion, then averaged.
    """
    numbers: dict[str, list[pandas.Series]] = {}
    for sample in samples:
        for name, one in sample["credit"].items():
            values = pandas.Series(one["values"], dtype=float).dropna()
            if not sample["truncated"] and sample["advantage"] != 0 and values.any():
                numbers.setdefault(name, []).append(values)
    rows = {}
    for name, completions in numbers.items():
        tokens, sizes = pandas.concat(completions), [row.abs() / row.abs().max() for row in completions]
        ess = np.mean([w.sum() ** 2 / (len(w) * (w**2).sum()) for w in sizes]) if tokens.min() >= 0 else math.nan
        mass = np.mean([w.nlargest(max(1, len(w) // 10)).sum() / w.sum() for w in sizes])
        rows[name] = [len(completions), tokens.mean(), tokens.min(), tokens.max(), ess, mass]
    columns = ["completions", "mean", "smallest", "largest", "ESS ratio", "top 10 % mass"]
    return pandas.DataFrame.from_dict(rows, orient="index", columns=columns)
