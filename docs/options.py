"""Write the tables of options and of hosts into the pages, and verl's options, from their declarations.

`python -m docs.options` writes them.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cfa_kernels import CounterfactualConfig
from cfa_kernels.credit.config import AnswerRules, SpanRules, flat_options
from cfa_kernels.credit.weights import WEIGHTS
from cfa_kernels.estimators import ESTIMATORS
from cfa_kernels.integrations.credit import OFFERS
from trainer.cli import documented

FOLDER = Path(__file__).parent
OWN = ("estimator", "weights", "control", "completions", "units", "target", "normalize", "open_spans", "token_budget")
"""Options of the configuration itself."""

ROWS: dict[str, dict[str, Any]] = {
    "`masking`": {},
    '`masking`, `outcome="last"` or `"mean"`': {"outcome": "mean"},
    '`masking`, `mask="drop"`': {"mask": "drop"},
    "`masking`, `merge_adapters`": {"merge_adapters": True},
    "`masking`, `preselect`, by length or `prefix_gain`": {"preselect": 0.5, "preselect_by": "prefix_gain"},
    "`masking`, `preselect`, by `entropy`": {"preselect": 0.5, "preselect_by": "entropy"},
    "`masking`, `preselect`, by `gradient`": {"preselect": 0.5, "preselect_by": "gradient"},
    **{f"`{name}`": {"estimator": name} for name in ESTIMATORS if name != "masking"},
    "a function of yours": {"estimator": lambda model, batch: batch.units},
    '`target="gold"`': {"target": "gold"},
    '`control="random"` of weights': {"control": "random"},
}
"""Configurations that differ in what they need of a host."""


def options() -> str:
    """The table of every option: flat name, part, default, meaning."""
    lines = ["| option | part | default | meaning |", "|---|---|---|---|"]
    docs = documented(CounterfactualConfig)
    default = CounterfactualConfig()
    for name in OWN:
        value = getattr(default, name)
        lines.append(_line(name, "", "by the estimator" if name in ("weights", "units") else value, docs[name]))
    lines += [_line(name, _owner(part), entry.default, documented(part)[name]) for name, part, entry in flat_options()]
    return "\n".join(lines)


def hosts() -> str:
    """The table of what runs in which host, as what a configuration needs and a host does not offer."""
    labels: dict[str, list[str]] = {}  # of rows with equal cells
    for label, flat in ROWS.items():
        needs = CounterfactualConfig.from_flat(flat).needs
        cells = " | ".join("no" if needs - offered else "yes" for offered in OFFERS.values())
        labels.setdefault(cells, []).append(label)
    lines = [f"| | {' | '.join(OFFERS)} |", "|---|" + "---|" * len(OFFERS)]
    return "\n".join([*lines, *(f"| {'; '.join(equal)} | {cells} |" for cells, equal in labels.items())])


def verl() -> str:
    """The options that can run in verl, whose workers hold pieces, none of them set."""
    others = ("sigma", "merge_adapters")
    names = dict.fromkeys(name for name, _, _ in flat_options() if name not in others)
    return "\n".join(f"  {name}: null" for name in dict.fromkeys([*OWN, *names]))


TABLES = {
    "options": (FOLDER / "credit.md", options, "<!-- {} -->"),
    "hosts": (FOLDER / "other_trainers.md", hosts, "<!-- {} -->"),
    "verl": (FOLDER / "verl_gsm8k.yaml", verl, "  # {}"),
}


def pages() -> Iterator[tuple[Path, str, str]]:
    """Yield each page with a generated table: its path, its text, and its text with the table as it should be."""
    for name, (page, table, comment) in TABLES.items():
        text = page.read_text(encoding="utf-8")
        begin, end = (
            comment.format(f"{name}: by python -m docs.options") + "\n",
            "\n" + comment.format(f"end of {name}"),
        )
        found = re.search(re.escape(begin) + ".*?" + re.escape(end), text, flags=re.DOTALL)
        if found is None:
            raise ValueError(
                f"{page.name}: has no place for the table {name!r}; put {begin.strip()} and {end.strip()} there"
            )
        yield page, text, text[: found.start()] + begin + "\n" + table() + "\n" + end + text[found.end() :]


def _owner(part: Any) -> str:
    if part in (SpanRules, AnswerRules):
        return f"`{part.__name__}`"
    return f"`{part.__name__}`, `{'weights' if part in WEIGHTS.values() else 'estimator'}={part.name}`"


def _line(name: str, owner: str, default: Any, meaning: str) -> str:
    shown = default if default == "by the estimator" else f"`{getattr(default, 'name', default)}`"
    return f"| `{name}` | {owner} | {shown} | {meaning.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    for path, _, text in pages():
        path.write_text(text, encoding="utf-8")
