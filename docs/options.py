"""Write the tables of options, hosts, rewards and set-ups into the pages, and verl's options, from their declarations.

`python -m docs.options` writes them.
"""

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from cfa_kernels import CounterfactualConfig
from cfa_kernels.credit.config import PARTS, part_options
from cfa_kernels.estimators import ESTIMATORS
from cfa_kernels.integrations.credit import OFFERS
from docs import setups
from trainer.rewards.built_in import BUILT_IN

FOLDER = Path(__file__).parent
OWN = [entry.name for entry in fields(CounterfactualConfig) if entry.name not in ("spans", "answers")]
"""Options of the configuration itself."""

ROWS: dict[str, dict[str, Any]] = {
    "`masking`": {},
    '`masking`, `outcome="last"` or `"mean"`': {"estimator.outcome": "mean"},
    '`masking`, `mask="drop"`': {"estimator.mask": "drop"},
    "`masking`, `merge_adapters`": {"estimator.merge_adapters": True},
    "`masking`, `preselect`, by length or `prefix_gain`": {
        "estimator.preselect": 0.5,
        "estimator.preselect_by": "prefix_gain",
    },
    "`masking`, `preselect`, by `entropy`": {"estimator.preselect": 0.5, "estimator.preselect_by": "entropy"},
    "`masking`, `preselect`, by `gradient`": {"estimator.preselect": 0.5, "estimator.preselect_by": "gradient"},
    **{f"`{name}`": {"estimator": name} for name in ESTIMATORS if name != "masking"},
    "a function of yours": {"estimator": lambda model, batch: batch.units},
    '`target="gold"`': {"target": "gold"},
    '`control="random"` of weights': {"control": "random"},
}
"""Configurations that differ in what they need of a host."""


def options() -> str:
    """The table of every option: path, readers, default, meaning."""
    lines = ["| option | read by | default | meaning |", "|---|---|---|---|"]
    docs = documented(CounterfactualConfig)
    default = CounterfactualConfig()
    for name in OWN:
        value = getattr(default, name)
        lines.append(_line(name, "", "by the estimator" if name in ("weights", "units") else value, docs[name]))
    for path, part, entry in part_options():
        reader = f"`{part.name}`" if path.partition(".")[0] in PARTS else ""  # type: ignore[attr-defined]
        lines.append(_line(path, reader, entry.default, documented(part)[entry.name]))
    return "\n".join(lines)


def hosts() -> str:
    """The table of what runs in which host, as what a configuration needs and a host does not offer."""
    labels: dict[str, list[str]] = {}  # of rows with equal cells
    for label, given in ROWS.items():
        needs = CounterfactualConfig.of(given).needs
        cells = " | ".join("no" if needs - offered else "yes" for offered in OFFERS.values())
        labels.setdefault(cells, []).append(label)
    lines = [f"| | {' | '.join(OFFERS)} |", "|---|" + "---|" * len(OFFERS)]
    return "\n".join([*lines, *(f"| {'; '.join(equal)} | {cells} |" for cells, equal in labels.items())])


def rewards() -> str:
    """The table of the program's reward functions, and what a user's own may do."""
    lines = ["| name | gives 1 if the completion | rows |", "|---|---|---|"]
    for name, one in BUILT_IN.items():
        lines.append(f"| `{name}` | {one.right} | {' or '.join(f'`{kind}`' for kind in one.kinds)} |")
    return "\n".join([*lines, "| `module:function` | (any number, by your own rule) | all |"])


def verl() -> str:
    """The options that can run in verl, whose workers hold pieces, none of them set."""
    lines, before = ["  preset: none"], ""
    others = ("estimator.sigma", "estimator.merge_adapters")
    paths = dict.fromkeys(path for path, _, _ in part_options() if path not in others)
    for path in [*OWN, *paths]:
        part, dot, option = path.partition(".")
        if part in PARTS and not dot:
            continue
        if dot and part != before:
            lines += [f"  {part}:", *(["    name: null"] if part in PARTS else [])]
        lines.append(f"    {option}: null" if dot else f"  {part}: null")
        before = part
    return "\n".join(lines)


TABLES = {
    "options": (FOLDER / "credit.md", options, "<!-- {} -->"),
    "hosts": (FOLDER / "other_trainers.md", hosts, "<!-- {} -->"),
    "rewards": (FOLDER / "rewards.md", rewards, "<!-- {} -->"),
    "verl": (FOLDER / "verl_gsm8k.yaml", verl, "  # {}"),
    "models": (FOLDER / "setups.md", setups.models, "<!-- {} -->"),
    "micro-batches": (FOLDER / "setups.md", setups.micro_batches, "<!-- {} -->"),
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


def documented(part: type) -> dict[str, str]:
    """Read the string under each field of a dataclass, on one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
    return {
        ast.unparse(entry.target): " ".join(ast.literal_eval(text.value).split())
        for entry, text in itertools.pairwise(body.body)
        if isinstance(entry, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _line(name: str, owner: str, default: Any, meaning: str) -> str:
    shown = default if default == "by the estimator" else f"`{getattr(default, 'name', default)}`"
    return f"| `{name}` | {owner} | {shown} | {meaning.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    for path, _, text in pages():
        path.write_text(text, encoding="utf-8")
