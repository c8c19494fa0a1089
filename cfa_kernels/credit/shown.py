"""Show credit to a person: a table of the units that matter most, completions shaded by what each token got."""

from html import escape
from typing import Any

import torch

from .weights import unit_weight

_UNITS, _COMPLETIONS = 10, 8  # shown at most
_WARM, _COOL, _OPAQUE = "222 98 0", "32 108 196", 0.62


def shade(value: float, neutral: float, low: float, high: float) -> str:
    """Give the CSS colour of a value: warm above `neutral`, cool below, opaque by its way from there to the bound."""
    far = (value - neutral) / ((high - neutral if value > neutral else neutral - low) or 1.0)
    return f"rgb({_WARM if far > 0 else _COOL} / {_OPAQUE * abs(far):.3f})"


def as_table(credit: Any) -> str:
    """Tabulate the units of a `Credit` with the largest drops, in the order of the text."""
    rows = enumerate(zip(credit.spans, credit.drop, strict=True))  # without drops where weights are drawn
    units = sorted(((x, b, u) for b, (row, drops) in rows for u, x in zip(row, drops.tolist())), reverse=True)  # noqa: B905
    head = f"Credit of {len(credit.weights)} completions, {len({b for _, b, _ in units})} scored, by {len(units)} units"
    lines = [head, f"{'row':>5}  {'unit':40} {'drop':>9} {'weight':>7}"]
    for drop, b, span in sorted(units[:_UNITS], key=lambda unit: unit[1:]):
        text = "".join(credit.texts(b)[slice(*span)]) if credit.texts else f"tokens {span.start} to {span.end - 1}"
        weight = unit_weight(credit.weights[b], span)
        lines.append(f"{b:>5}  {' '.join(text.split())[:40]:40} {drop:z9.3f} {weight:7.2f}")
    return "\n".join([*lines, *[f"       and {len(units) - _UNITS} more"] * (len(units) > _UNITS)])


def as_html(credit: Any) -> str:
    """Shade the first scored completions of a `Credit` by their weights or, of signed credit, by what is added."""
    rows, neutral = (credit.weights, 1.0) if credit.added is None else (credit.added, 0.0)
    chosen = [b for b, spans in enumerate(credit.spans) if spans][:_COMPLETIONS]
    if not chosen or not credit.texts:
        return f"<pre>{escape(as_table(credit))}</pre>"
    low, high = (bound.item() for bound in torch.cat([rows[b] for b in chosen]).aminmax())
    return "".join(f"<pre>completion {b}\n" + "".join(
        f'<span style="background: {shade(value, neutral, low, high)}" title="{value:.3g}">{escape(text)}</span>'
        for value, text in zip(rows[b].tolist(), credit.texts(b), strict=True)
    ) + "</pre>" for b in chosen)  # fmt: skip
