"""Every figure that README and docs quote is in a result file that its section links to.

A page's own settings and formulas are in backticks and are not figures, but a bare number in backticks in prose is one.
Figures of others are in a sentence that names a table, a paper or its authors. All others must be in a linked file of
`benchmarks/results/`:

- `0.89 (0.85 to 0.92)` and `-1.2 ± 0.6` as a whole, a number of a Markdown file as it is written there;
- a number of a JSON file rounded to the digits quoted, as a percentage where a `%` follows, or the ratio of two
  contenders' numbers of one group, for tables that give ratios;
- all figures of a table's row in the rows of one label, where a linked Markdown file has such a label; those of a cell
  that links to such a file in the rows of one label of that file.
"""

import functools
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.speed.predictions import figures_of
from benchmarks.speed.variants import LOADS
from tests.conftest import REPOSITORY
from tests.support.prose import CODE_NUMBER

pytestmark = pytest.mark.slow

# The command that models.md quotes writes its figures; the counts of spans.md on GSM8K have no file.
ELSEWHERE = {"models.md", "spans.md"}
EVERY = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
PAGES = [page for page in EVERY if page.name not in ELSEWHERE]

LINK = re.compile(r"\]\(([^)#]*)\)")
NUMBER = r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?"
COMPOUND = re.compile(rf"{NUMBER} ± {NUMBER}|{NUMBER} \({NUMBER} to {NUMBER}\)")
# Decimals, thousands with a comma and percentages; bare whole numbers are counts, steps and years.
BARE = re.compile(r"(?<![\w.,-])[-+]?(?:\d+(?:,\d{3})*\.\d+|\d{1,3}(?:,\d{3})+|\d+(?= ?%))(?![\w.]*\w)")
PACKAGE = r"(?:Python|torch|transformers|triton|trl|TRL|verl|vllm|vLLM|OpenRLHF|release|numpy|peft)"
NOT_FIGURES = re.compile(
    r"`[^`]*`|<[^>]*>|arXiv \d+\.\d+|\b\d{4}\.\d{5}\b|[Ss]ections? \d+(?:\.\d+)*|\b\d+(?:\.\d+){2,}\b|\d+e-\d+"
    rf"|{PACKAGE}[^.;:|]{{0,20}}?\d+\.\d+(?:(?:,| to| and| or| as well as)+ \d+\.\d+)*"
    r"|since \d+\.\d+|\d+\.\d+ and later|\b\d+ % (?:bootstrap|by the jackknife|of draws|intervals)"
)  # fmt: skip
OF_OTHERS = re.compile(r"table \d|Table \d|et al\.|\barXiv\b")


def tokens_fed(group: int, prompt: int, completion: int, **_: int) -> float:
    """Tokens of a tree over those of rows that share no prompt."""
    return (prompt / group + completion) / (prompt + completion)


TOKENS_FED = {tokens_fed(**load.keywords) for load in LOADS["cuda"].values()}
"""What sharing prompts can give at most in the raced loads, counted."""


class Quote(NamedTuple):
    """A figure on a page: its text, whether a percent sign follows, its table's row, its line.

    A row is a line, and the link of the cell that has one.
    """

    text: str
    percent: bool
    row: tuple[int, str] | None
    line: int


def blocks(page: Path) -> Iterator[tuple[list[Quote], list[Path]]]:
    """The figures of each paragraph or table, and the result files that its section has linked to so far."""
    text = re.sub(r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), page.read_text("utf-8"), flags=re.S | re.M)
    files: list[Path] = []
    line = 1
    for part in re.split(r"(\n\s*\n)", text):
        if part.startswith("#"):
            files = []
        linked = [(page.parent / target).resolve() for target in LINK.findall(part)]
        files = files + [x for x in linked if "benchmarks/results/" in x.as_posix() and x.suffix in (".md", ".json")]
        if quotes := list(quotes_of(part, line)):
            yield quotes, files
        line += part.count("\n")


def quotes_of(block: str, line: int) -> Iterator[Quote]:
    table = block.lstrip().startswith("|")
    block = block if table else CODE_NUMBER.sub(r"\1", block)
    block = re.sub(r"`[^`]*`", lambda code: "\n" * code[0].count("\n"), block)  # may hold what ends a sentence
    for piece in re.split(r"(?<=[\n|])", block) if table else re.split(r"(?<=[.:;])\s", block):
        if not OF_OTHERS.search(piece):
            row = (line, "".join(LINK.findall(piece))) if table else None
            plain = NOT_FIGURES.sub(" ", re.sub(LINK, "]", piece).replace("\n", " "))
            for match in COMPOUND.finditer(plain):
                yield Quote(match[0], False, row, line)
            rest = COMPOUND.sub(" ", plain)
            for match in BARE.finditer(rest):
                percent = rest[match.end() :].lstrip().startswith("%")
                yield Quote(match[0], percent, row, line)
        line += piece.count("\n")


def missing(page: Path) -> list[str]:
    """`line N: FIGURE` of each figure in no linked file; rows of a table also where no label has all their figures."""
    result = []
    for quotes, files in blocks(page):
        absent = [quote for quote in quotes if not any(holds(path, quote) for path in files)]
        result += [f"line {quote.line}: {quote.text}" for quote in absent]
        notes = [path for path in files if path.suffix == ".md"]
        if not notes or absent:
            continue
        for (line, link), row in itertools.groupby(
            sorted((q for q in quotes if q.row), key=lambda q: q.row), lambda q: q.row
        ):
            figures, own = (
                [quote.text for quote in row],
                [path for path in notes if path.name == Path(link).name] or notes,
            )
            if not any(all(written(x, rows) for x in figures) for path in own for rows in labels(path).values()):
                result.append(f"line {line}: no one row of {', '.join(p.name for p in own)} has {figures}")
    return result


def holds(path: Path, quote: Quote) -> bool:
    if path.suffix == ".md":
        return written(quote.text, path.read_text("utf-8"))
    if not re.fullmatch(NUMBER, quote.text):
        return False
    digits = len(quote.text.partition(".")[2])
    wanted = quote.text.replace(",", "").lstrip("+")
    scales = (1, 100) if quote.percent else (1,)
    return any(f"{scale * x:.{digits}f}" == wanted for x in numbers(path) | TOKENS_FED for scale in scales)


def written(figure: str, text: str) -> bool:
    """Whether the figure, with or without its sign, is in the text as a whole number."""
    bare = re.escape(figure.lstrip("+-")).replace(",", ",?")
    sign = re.escape(figure[0]) if figure[0] in "+-" else r"[-+]?"
    return re.search(rf"(?<![\d.,]){sign}{bare}(?![\d]|\.\d)", text) is not None


def labels(path: Path) -> dict[str, str]:
    """The rows of a Markdown file's tables, by their first cell."""
    rows: dict[str, str] = {}
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            label = line.split(" | ")[0]
            rows[label] = f"{rows.get(label, '')}\n{line}"
    return rows


@functools.cache
def numbers(path: Path) -> set[float]:
    """The numbers of a JSON file, and the ratios of every two contenders of a group."""
    document = json.loads(path.read_text("utf-8"))
    result = set(leaves(document))
    for _, group in itertools.groupby(contenders(document), lambda figure: figure["group"]):
        for one, other in itertools.permutations(group, 2):
            for key in ("seconds", "cpu_seconds", "flops"):
                a, b = (x["median"] if isinstance(x, dict) else x for x in (one.get(key), other.get(key)))
                if a and b:
                    result.add(a / b)
    return result


def contenders(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Figures by contender: of pytest-benchmark's files, of `speed ab`'s, and of files that the suite wrote before."""
    for part in document.get("parts", {}).values():
        yield from figures_of(part)
    for one in document.get("benchmarks", ()):
        yield {"group": one["group"], "seconds": one["stats"]["median"], **one["extra_info"]}


def leaves(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_figure_a_page_quotes_is_in_a_result_file_that_its_section_links_to(page):
    assert not (absent := missing(page)), f"{page.name}: in no linked result file: " + "; ".join(absent)
