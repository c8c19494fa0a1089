r"""Tabulate drops of masked spans by content, place, length and correctness, and where weight gathers.

Drops are negative for spans that
matter, and in nats unless the file names another unit. The tables follow section 4.3 of "Beyond Uniform Credit" (its
Tables 4 to 6), with classes cut at quantiles, because the paper's cuts are in units of its own, and the metrics of
"Outcome-Grounded Advantage Reshaping".
"""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cfa_kernels.text.arithmetic import ranked_math_intervals
from trainer.analyze.samples import MaskedSpan, Sample, TokenCredit
from trainer.analyze.statistics import bootstrap_interval, ess_ratio, spearman, top_mass

Cell = str | int | float | None

CLASSES = ("critical", "important", "moderate", "low", "no effect", "distractor")
_CUTS = (0.1, 0.4, 0.9)
"""Quantiles of the drops of spans that matter, between the first four classes; near the paper's shares of them."""

_ANNOTATION = re.compile(r"<<[^<>\n]*>>")
_EQUALS = re.compile(r"\d\s{0,4}=|=\s{0,4}[$(-]{0,2}\d")
_HEADER = re.compile(r"\A(?:\W*(?:step|part)\s*\d+\b|\s*#{1,6}\s|\s*\d{1,2}[.)](?:\s|\Z))", re.IGNORECASE)
_SETUP = re.compile(r"\b(?:let|denote[sd]?|suppose|define[sd]?|assum(?:e|ing))\b", re.IGNORECASE)
_CONCLUSION = re.compile(r"\b(?:therefore|thus|hence|so|finally|in conclusion|answer)\b", re.IGNORECASE)
PATTERNS: dict[str, re.Pattern[str]] = {
    "calculation chain (= ... =)": re.compile(r"=\s{0,4}[^=\s][^=\n]{0,200}="),
    "multiplication or division": re.compile(
        r"[\d)]\s?[*×÷/·]\s?[$(]?\d|\\(?:times|cdot|div|frac)\b|\b(?:times|twice|double[sd]?|multipl\w+|divid\w+)\b",
        re.IGNORECASE,
    ),
    "proportion or rate": re.compile(
        r"%|\b(?:per|each|every|ratio|rate|percent\w*|half|third|quarter|fraction|average)\b", re.IGNORECASE
    ),
    "total or sum": re.compile(r"[\d)]\s?\+\s?[$(]?\d|\b(?:totals?|sum|altogether|combined|in all)\b", re.IGNORECASE),
    "difference or rest": re.compile(
        r"[\d)]\s?[-−–]\s?[$(]?\d|\b(?:left|remain\w*|minus|difference|fewer|less)\b", re.IGNORECASE
    ),
    "conclusion (therefore ...)": _CONCLUSION,
    "equation set-up (let ...)": _SETUP,
    "step header (Step 1 ...)": _HEADER,
}
"""What is looked for in a span's text, at its start for a header; calculator annotations are left out of it."""


@dataclass(frozen=True)
class Table:
    """Table for JSON and Markdown; `note` says how to read it."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[Cell]]
    note: str = ""


def kind_of(text: str) -> str:
    """Say what a span is: "calculation", "step header", "set-up", "conclusion" or "statement", the first that fits."""
    text = _ANNOTATION.sub("", text)
    for kind, found in (
        ("calculation", bool(ranked_math_intervals(text)[0]) or bool(_EQUALS.search(text))),
        ("step header", bool(_HEADER.search(text))),
        ("set-up", bool(_SETUP.search(text))),
        ("conclusion", bool(_CONCLUSION.search(text))),
    ):
        if found:
            return kind
    return "statement"


def patterns_of(text: str) -> set[str]:
    """List which of `PATTERNS` a span's text shows."""
    text = _ANNOTATION.sub("", text)
    return {name for name, pattern in PATTERNS.items() if pattern.search(text)}


def classes_of(drops: np.ndarray, noise: float) -> tuple[list[str], list[float]]:
    """Sort drops into classes, and give the three cuts between critical, important, moderate and low.

    Spans matter whose drop is below `-noise`; those above `noise` are distractors, and the rest is rounding.
    """
    matters = drops[drops < -noise]
    cuts = [float(cut) for cut in np.quantile(matters, _CUTS)] if len(matters) else [-noise] * len(_CUTS)
    names = [CLASSES[int(np.searchsorted(cuts, drop, side="right"))] for drop in drops]
    for i, drop in enumerate(drops):
        if drop >= -noise:
            names[i] = "distractor" if drop > noise else "no effect"
    return names, cuts


@dataclass(frozen=True)
class _Masked:
    """Masked span with the properties that tables use."""

    sample: int
    span: MaskedSpan
    third: str
    correct: bool | None
    kind: str
    group: str


def analyse(samples: Sequence[Sample], *, noise: float | None = None) -> dict[str, Table]:
    """Make all tables, by name; those about spans only where a span was masked.

    Args:
        samples: at least one.
        noise: in the unit of the drops; one no larger than this, up or down, counts as no effect. None is 0.001 for
            nats, and 0 for other units.

    Raises:
        ValueError: no sample, or drops in different units; names them.
    """
    if not samples:
        raise ValueError("samples: is empty")
    units = sorted({sample.drops_unit for sample in samples if sample.spans})
    if len(units) > 1:
        raise ValueError(f"samples: drops must be in one unit, got {', '.join(units)}")
    if noise is None:
        noise = 1e-3 if units == ["nats"] else 0.0
    spans = _masked(samples, noise)
    tables = {"overview": _overview(samples, spans)}
    if spans:
        tables |= {
            "distribution": _distribution(spans),
            "classes": _classes(spans, noise),
            "thirds": _means("Drop by place", "third", spans, lambda item: item.third, ("early", "middle", "late")),
            "correctness": _correctness(spans),
            "distractors": _distractors(spans),
        }
        if any(item.span.end - item.span.start > 1 for item in spans):  # a lone token says little of content
            tables |= {"kinds": _kinds(spans), "patterns": _patterns(spans), "length": _length(spans)}
            tables["example"] = _example(samples)
    if any(sample.credit for sample in samples):
        tables["concentration"] = _concentration(samples)
        tables |= _gradient(samples)
        tables |= _agreement(samples)
    return tables


def _masked(samples: Sequence[Sample], noise: float) -> list[_Masked]:
    found = [(i, sample, span) for i, sample in enumerate(samples) for span in sample.spans]
    groups = classes_of(np.array([span.drop for _, _, span in found]), noise)[0] if found else []
    items = []
    for (i, sample, span), group in zip(found, groups, strict=True):
        reasoning = sample.answer[0] if sample.answer else len(sample.tokens)
        place = (span.start + span.end) / 2 / max(reasoning, 1)
        third = ("early", "middle", "late")[min(2, int(3 * place))]
        items.append(_Masked(i, span, third, sample.correct, kind_of(span.text), group))
    return items


def _overview(samples: Sequence[Sample], spans: list[_Masked]) -> Table:
    judged = [sample.correct for sample in samples if sample.correct is not None]
    rows: list[list[Cell]] = [
        ["completions", len(samples)],
        ["tokens", sum(len(sample.tokens) for sample in samples)],
        ["completions with an answer", sum(sample.answer is not None for sample in samples)],
        ["completions known to be right or wrong", len(judged)],
        ["correct", sum(judged)],
        ["completions with masked spans", len({item.sample for item in spans})],
        ["masked spans", len(spans)],
        ["unit of drops", next((sample.drops_unit for sample in samples if sample.spans), None)],
        ["estimators", ", ".join(dict.fromkeys(name for sample in samples for name in sample.credit)) or None],
    ]
    return Table("What was read", ("", "value"), rows)


def _distribution(spans: list[_Masked]) -> Table:
    drops = _drops(spans)
    centred = drops - drops.mean()
    deviation = drops.std()
    moments = [float((centred**power).mean() / deviation**power) if deviation else None for power in (3, 4)]
    rows: list[list[Cell]] = [
        ["mean", float(drops.mean())],
        ["standard deviation", float(deviation)],
        ["skewness", moments[0]],
        ["excess kurtosis", None if moments[1] is None else moments[1] - 3],
    ]
    levels = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
    quantiles = zip(levels, np.quantile(drops, levels), strict=True)
    rows += [[f"quantile {level:g}", float(value)] for level, value in quantiles]
    return Table("Drops of masked spans", ("", "value"), rows, "Negative: masking the span hurts the answer.")


def _classes(spans: list[_Masked], noise: float) -> Table:
    cuts = classes_of(_drops(spans), noise)[1]
    edges = [*(f"{cut:.4g}" for cut in cuts), f"{0 - noise:g}"]
    ranges = [f"below {edges[0]}", *(f"[{low}, {high})" for low, high in itertools.pairwise(edges))]
    ranges += [f"[{0 - noise:g}, {noise:g}]", f"above {noise:g}"]
    rows: list[list[Cell]] = []
    for name, shown in zip(CLASSES, ranges, strict=True):
        count = sum(item.group == name for item in spans)
        rows.append([name, shown, count, count / len(spans)])
    note = (
        f"Cut at the 0.1, 0.4 and 0.9 quantiles of the drops below {0 - noise:g}. Masking a distractor helps the "
        f"answer; within {noise:g} of 0 is no effect."
    )
    return Table("Classes of drops", ("class", "drop", "spans", "share"), rows, note)


def _kinds(spans: list[_Masked]) -> Table:
    rows: list[list[Cell]] = []
    for name in ("calculation", "step header", "set-up", "conclusion", "statement"):
        inside = [item for item in spans if item.kind == name]
        if inside:
            drops = _drops(inside)
            shares = [sum(item.group == group for item in inside) / len(inside) for group in ("critical", "distractor")]
            rows.append([name, len(inside), float(drops.mean()), float(np.median(drops)), *shares])
    columns = ("kind", "spans", "mean drop", "median drop", "critical", "distractors")
    return Table(
        "Drops by kind of content", columns, rows, "Each span is of one kind, the first of the list that fits."
    )


def _patterns(spans: list[_Masked]) -> Table:
    critical = [patterns_of(item.span.text) for item in spans if item.group == "critical"]
    low = [patterns_of(item.span.text) for item in spans if item.group in ("low", "no effect")]
    rows: list[list[Cell]] = []
    for name in PATTERNS:
        counts = [sum(name in found for found in texts) for texts in (critical, low)]
        shares = [count / len(texts) if texts else None for count, texts in zip(counts, (critical, low), strict=True)]
        enrichment = shares[0] / shares[1] if shares[0] is not None and shares[1] else None
        rows.append([name, counts[0], shares[0], counts[1], shares[1], enrichment])
    columns = ("pattern", "critical spans", "of critical", "low spans", "of low", "enrichment")
    note = (
        "Low is low or without effect. Enrichment is the share among critical spans over that among low ones; none "
        "where no low span shows the pattern."
    )
    return Table("Patterns in critical and in low spans", columns, rows, note)


def _means(
    title: str, column: str, spans: list[_Masked], key: Callable[[_Masked], str], names: Iterable[str], note: str = ""
) -> Table:
    """Tabulate mean and median drop by a property of spans, with an interval of the mean over resampled completions."""
    rows: list[list[Cell]] = []
    for name in names:
        inside = [item for item in spans if key(item) == name]
        if not inside:
            continue
        drops = _drops(inside)
        by_sample: dict[int, list[float]] = {}
        for item in inside:
            by_sample.setdefault(item.sample, []).append(item.span.drop)
        interval = bootstrap_interval(_pooled_mean, [*by_sample.values()], draws=200)
        rows.append([name, len(inside), interval.value, interval.low, interval.high, float(np.median(drops))])
    columns = (column, "spans", "mean drop", "low", "high", "median drop")
    return Table(title, columns, rows, note or "Low and high bound the mean: 95 %, bootstrap over completions.")


def _pooled_mean(groups: list[list[float]]) -> float:
    return sum(map(sum, groups)) / sum(map(len, groups))


def _length(spans: list[_Masked]) -> Table:
    lengths, drops = [item.span.end - item.span.start for item in spans], _drops(spans)
    varied = len(set(lengths)) > 1 and len(set(drops.tolist())) > 1
    rows: list[list[Cell]] = [
        ["spans", len(spans)],
        ["mean length (tokens)", float(np.mean(lengths))],
        ["Pearson's r of length and drop", float(np.corrcoef(lengths, drops)[0, 1]) if varied else None],
        ["Spearman's rho of length and drop", spearman(lengths, drops) if varied else None],
    ]
    return Table("Drop and length", ("", "value"), rows, "Negative: longer spans matter more.")


def _correctness(spans: list[_Masked]) -> Table:
    judged = [item for item in spans if item.correct is not None]
    names = ("correct", "wrong")
    return _means("Drop by correctness", "completion", judged, lambda item: names[not item.correct], names)


def _distractors(spans: list[_Masked]) -> Table:
    found = sorted((item for item in spans if item.group == "distractor"), key=lambda item: -item.span.drop)
    judged = [item for item in found if item.correct is not None]
    wrong = sum(not item.correct for item in judged) / len(judged) if judged else None
    everywhere = [item for item in spans if item.correct is not None]
    base = sum(not item.correct for item in everywhere) / len(everywhere) if everywhere else None
    rows: list[list[Cell]] = [
        [item.span.drop, item.kind, {True: "correct", False: "wrong", None: None}[item.correct], item.span.text]
        for item in found[:10]
    ]
    shares = (
        "" if wrong is None or base is None else f" {wrong:.1%} of them stand in wrong completions, {base:.1%} of all."
    )
    note = f"{len(found)} of {len(spans)} spans ({len(found) / len(spans):.1%}); the strongest are shown.{shares}"
    return Table("Distractors", ("drop", "kind", "completion", "text"), rows, note)


def _example(samples: Sequence[Sample]) -> Table:
    """Show the completion with the widest range of drops among those with most spans, correct ones first."""

    def spread(sample: Sample) -> tuple[bool, int, float]:
        drops = [span.drop for span in sample.spans] or [0.0]
        return bool(sample.correct), min(len(sample.spans), 6), max(drops) - min(drops)

    best = max((sample for sample in samples if sample.spans), key=spread)
    rows: list[list[Cell]] = [
        [span.text, span.drop, kind_of(span.text)] for span in sorted(best.spans, key=lambda span: span.start)
    ]
    note = f"Line {best.line} of the file."
    return Table("One completion, span by span", ("span", "drop", "kind"), rows, note)


# --- Where weight gathers ---------------------------------------------------------------------------------------


def trained_samples(samples: Iterable[Sample]) -> list[Sample]:
    """Keep the samples that move the policy: neither truncated nor known to have an advantage of 0."""
    return [sample for sample in samples if not sample.truncated and sample.advantage != 0 and sample.tokens]


def _values(given: TokenCredit) -> np.ndarray:
    return np.array([value for value in given.values if value is not None])


def _concentration(samples: Sequence[Sample]) -> Table:
    rows: list[list[Cell]] = []
    trained = trained_samples(samples)
    for name in dict.fromkeys(name for sample in samples for name in sample.credit):
        given = [sample.credit[name] for sample in trained if name in sample.credit]
        found = [values for values in map(_values, given) if values.any()]
        if not found:
            continue
        tokens = np.concatenate(found)
        low, high = tokens.min(), tokens.max()
        ess = np.mean([ess_ratio(values) for values in found]) if low >= 0 else None
        at_ends = [float(np.isclose(tokens, end).mean()) for end in (low, high)]
        mass = float(np.mean([top_mass(values) for values in found]))
        row: list[Cell] = [name, given[0].kind, len(found), float(tokens.mean())]
        rows.append([*row, float(low), at_ends[0], float(high), at_ends[1], None if ess is None else float(ess), mass])
    columns = (
        "estimator", "of tokens", "completions", "mean", "smallest", "share at smallest", "largest", "share at largest",
        "ESS ratio", "top 10 % mass",
    )  # fmt: skip
    note = (
        "Completions that train: not truncated, advantage not 0. ESS ratio and top mass are taken per completion, then "
        "averaged; 1 and 0.1 for equal weights. Signed values have no ESS ratio."
    )
    return Table("Concentration", columns, rows, note)


def _gradient(samples: Sequence[Sample]) -> dict[str, Table]:
    """Tabulate shares of tokens and of gradient by normalised importance; none where no span or no weight is."""
    rows: list[list[Cell]] = []
    for name in dict.fromkeys(name for sample in samples for name in sample.credit):
        mass: dict[str, list[float]] = {level: [0.0, 0.0, 0.0] for level in ("high", "medium", "low", "outside spans")}
        for sample in trained_samples(samples):
            given = sample.credit.get(name)
            if given is None or given.kind != "weights" or not sample.spans:
                continue
            norms = sample.gradient_norms or [1.0] * len(sample.tokens)
            for level, weight, norm in zip(_levels(sample), given.values, norms, strict=True):
                added = (1.0, norm, norm * (weight or 0.0))
                mass[level] = [total + part for total, part in zip(mass[level], added, strict=True)]
        tokens, plain, weighted = (sum(mass[level][i] for level in mass) for i in range(3))
        if not plain or not weighted:
            continue
        for level, (count, before, after) in mass.items():
            shift = (after / weighted) / (before / plain) if before else None
            rows.append([name, level, count / tokens, before / plain, after / weighted, shift])
    columns = ("estimator", "importance", "of tokens", "of gradient, unweighted", "of gradient, weighted", "ratio")
    known = (
        "the file's gradient norms" if any(sample.gradient_norms for sample in samples) else "equal norms of all tokens"
    )
    note = (
        "Importance of a token's span, min-max over its completion: high above 0.8, medium above 0.5. Gradient is the "
        f"sum of weight times norm, by {known}; completions that train and hold masked spans."
    )
    return {"gradient": Table("Gradient by importance", columns, rows, note)} if rows else {}


def _levels(sample: Sample) -> list[str]:
    """Classify the normalised importance of every token; of two spans over a token the larger one counts."""
    importances = [-span.drop for span in sample.spans]
    low, high = min(importances), max(importances)
    share = np.full(len(sample.tokens), -1.0)
    if high > low:
        for span, importance in zip(sample.spans, importances, strict=True):
            inside = share[span.start : span.end]
            np.maximum(inside, (importance - low) / (high - low), out=inside)
    return ["outside spans" if x < 0 else "high" if x > 0.8 else "medium" if x > 0.5 else "low" for x in share]


def _agreement(samples: Sequence[Sample]) -> dict[str, Table]:
    """Tabulate the mean Spearman correlation of every two estimators over tokens that both judge."""
    names = list(dict.fromkeys(name for sample in samples for name in sample.credit))
    rows: list[list[Cell]] = []
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            found = []
            for sample in samples:
                if first in sample.credit and second in sample.credit:
                    a, b = (sample.credit[name].values for name in (first, second))
                    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
                    columns = [[pair[side] for pair in pairs] for side in (0, 1)]
                    if all(len(set(column)) > 1 for column in columns):
                        found.append(spearman(*columns))
            if found:
                rows.append([first, second, len(found), float(np.mean(found))])
    table = Table(
        "Agreement of estimators",
        ("estimator", "and", "completions", "Spearman's rho"),
        rows,
        "Over the tokens of a completion, then averaged over completions in which neither is constant.",
    )
    return {"agreement": table} if rows else {}


def _drops(spans: Iterable[_Masked]) -> np.ndarray:
    return np.array([item.span.drop for item in spans])
