"""The tables of section 4.3 of "Beyond Uniform Credit" on a model's own completions, beside the paper's figures."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.harness.results import interval, table
from trainer.analyze.tables import bootstrap_interval

PAPER_MEAN = (2353 * 221 + 11384 * 235) / 13737
"""Mean importance in the paper, in its own unit; its cuts are multiples of it here."""
CUTS = {"critical": 500 / PAPER_MEAN, "important": 200 / PAPER_MEAN, "moderate": 50 / PAPER_MEAN, "low": 0.0}
TIERS = *CUTS, "no effect", "distractors"
PATTERNS = {
    "calculation chain": r"=[^=\n]+=",
    "multiply or divide": r"[×*÷]|(?<=\d)\s?/\s?(?=\d)|\\(?:times|cdot|div|frac)\b",
    "proportion or rate": r"(?i)\b(?:per|each|every|half|twice|thirds?|quarters?|percent|rate|ratio|times as)\b|%",
    "total or sum": r"(?i)\b(?:total|sum|altogether|combined|in all)\b",
    "conclusion": r"(?i)\b(?:therefore|thus|hence|so)\b",
    "set-up": r"(?i)\b(?:let|denote|represents?|suppose|assume)\b",
    "step header": r"(?i)\A\W*(?:step\s*\d|\d{1,2}[.):](?!\d))",
}
PAPER = {
    "skewness": -2.19, "kurtosis": 7.73, "critical": 0.109, "important": 0.304, "moderate": 0.454, "low": 0.098,
    "no effect": None, "distractors": 0.035, "of them in wrong completions": 0.761, "calculation chain": 11.2,
    "multiply or divide": 6.5, "proportion or rate": 3.9, "total or sum": 2.9, "conclusion": 2.4, "set-up": 0.37,
    "step header": 0.62, "early": 201 / PAPER_MEAN, "middle": 270 / PAPER_MEAN, "late": 233 / PAPER_MEAN,
    "right": 221 / PAPER_MEAN, "wrong": 235 / PAPER_MEAN, "length": -0.56, "largest weight": 0.218,
    "smallest weight": 0.012, "high": 0.263, "their gradient": 0.425, "low importance": 0.539, "and theirs": 0.322,
}  # fmt: skip
"""The paper's figures by the names of ours."""


def tabulated(credits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up completions with their credit.

    Args:
        credits: of each completion with an answer whether it is `right`, its `spans` as (start, end) with `texts`, the
            `drop` of each, positive where the span matters, the `weights` of all tokens, the `end` of its reasoning.
    """
    rows = [
        (drop, end - start, min(2, int(1.5 * (start + end) / max(one["end"], 1))), one["right"], text, i)
        for i, one in enumerate(credits)
        for (start, end), text, drop in zip(one["spans"], one["texts"], one["drop"], strict=True)
    ]
    drop, length, third, right, texts, completion = (np.array(column) for column in zip(*rows, strict=True))
    scaled, edges = drop / drop.mean(), [*CUTS.values(), -1e-9]
    tier = (scaled[:, None] <= edges).sum(1)  # into `TIERS`
    figures: dict[str, Any] = {"skewness": stats.skew(-drop), "kurtosis": stats.kurtosis(-drop)}
    figures |= {name: (tier == k).mean() for k, name in enumerate(TIERS)}
    figures["of them in wrong completions"] = (~right[tier == 5]).mean() if (tier == 5).any() else None
    for name, pattern in PATTERNS.items():
        found = np.array([bool(re.search(pattern, text)) for text in texts])
        critical, low = found[tier == 0], found[(tier == 3) | (tier == 4)]
        figures[name] = critical.mean() / low.mean() if len(critical) and low.any() else None
    parts = {"early": third == 0, "middle": third == 1, "late": third == 2, "right": right, "wrong": ~right}
    for name, inside in parts.items():
        groups = [scaled[inside & (completion == i)] for i in np.unique(completion[inside])]
        mean = bootstrap_interval(lambda some: np.concatenate(some).mean(), groups, draws=200) if groups else None
        figures[name] = mean and mean._asdict()
    figures["length"] = stats.pearsonr(length, -drop).statistic
    weights, level = (
        np.concatenate(column) for column in zip(*((c["weights"], _levels(c)) for c in credits), strict=True)
    )
    figures |= {"largest weight": np.isclose(weights, 4.0).mean(), "smallest weight": np.isclose(weights, 0.5).mean()}
    for inside, tokens, gradient in (
        (level > 0.8, "high", "their gradient"), (level <= 0.5, "low importance", "and theirs"),
    ):  # fmt: skip
        figures |= {tokens: inside.mean(), gradient: weights[inside].sum() / weights.sum()}
    figures = {name: float(one) if isinstance(one, np.floating) else one for name, one in figures.items()}
    counts = {"completions": len(credits), "spans": len(drop), "right": sum(one["right"] for one in credits)}
    return counts | {"mean": float(drop.mean()), "median": float(np.median(drop)), "figures": figures}


def _levels(one: Mapping[str, Any]) -> np.ndarray:
    """Importance of each token's span, from 0 to 1 in its completion; nan outside spans."""
    drop, level = np.array(one["drop"]), np.full(len(one["weights"]), np.nan)
    for (start, end), value in zip(one["spans"], (drop - drop.min()) / max(np.ptp(drop), 1e-9), strict=True):
        level[start:end] = value
    return level


def markdown(result: Mapping[str, Any]) -> str:
    """The table of `tabulated`."""
    note = (
        f"# Section 4.3 of Beyond Uniform Credit\n\n{result['spans']} spans of {result['completions']} completions, "
        f"{result['right']} of them right; mean drop {result['mean']:.3f} nats, median {result['median']:.3f}. The "
        "paper does not explain its unit, so its cuts are multiples of the mean drop here. A drop within rounding is "
        "no effect. Patterns: how much more frequent in critical spans than in low ones. Thirds, right "
        "and wrong: mean drop over the mean of all. Weights and importance: shares of the tokens, and of the weights.\n"
    )
    rows = [
        [
            name,
            *("–" if x is None else interval(x) if isinstance(x, dict) else f"{x:.3g}" for x in (figure, PAPER[name])),
        ]
        for name, figure in result["figures"].items()
    ]
    return "\n".join([note, table(["", "here", "paper"], rows)])
