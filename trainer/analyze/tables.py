"""Tabulate drops of masked spans by content, place and correctness, and how concentrated weights are.

Drops are positive for spans that matter. The tables follow section 4.3 of "Beyond Uniform Credit", with classes cut at
quantiles, as the paper's cuts have other units, and "Outcome-Grounded Advantage Reshaping". Intervals say how far a
statistic may be off.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import pandas
from scipy import stats

from cfa_kernels.text.arithmetic import ranked_math_intervals

from ..report.runs import Sample

Group = TypeVar("Group")
Numbers = Sequence[float] | np.ndarray
Cell = str | int | float | None

CLASSES = ("critical", "important", "moderate", "low", "no effect", "distractor")
_CUTS = (0.9, 0.6, 0.1)
"""Quantiles of the drops of spans that matter, between the first four classes; near the paper's shares of them."""

_ANNOTATION = re.compile(r"<<[^<>\n]*>>")
_KINDS = {
    "calculation": r"\d\s{0,4}=|=\s{0,4}[$(-]{0,2}\d",
    "step header": r"\A(?:\W*(?:step|part)\s*\d+\b|\s*#{1,6}\s|\s*\d{1,2}[.)](?:\s|\Z))",
    "set-up": r"\b(?:let|denote[sd]?|suppose|define[sd]?|assum(?:e|ing))\b",
    "conclusion": r"\b(?:therefore|thus|hence|so|finally|in conclusion|answer)\b",
    "statement": "",
}


@dataclass(frozen=True)
class Table:
    """Table for JSON and Markdown; `note` says how to read it."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[Cell]]
    note: str = ""


def kind_of(text: str) -> str:
    """Classify the content of a span: the first of "calculation", "step header", ... that fits, else "statement"."""
    text = _ANNOTATION.sub("", text)
    if ranked_math_intervals(text)[0]:
        return "calculation"
    return next(kind for kind, pattern in _KINDS.items() if re.search(pattern, text, re.IGNORECASE))


def classes_of(drops: np.ndarray, noise: float) -> tuple[list[str], list[float]]:
    """Sort drops into classes, and give the three cuts between critical, important, moderate and low.

    Spans matter whose drop is above `noise`; those below `-noise` are distractors, and the rest is rounding.
    """
    matters = drops[drops > noise]
    cuts = np.quantile(matters, _CUTS) if len(matters) else np.full(len(_CUTS), noise)
    classes = (drops[:, None] <= cuts).sum(1)
    classes = np.where(drops < -noise, 5, np.where(drops <= noise, 4, classes))
    return [CLASSES[i] for i in classes], cuts.tolist()


def analyse(samples: Sequence[Sample]) -> dict[str, Table]:
    """Make all tables, by name; those about spans only if a span was masked.

    A drop within 0.001 nats of 0 is no effect. Raises `ValueError` for drops in different units; names them.
    """
    units = sorted({sample["drops_unit"] for sample in samples if sample["spans"]})
    if len(units) > 1:
        raise ValueError(f"samples: drops must be in one unit, got {', '.join(units)}")
    noise = 1e-3 if units == ["nats"] else 0.0
    names = list(dict.fromkeys(name for sample in samples for name in sample["credit"]))
    trained = [
        sample for sample in samples if not sample["truncated"] and sample["advantage"] != 0 and sample["tokens"]
    ]
    spans = _spans(samples, noise)
    tables = {"overview": _overview(samples, len(spans), units, names)}
    if len(spans):
        tables |= {
            "distribution": _distribution(spans.drop_),
            "classes": _classes(spans, noise),
            "thirds": _means("Drop by place", "third", spans, ("early", "middle", "late")),
            "correctness": _means("Drop by correctness", "correct", spans, ("correct", "wrong")),
        }
        if (spans.length > 1).any():  # the text of a single token says little of content
            tables["kinds"] = _means("Drops by kind of content, the first that fits", "kind", spans, _KINDS)
    tables["concentration"] = _concentration(trained, names)
    return {name: table for name, table in tables.items() if table.rows}


def _spans(samples: Sequence[Sample], noise: float) -> pandas.DataFrame:
    rows = []
    for i, sample in enumerate(samples):
        reasoning = max(sample["answer"][0] if sample["answer"] else len(sample["tokens"]), 1)
        verdict = {True: "correct", False: "wrong", None: ""}[sample["correct"]]
        for span in sample["spans"]:
            third = ("early", "middle", "late")[min(2, int(1.5 * (span["start"] + span["end"]) / reasoning))]
            rows.append((i, span["end"] - span["start"], span["drop"], third, verdict, kind_of(span["text"])))
    spans = pandas.DataFrame(rows, columns=["sample", "length", "drop_", "third", "correct", "kind"])
    return spans.assign(group=classes_of(spans.drop_.to_numpy(float), noise)[0])


def _overview(samples: Sequence[Sample], spans: int, units: list[str], names: list[str]) -> Table:
    verdicts = [sample["correct"] for sample in samples if sample["correct"] is not None]
    rows: list[list[Cell]] = [
        ["completions", len(samples)],
        ["tokens", sum(len(sample["tokens"]) for sample in samples)],
        ["completions with an answer", sum(sample["answer"] is not None for sample in samples)],
        ["completions known to be right or wrong", len(verdicts)],
        ["correct", sum(verdicts)],
        ["completions with masked spans", sum(bool(sample["spans"]) for sample in samples)],
        ["masked spans", spans],
        ["unit of drops", units[0] if units else None],
        ["estimators", ", ".join(names) or None],
    ]
    return Table("Overview", ("", "value"), rows)


def _distribution(drops: pandas.Series) -> Table:
    rows: list[list[Cell]] = [["mean", float(drops.mean())], ["standard deviation", float(drops.std(ddof=0))]]
    if rows[1][1]:
        rows += [["skewness", float(stats.skew(drops))], ["excess kurtosis", float(stats.kurtosis(drops))]]
    levels = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
    rows += [[f"quantile {level:g}", float(value)] for level, value in drops.quantile(levels).items()]
    return Table("Drops of masked spans", ("", "value"), rows, "Positive: masking the span hurts the answer.")


def _classes(spans: pandas.DataFrame, noise: float) -> Table:
    edges = [*(f"{cut:.4g}" for cut in classes_of(spans.drop_.to_numpy(), noise)[1]), f"{noise:g}"]
    ranges = [f"above {edges[0]}", *(f"({low}, {high}]" for high, low in itertools.pairwise(edges))]
    ranges += [f"[{0 - noise:g}, {noise:g}]", f"below {0 - noise:g}"]
    counts = spans.group.value_counts().reindex(CLASSES, fill_value=0).tolist()
    rows = [[*row, row[-1] / len(spans)] for row in zip(CLASSES, ranges, counts, strict=True)]
    note = (
        f"Cut at the 0.9, 0.6 and 0.1 quantiles of the drops above {noise:g}. Masking a distractor helps the "
        f"answer; within {noise:g} of 0 is no effect."
    )
    return Table("Classes of drops", ("class", "drop", "spans", "share"), rows, note)


def _means(title: str, column: str, spans: pandas.DataFrame, names: Iterable[str]) -> Table:
    rows: list[list[Cell]] = []
    for name, inside in ((name, spans[spans[column] == name]) for name in names):
        if len(inside):
            groups = [drops.tolist() for _, drops in inside.groupby("sample").drop_]
            interval = bootstrap_interval(lambda drawn: sum(map(sum, drawn)) / sum(map(len, drawn)), groups, draws=200)
            shares = [float((inside.group == group).mean()) for group in ("critical", "distractor")]
            rows.append([name, len(inside), *interval, float(inside.drop_.median()), *shares])
    columns = (column, "spans", "mean drop", "low", "high", "median drop", "critical", "distractors")
    return Table(title, columns, rows, "Low and high bound the mean: 95 %, bootstrap over completions.")


def _concentration(trained: Sequence[Sample], names: Sequence[str]) -> Table:
    rows: list[list[Cell]] = []
    for name in names:
        credits = [sample["credit"][name] for sample in trained if name in sample["credit"]]
        completions = [np.array([value for value in credit["values"] if value is not None]) for credit in credits]
        completions = [values for values in completions if values.any()]
        if not completions:
            continue
        tokens = np.concatenate(completions)
        low, high = float(tokens.min()), float(tokens.max())
        ends = [cell for end in (low, high) for cell in (end, float(np.isclose(tokens, end).mean()))]
        ess = float(np.mean([ess_ratio(values) for values in completions])) if low >= 0 else None
        mass = float(np.mean([top_mass(values) for values in completions]))
        rows.append([name, credits[0]["kind"], len(completions), float(tokens.mean()), *ends, ess, mass])
    columns = (
        "estimator", "of tokens", "completions", "mean", "smallest", "share at smallest", "largest", "share at largest",
        "ESS ratio", "top 10 % mass",
    )  # fmt: skip
    note = (
        "Completions that train: not truncated, advantage not 0. ESS ratio and top mass are taken per completion, then "
        "averaged; 1 and 0.1 for equal weights. Signed values have no ESS ratio."
    )
    return Table("Concentration", columns, rows, note)


class Estimate(NamedTuple):
    """Statistic and its bootstrap interval `[low, high]`."""

    value: float
    low: float
    high: float


def ess_ratio(weights: Numbers) -> float:
    """Compute the effective sample size of T weights over T, `(sum w)^2 / (T sum w^2)`: 1 for equal weights.

    No weight may be negative, nor all of them 0. Source: "Outcome-Grounded Advantage Reshaping".
    """
    w = np.asarray(weights, float) / max(weights)  # squares of very small weights would leave the range of a double
    return float(w.sum() ** 2 / (len(w) * (w**2).sum()))


def top_mass(values: Numbers, share: float = 0.1) -> float:
    """Compute the share of `sum |x|`, not 0, that the largest `|x|` hold: a top `share` of the values, at least one.

    Source: "Outcome-Grounded Advantage Reshaping".
    """
    sizes = np.sort(np.abs(np.asarray(values, float)))[::-1]
    return float(sizes[: max(1, math.floor(share * len(sizes) + 1e-9))].sum() / sizes.sum())  # 0.29 * 100 is below 29


def bootstrap_interval(
    statistic: Callable[[list[Group]], float], groups: Sequence[Group], *, draws: int = 1000
) -> Estimate:
    """Measure a statistic of independent groups with its 95 % percentile bootstrap interval (Efron, 1979).

    Whole groups are drawn with replacement: values that depend on each other, such as the tokens of one completion,
    belong to one group. Raises `ValueError` if the statistic is not finite on every resample.
    """
    value = float(statistic(list(groups)))
    if len(groups) == 1:  # every resample is the group itself
        return Estimate(value, value, value)
    result = stats.bootstrap(
        (np.arange(len(groups)),), lambda chosen: float(statistic([groups[i] for i in chosen])), n_resamples=draws,
        vectorized=False, method="percentile", rng=np.random.default_rng(0),
    )  # fmt: skip
    if not np.isfinite([value, *result.bootstrap_distribution]).all():
        raise ValueError("statistic must be finite for the groups and for every draw of them")
    return Estimate(value, float(result.confidence_interval.low), float(result.confidence_interval.high))
