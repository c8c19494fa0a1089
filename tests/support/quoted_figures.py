"""Figures that a page quotes, and where they are found: the result files that its section links to.

A page's own settings and formulas stand in backticks and are no figures; figures of others stand in a sentence that
names a table, a paper or its authors. What is left must be in a linked file of `benchmarks/results/`:

- `0.89 (0.85 to 0.92)` and `-1.2 ± 0.6` as a whole, a number of a Markdown file as it is written there;
- a number of a JSON file rounded to the digits quoted, as a percentage where a `%` follows, or the ratio of two
  contenders' numbers of one group, for tables that give ratios;
- all figures of a table's row in the rows of one label, where a linked Markdown file has such a label.
"""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = "benchmarks/results/"
_LINK = re.compile(r"\]\(([^)#]*)\)")
_NUMBER = r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?"
_COMPOUND = re.compile(rf"{_NUMBER} ± {_NUMBER}|{_NUMBER} \({_NUMBER} to {_NUMBER}\)")
# Decimals, thousands with a comma and percentages; bare whole numbers are counts, steps and years.
_BARE = re.compile(r"(?<![\w.,-])[-+]?(?:\d+(?:,\d{3})*\.\d+|\d{1,3}(?:,\d{3})+|\d+(?= ?%))(?![\w.]*\w)")
_PACKAGE = r"(?:Python|torch|transformers|triton|trl|TRL|verl|vllm|vLLM|OpenRLHF|release|numpy|peft)"
_NOT_FIGURES = re.compile(
    r"`[^`]*`|<[^>]*>|arXiv \d+\.\d+|\b\d{4}\.\d{5}\b|[Ss]ections? \d+(?:\.\d+)*|\b\d+(?:\.\d+){2,}\b|\d+e-\d+"
    rf"|{_PACKAGE}[^.;:|]{{0,20}}?\d+\.\d+(?:(?:,| to| and| or| as well as)+ \d+\.\d+)*"
    r"|since \d+\.\d+|\d+\.\d+ and later|\b\d+ % (?:bootstrap|by the jackknife|of draws|intervals)"
)  # fmt: skip
_OF_OTHERS = re.compile(r"table \d|Table \d|et al\.|\barXiv\b")


class Quote(NamedTuple):
    """A figure on a page: what is written, whether a percent sign follows, the row of its table, its line."""

    text: str
    percent: bool
    row: int | None
    line: int


class Block(NamedTuple):
    """A paragraph or a table with the result files that its section has linked to so far."""

    quotes: list[Quote]
    files: list[Path]


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page that quote figures."""
    text = re.sub(r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), page.read_text("utf-8"), flags=re.S | re.M)
    files: list[Path] = []
    line = 1
    for part in re.split(r"(\n\s*\n)", text):
        if part.startswith("#"):
            files = []
        for target in _LINK.findall(part):
            path = (page.parent / target).resolve()
            if RESULTS in path.as_posix() and path.suffix in (".md", ".json"):
                files = [*files, path]
        quotes = list(_quotes(part, line))
        if quotes:
            yield Block(quotes, files)
        line += part.count("\n")


def _quotes(block: str, line: int) -> Iterator[Quote]:
    table = block.lstrip().startswith("|")
    block = re.sub(r"`[^`]*`", lambda code: "\n" * code[0].count("\n"), block)  # may hold what ends a sentence
    pieces = block.split("\n") if table else re.split(r"(?<=[.:;])\s", block)
    for piece in pieces:
        if not table and _OF_OTHERS.search(piece):
            line += piece.count("\n")
            continue
        plain = _NOT_FIGURES.sub(" ", re.sub(_LINK, "]", piece).replace("\n", " "))
        found = [(match[0], False) for match in _COMPOUND.finditer(plain)]
        rest = _COMPOUND.sub(" ", plain)
        found += [(match[0], rest[match.end() :].lstrip().startswith("%")) for match in _BARE.finditer(rest)]
        for text, percent in found:
            yield Quote(text, percent, line if table else None, line)
        line += 1 if table else piece.count("\n")


class Results:
    """What the result files hold, each read once."""

    def __init__(self) -> None:
        self._markdown: dict[Path, tuple[str, dict[str, str]]] = {}
        self._numbers: dict[Path, set[float]] = {}

    def missing(self, block: Block) -> list[str]:
        """What no linked file holds, as `line N: FIGURE`; rows of a table also where no label has all their figures."""
        gone = [quote for quote in block.quotes if not any(self._holds(path, quote) for path in block.files)]
        found = [f"line {quote.line}: {quote.text}" for quote in gone]
        notes = [path for path in block.files if path.suffix == ".md"]
        if notes and not gone:
            for line, row in itertools.groupby((q for q in block.quotes if q.row is not None), lambda q: q.row):
                figures = [quote.text for quote in row]
                if not any(all(_written(f, text) for f in figures) for p in notes for text in self._labels(p).values()):
                    found.append(f"line {line}: no one row of {', '.join(p.name for p in notes)} has {figures}")
        return found

    def _holds(self, path: Path, quote: Quote) -> bool:
        if path.suffix == ".md":
            return _written(quote.text, self._text(path)[0])
        if not re.fullmatch(_NUMBER, quote.text):
            return False
        digits = len(quote.text.partition(".")[2])
        wanted = quote.text.replace(",", "").lstrip("+")
        scales = (1, 100) if quote.percent else (1,)
        return any(f"{scale * x:.{digits}f}" == wanted for x in self._of_json(path) for scale in scales)

    def _text(self, path: Path) -> tuple[str, dict[str, str]]:
        if path not in self._markdown:
            text, labels = path.read_text("utf-8"), dict[str, str]()
            for line in text.splitlines():
                if line.startswith("| ") and not line.startswith("| ---"):
                    label = line.split(" | ")[0]
                    labels[label] = f"{labels.get(label, '')}\n{line}"
            self._markdown[path] = text, labels
        return self._markdown[path]

    def _labels(self, path: Path) -> dict[str, str]:
        return self._text(path)[1]

    def _of_json(self, path: Path) -> set[float]:
        if path not in self._numbers:
            document = json.loads(path.read_text("utf-8"))
            numbers = set(_leaves(document))
            for part in document.get("parts", {}).values():
                for _, group in itertools.groupby(part.get("figures", []), lambda figure: figure["group"]):
                    numbers |= set(_ratios(list(group)))
            self._numbers[path] = numbers
        return self._numbers[path]


def _written(figure: str, text: str) -> bool:
    """The figure, with or without its sign, stands in the text as a whole number would."""
    bare = re.escape(figure.lstrip("+-")).replace(",", ",?")
    sign = re.escape(figure[0]) if figure[0] in "+-" else r"[-+]?"
    return re.search(rf"(?<![\d.,]){sign}{bare}(?![\d]|\.\d)", text) is not None


def _leaves(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def _ratios(figures: list[dict[str, Any]]) -> Iterator[float]:
    """Of every two contenders of a group: seconds, processor's seconds and operations."""
    for one, other in itertools.permutations(figures, 2):
        for key in ("seconds", "cpu_seconds", "flops"):
            a, b = one.get(key), other.get(key)
            a, b = (x["median"] if isinstance(x, dict) else x for x in (a, b))
            if a and b:
                yield a / b
