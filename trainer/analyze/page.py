"""Write one page of HTML: completions shaded by the credit of their tokens, estimators side by side, and runs' curves.

The page is self-contained: the style and the scripts of `assets/` are copied into it, and it forbids itself to load
anything. Its data stand in it as JSON, of which the scripts make the rows that are looked at. Characters that do
not print are shown as signs.
"""

import html
import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.analyze.samples import KINDS, Sample, TokenCredit
from trainer.analyze.statistics import ess_ratio, top_mass

_STEPS = 8
"""Shades above and below the neutral value."""

_STYLE, _SCRIPT, _CURVES = (
    Path(__file__).with_name("assets").joinpath(name).read_text(encoding="utf-8")
    for name in ("page.css", "page.js", "curves.js")
)


def page_of(samples: Iterable[Sample], title: str) -> str:
    """Make the page of samples in order, as `page_pieces`."""
    return "".join(page_pieces(samples, title))


def page_pieces(
    samples: Iterable[Sample], title: str, *, latest_first: bool = False, runs: str = "",
    data: Mapping[str, Any] | None = None,
) -> Iterator[str]:  # fmt: skip
    """Make the page: for each completion a block of tokens per estimator, with scales, numbers and its masked spans.

    It comes in pieces, since a process that goes on keeps some of the memory that it once needed.

    Ten completions are on the page at once, found by run, step and reward. Blocks are side by side where the window is
    wide enough, else below each other. A token's numbers and the drop of its span show on hover, or with the arrow
    keys once its block has the focus, for all estimators at once.

    Args:
        samples: what is shown, in order; taken one at a time, and only what the page says of each is kept.
        latest_first: show those of the last step first.
        title: of the page.
        runs: HTML of a part about runs, above the completions, with the places that `curves.js` draws in.
        data: what `curves.js` draws.

    Yields:
        Pieces of the page, to be written as UTF-8.
    """
    rules = "".join(
        f".{name}{step} {{ background: rgb(var(--{colour}) / {0.62 * step / _STEPS:.3f}); }}\n"
        for name, colour in (("w", "warm"), ("c", "cool"))
        for step in range(1, _STEPS + 1)
    )
    colours = ("one", "two", "three", "five", "six", "seven", "eight", "four")  # of runs and of stages
    rules += "".join(f".r{k}, .s{k} {{ --own: var(--{colour}); }}\n" for k, colour in enumerate(colours))
    entries: list[tuple[int, str]] = []
    names: dict[str, None] = {}
    bounds: list[float] = []
    for sample in samples:
        entries.append((sample.step if type(sample.step) is int else 0, _json(_entry(sample))))
        names |= {} if sample.run is None else {sample.run: None}
        rows = [credit.values for credit in sample.credit.values() if credit.kind == "weights"]
        weights = [value for row in rows for value in row if value is not None]
        if weights:
            bounds = [min(bounds + weights), max(bounds + weights)]
    if latest_first:
        entries.sort(key=lambda entry: -entry[0])
    name = escaped(title)
    options = "".join(f'<option value="{escaped(run)}">{escaped(run)}</option>' for run in names)
    of_runs = f'<label>run <select name="run"><option value="">all</option>{options}</select></label>\n'
    yield f"""<!DOCTYPE html>
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
{runs}<h2>Completions</h2>
<p class="soft">Each token is shaded by what an estimator gives it: orange above, blue below the neutral value.
The answer is underlined. Hover over a token, or step through a block with the arrow keys, to read its numbers and the
drop of its span.</p>
<form id="search">
{of_runs if len(names) > 1 else ""}<span>step {_field("step-from", "from")} {_field("step-to", "to")}</span>
<span>reward {_field("reward-from", "from")} {_field("reward-to", "to")}</span>
<span><button type="button" id="back">Back</button> <span id="place" role="status"></span>
<button type="button" id="next">Next</button></span>
</form>
<main id="list"><noscript>Completions and curves need JavaScript.</noscript></main>
<div id="reading" role="status" aria-live="polite">Nothing chosen.</div>
<script id="data" type="application/json">{{"""
    for key, value in (data or {}).items():
        yield f"{_json(key)}:"
        yield from map(_no_html, _JSON.iterencode(value))
        yield ","
    yield f'"bounds":{_json(bounds or [1.0, 1.0])},"completions":['
    for i, (_, entry) in enumerate(entries):
        yield f",{entry}" if i else entry
    yield f"""]}}</script>
<script>
{_SCRIPT}{_CURVES if data else ""}</script>
</body>
</html>
"""


def _field(name: str, label: str) -> str:
    return f'<label>{label} <input name="{name}" type="number" step="any"></label>'


_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _json(value: Any) -> str:
    """Write JSON that no HTML can be read from."""
    return _no_html(_JSON.encode(value))


def _no_html(text: str) -> str:
    return text.replace("<", "\\u003c")


def _entry(sample: Sample) -> dict[str, Any]:
    facts = [
        sample.run,
        f"step {sample.step}" if sample.step is not None else "",
        f"problem {sample.problem}" if sample.problem is not None else "",
        f"reward {sample.reward:g}" if sample.reward is not None else "",
        f"advantage {sample.advantage:+.3g}" if sample.advantage is not None else "",
        {True: "correct", False: "wrong", None: ""}[sample.correct],
        "truncated" if sample.truncated else "",
    ]
    spans = [
        [span.start, span.end, span.drop]
        + ([printed(span.text)] if span.text != "".join(sample.tokens[span.start : span.end]) else [])
        for span in sample.spans
    ]
    return {
        "run": None if sample.run is None else printed(sample.run),
        "step": sample.step if type(sample.step) is int else None,
        "reward": sample.reward,
        "facts": printed(" · ".join(fact for fact in facts if fact)),
        "tokens": [printed(token) for token in sample.tokens],
        "answer": sample.answer,
        "unit": printed(sample.drops_unit),
        "spans": spans,
        "credit": [
            [printed(name), credit.kind, ", ".join(_notes(credit)), _short(credit.values)]
            for name, credit in sample.credit.items()
        ],
    }


def _notes(credit: TokenCredit) -> Iterable[str]:
    known = [value for value in credit.values if value is not None]
    yield credit.kind
    if credit.kind == "weights" and any(known):
        yield f"ESS ratio {ess_ratio(known):.3f}"
    if credit.kind in KINDS and any(known):
        yield f"top 10 % mass {top_mass(known):.3f}"


def _short(values: Iterable[float | None]) -> list[float | None]:
    """Give whole numbers as integers, which JSON writes shorter."""
    return [int(value) if value is not None and value == int(value) else value for value in values]


class _Signs(dict[int, str]):
    """Signs by code: for control and format characters, which do not show or turn what follows them, and surrogates."""

    def __missing__(self, code: int) -> str:
        sign = character = chr(code)
        category = unicodedata.category(character)
        if category == "Cf":  # directions, joiners, blanks of no width, tags
            sign = f"[U+{code:04X}]"
        elif category in ("Cc", "Cs"):
            sign = chr(0x2400 + code) if code < 32 else "\ufffd"
        self[code] = sign
        return sign


_SIGNS = _Signs({9: "\t", 10: "\n", 0x7F: "\u2421", 0x85: "\u2424", 0x2028: "\u2424", 0x2029: "\u2424"})


def printed(text: str) -> str:
    """Put signs in the place of characters that do not print; line ends and tabs stay."""
    return text.translate(_SIGNS)


def escaped(text: str) -> str:
    """Make HTML of text."""
    return html.escape(printed(text), quote=True)
