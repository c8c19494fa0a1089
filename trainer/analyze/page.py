"""Write one page of HTML on which completions are shaded by the credit of their tokens, estimators side by side.

The page is self-contained: the style and the few lines of script of `assets/` are copied into it, and it forbids itself
to load anything. Every text is escaped, and characters that do not print are shown as signs.
"""

import html
from collections.abc import Sequence
from pathlib import Path

from trainer.analyze.samples import KINDS, Sample
from trainer.analyze.statistics import ess_ratio, top_mass

_STEPS = 8
"""Shades above and below the neutral value."""

_STYLE, _SCRIPT = (
    Path(__file__).with_name("assets").joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
)


def page_of(samples: Sequence[Sample], title: str) -> str:
    """Make the page: a block of tokens per completion and estimator, with scales, numbers and the completion's spans.

    Blocks are side by side where the window is wide enough, else below each other. A token's number shows on
    hover, or with the arrow keys once its block has the focus, for all estimators at once.

    Args:
        samples: what is shown, in order.
        title: of the page.

    Returns:
        The page, to be written as UTF-8.
    """
    rules = "".join(
        f".{name}{step} {{ background: rgb(var(--{colour}) / {0.62 * step / _STEPS:.3f}); }}\n"
        for name, colour in (("w", "warm"), ("c", "cool"))
        for step in range(1, _STEPS + 1)
    )
    weights = [
        value
        for sample in samples
        for given in sample.credit.values()
        if given.kind == "weights"
        for value in given.values
        if value is not None
    ]
    bounds = min(weights, default=1.0), max(weights, default=1.0)
    articles = "".join(_article(number, sample, bounds) for number, sample in enumerate(samples, start=1))
    name = _escaped(title)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title>
<style>
{_STYLE}{rules}</style>
</head>
<body>
<h1>{name}</h1>
<p class="soft">Each token is shaded by what an estimator gives it: orange above, blue below the neutral value.
The answer is underlined. Hover over a token, or step through a block with the arrow keys, to read its numbers.</p>
<main>
{articles}</main>
<div id="reading" role="status" aria-live="polite">No token chosen.</div>
<script>
{_SCRIPT}</script>
</body>
</html>
"""


def _article(number: int, sample: Sample, bounds: tuple[float, float]) -> str:
    facts = [
        f"step {sample.step}" if sample.step is not None else "",
        f"problem {sample.problem}" if sample.problem is not None else "",
        f"reward {sample.reward:g}" if sample.reward is not None else "",
        f"advantage {sample.advantage:+.3g}" if sample.advantage is not None else "",
        {True: "correct", False: "wrong", None: ""}[sample.correct],
        "truncated" if sample.truncated else "",
    ]
    columns: list[tuple[str, str, list[float | None]]] = [
        (name, given.kind, given.values) for name, given in sample.credit.items()
    ]
    if sample.spans:
        importances: list[float | None] = [None] * len(sample.tokens)
        for span in sample.spans:
            for place in range(span.start, span.end):
                before = importances[place]
                importances[place] = -span.drop if before is None else max(before, -span.drop)
        columns.append(("importance of the span", sample.drops_unit, importances))
    if not columns:
        columns = [("tokens", "without credit", [None] * len(sample.tokens))]
    figures = "".join(_figure(sample, *column, bounds) for column in columns)
    return (
        f'<article aria-labelledby="c{number}">\n<h2 id="c{number}">Completion {number}</h2>\n'
        f'<p class="soft">{_escaped(" · ".join(fact for fact in facts if fact))}</p>\n'
        f'<div class="row">\n{figures}</div>\n{_span_table(sample)}</article>\n'
    )


def _figure(sample: Sample, name: str, kind: str, values: list[float | None], bounds: tuple[float, float]) -> str:
    known = [value for value in values if value is not None]
    neutral = 1.0 if kind == "weights" else 0.0
    low, high = bounds if kind == "weights" else (min(known, default=0.0), max(known, default=0.0))
    low, high = min(low, neutral), max(high, neutral)
    # Weights range on either side of 1; other numbers are as strong below 0 as above, so rounding stays pale.
    ranges = (neutral - low, high - neutral) if kind == "weights" else (max(-low, high),) * 2
    notes = [kind]
    if kind == "weights" and any(known):
        notes.append(f"ESS ratio {ess_ratio(known):.3f}")
    if kind in KINDS and any(known):
        notes.append(f"top 10 % mass {top_mass(known):.3f}")
    first, last = sample.answer or (0, 0)
    tokens = "".join(
        _token(text, value, _shade(value, neutral, ranges), first <= place < last)
        for place, (text, value) in enumerate(zip(sample.tokens, values, strict=True))
    )
    label = _escaped(name)
    return (
        f"<figure><figcaption><strong><bdi>{label}</bdi></strong> <small>{_escaped(', '.join(notes))}</small>"
        f'{_scale(low, neutral, high, ranges)}</figcaption>\n<div class="tokens" tabindex="0" role="group" '
        f'aria-label="{label}">{tokens}</div></figure>\n'
    )


def _scale(low: float, neutral: float, high: float, ranges: tuple[float, float]) -> str:
    """Make the scale of shades from the lowest to the highest value, in steps of two, with the numbers at both ends."""
    down, up = (_step(value, neutral, ranges) for value in (low, high))
    below = "".join(f'<i class="c{step}"></i>' for step in range(down, 0, -2))
    above = "".join(f'<i class="w{step}"></i>' for step in range(2 - up % 2, up + 1, 2))
    ends = [f"{value:.3g} " if value != neutral else "" for value in (low, high)]
    return f'<span class="scale">{ends[0]}{below}<i></i>{neutral:g}<i></i>{above} {ends[1]}</span>'


def _step(value: float, neutral: float, ranges: tuple[float, float]) -> int:
    extent = ranges[value > neutral]
    return round(_STEPS * abs(value - neutral) / extent) if extent > 0 else 0


def _shade(value: float | None, neutral: float, ranges: tuple[float, float]) -> str:
    """Return the class of a token: w1 to w8 above the neutral value, c1 to c8 below it."""
    if value is None:
        return "none"
    step = _step(value, neutral, ranges)
    return f"{'w' if value > neutral else 'c'}{step}" if step else ""


def _token(text: str, value: float | None, shade: str, in_answer: bool) -> str:
    classes = " ".join(name for name in (shade, "answer" if in_answer else "") if name)
    number = "none" if value is None else f"{value:.4g}"
    return f'<span title="{number}"{f" class={chr(34)}{classes}{chr(34)}" if classes else ""}>{_shown(text)}</span>'


def _span_table(sample: Sample) -> str:
    if not sample.spans:
        return ""
    rows = "".join(
        f'<tr><td class="number">{span.start}–{span.end - 1}</td><td class="number">{span.drop:+.3f}</td>'
        f"<td>{_escaped(span.text)}</td></tr>\n"
        for span in sample.spans
    )
    return (
        f"<details><summary>{len(sample.spans)} masked spans</summary><div class='wide'><table>\n<tr><th>tokens</th>"
        f"<th>drop ({_escaped(sample.drops_unit)})</th><th>text</th></tr>\n{rows}</table></div></details>\n"
    )


_SIGNS = {code: chr(0x2400 + code) for code in range(32) if code not in (9, 10)} | {
    0x7F: "\u2421", 0x85: "\u2424", 0x2028: "\u2424", 0x2029: "\u2424",
}  # fmt: skip
# Marks that turn the direction of what follows them are named; isolated right-to-left text itself is not changed.
_SIGNS |= {code: f"[U+{code:04X}]" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F)}
_SIGNS |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
_SIGNS |= {code: "\ufffd" for code in range(0x80, 0xA0) if code != 0x85}


def _escaped(text: str) -> str:
    return html.escape(text.translate(_SIGNS), quote=True)


def _shown(text: str) -> str:
    """Return a token's text, with signs before line ends and tabs."""
    if not text:
        return '<b class="sign">∅</b>'
    shown = _escaped(text)
    for blank, sign in (("\t", "→"), ("\n", "↵")):
        shown = shown.replace(blank, f'<b class="sign">{sign}</b>{blank}')
    return shown
