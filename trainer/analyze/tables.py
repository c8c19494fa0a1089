"""Tabulate drops of masked spans by content, place and correctness, and how concentrated weights are.

Drops are positive for spans that matter. The tables follow section 4.3 of "Beyond Uniform Credit", with classes cut at
quantiles, as the paper's cuts have other units, and "Outcome-Grounded Advantage Reshaping". Intervals say how far a
statistic may be off.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import pandas
from scipy import stats

from cfa_kernels.text.arithmetic import ranked_math_intervals

from ..report.runs import Sample

Group = TypeVar("Group")

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


def analyse(samples: Sequence[Sample]) -> dict[str, pandas.DataFrame]:
    """Make all tables, by title; those about spans only if a span was masked.

    A drop within 0.001 nats of 0 is no effect. Raises `ValueError` for no sample, or for drops in different units.
    """
    if not samples:
        raise ValueError("there is no completion; was log_completions 0, or did the run end in its first step?")
    units = sorted({sample["drops_unit"] for sample in samples if sample["spans"]})
    if len(units) > 1:
        raise ValueError(f"samples: drops must be in one unit, got {', '.join(units)}")
    spans, noise = _spans(samples), 1e-3 if units == ["nats"] else 0.0
    verdicts = [sample["correct"] for sample in samples if sample["correct"] is not None]
    overview = {
        "completions": len(samples),
        "tokens": sum(len(sample["tokens"]) for sample in samples),
        "completions with an answer": sum(sample["answer"] is not None for sample in samples),
        "completions known to be right or wrong": len(verdicts),
        "correct": sum(verdicts),
        "masked spans": len(spans),
    }
    tables = {"Overview": pandas.DataFrame({"value": overview})}
    if len(spans):
        spans["class"], cuts = classes_of(spans["drop"].to_numpy(), noise)
        counts = spans["class"].value_counts().reindex(CLASSES, fill_value=0)
        edges = {"drop above": [*cuts, noise, 0 - noise, -math.inf], "spans": counts, "share": counts / len(spans)}
        levels = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1]
        tables |= {
            f"Drops of masked spans, {units[0]}": spans["drop"].describe(levels).drop(["min", "max"]).to_frame(),
            "Classes of drops, cut at the 0.9, 0.6 and 0.1 quantiles of those that hurt": pandas.DataFrame(edges),
            "Drop by place": _means("third", spans, ("early", "middle", "late")),
            "Drop by correctness": _means("correct", spans, ("correct", "wrong")),
        }
        if (spans["length"] > 1).any():  # the text of a single token says little of content
            tables["Drop by kind of content, the first that fits"] = _means("kind", spans, _KINDS)
    tables["Concentration, over completions that train"] = _concentration(samples)
    return {title: table for title, table in tables.items() if len(table)}


def _spans(samples: Sequence[Sample]) -> pandas.DataFrame:
    rows = []
    for i, sample in enumerate(samples):
        reasoning = max(sample["answer"][0] if sample["answer"] else len(sample["tokens"]), 1)
        verdict = {True: "correct", False: "wrong", None: ""}[sample["correct"]]
        for span in sample["spans"]:
            third = ("early", "middle", "late")[min(2, int(1.5 * (span["start"] + span["end"]) / reasoning))]
            rows.append((i, span["end"] - span["start"], span["drop"], third, verdict, kind_of(span["text"])))
    return pandas.DataFrame(rows, columns=["sample", "length", "drop", "third", "correct", "kind"])


def _means(column: str, spans: pandas.DataFrame, names: Iterable[str]) -> pandas.DataFrame:
    """Mean drops with their 95 % intervals, by bootstrap over completions."""
    rows = {}
    for name, inside in ((name, spans[spans[column] == name]) for name in names):
        if len(inside):
            groups = [drops.tolist() for _, drops in inside.groupby("sample")["drop"]]
            interval = bootstrap_interval(lambda drawn: sum(map(sum, drawn)) / sum(map(len, drawn)), groups, draws=200)
            shares = [float((inside["class"] == one).mean()) for one in ("critical", "distractor")]
            rows[name] = [len(inside), *interval, float(inside["drop"].median()), *shares]
    columns = ["spans", "mean", "low", "high", "median", "critical", "distractors"]
    return pandas.DataFrame.from_dict(rows, orient="index", columns=columns)


def _concentration(samples: Sequence[Sample]) -> pandas.DataFrame:
    """Ranges of the tokens' numbers; ESS ratio and top mass are taken per completion, then averaged."""
    trained = [one for one in samples if not one["truncated"] and one["advantage"] != 0 and one["tokens"]]
    rows = {}
    for name in dict.fromkeys(name for sample in samples for name in sample["credit"]):
        values = [
            [x for x in one["credit"][name]["values"] if x is not None] for one in trained if name in one["credit"]
        ]
        completions = [np.array(own) for own in values if any(own)]
        if completions:
            tokens = np.concatenate(completions)
            ess = np.mean([ess_ratio(own) for own in completions]) if tokens.min() >= 0 else math.nan
            mass = np.mean([top_mass(own) for own in completions])
            rows[name] = [len(completions), tokens.mean(), tokens.min(), tokens.max(), ess, mass]
    columns = ["completions", "mean", "smallest", "largest", "ESS ratio", "top 10 % mass"]
    return pandas.DataFrame.from_dict(rows, orient="index", columns=columns)


class Estimate(NamedTuple):
    """Statistic and its bootstrap interval `[low, high]`."""

    value: float
    low: float
    high: float


def ess_ratio(weights: Sequence[float] | np.ndarray) -> float:
    """Compute the effective sample size of T weights over T, `(sum w)^2 / (T sum w^2)`: 1 for equal weights.

    No weight may be negative, nor all of them 0. Source: "Outcome-Grounded Advantage Reshaping".
    """
    w = np.asarray(weights, float) / max(weights)  # squares of very small weights would leave the range of a double
    return float(w.sum() ** 2 / (len(w) * (w**2).sum()))


def top_mass(values: Sequence[float] | np.ndarray, share: float = 0.1) -> float:
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
