"""Every figure that README and docs quote stands in a result file that its section links to."""

import json
from pathlib import Path

import pytest

from tests.support.quoted_figures import Results, blocks

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parent.parent.parent
# What models.md and planning.md quote their commands write; what spans.md counts on GSM8K has no file.
ELSEWHERE = {"models.md", "planning.md", "spans.md"}
EVERY = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
PAGES = [page for page in EVERY if page.name not in ELSEWHERE]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_figure_a_page_quotes_is_in_a_result_file_that_its_section_links_to(page):
    results = Results()
    missing = [one for block in blocks(page) for one in results.missing(block)]
    assert not missing, f"{page.name}: in no linked result file: " + "; ".join(missing)


PAGE = """# Title

Weights from `0.5` to `4`, Python 3.11, release 1.2.3. They found +1.4 points (Pan et al.).

## Found

CF at 0.89 (0.85 to 0.92), which is 40 % more ([table](benchmarks/results/a.md)).

| | direct |
|---|---|
| CF | 0.89 (0.85 to 0.92) |
"""
TABLE = """| method | direct | more |
| --- | ---: | ---: |
| CF | 0.89 (0.85 to 0.92) | 40 |
| random | 0.50 (0.45 to 0.55) | 1.06 |
"""


@pytest.mark.parametrize(
    ("before", "after", "gone"),
    [
        ("", "", []),
        ("40 %", "41 %", ["line 7: 41"]),
        ("CF at 0.89 (0.85", "CF at 0.89 (0.84", ["line 7: 0.89 (0.84 to 0.92)"]),
        ("| CF | 0.89 (0.85 to 0.92) |", "| CF | 0.87 |", ["line 11: 0.87"]),
        ("([table](benchmarks/results/a.md))", "", ["line 7: 0.89 (0.85 to 0.92)", "line 7: 40"]),
        ("`0.5`", "0.5", ["line 3: 0.5"]),
        ("`0.5`", "`7. (4.00)`", []),
        (" (Pan et al.)", "", ["line 3: +1.4"]),
        # Each is in the file, but not in the rows of one method.
        ("| CF | 0.89 (0.85 to 0.92) |", "| CF | 0.89 (0.85 to 0.92), 1.06 |", ["line 11: no one row of a.md has"]),
    ],
)
def test_a_figure_that_no_linked_file_holds_is_named_with_its_line(tmp_path, before, after, gone):
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "a.md").write_text(TABLE)
    (tmp_path / "page.md").write_text(PAGE.replace(before, after))
    results = Results()
    found = [one for block in blocks(tmp_path / "page.md") for one in results.missing(block)]
    if "0.89" in str(gone) and len(gone) == 2:
        gone = [*gone, "line 11: 0.89 (0.85 to 0.92)"]  # the section has lost its only link
    assert len(found) == len(gone)
    assert all(one.startswith(start) for one, start in zip(found, gone, strict=True))


def test_a_figure_of_a_json_file_is_a_rounded_number_a_percentage_or_a_ratio_of_two_contenders(tmp_path):
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    figures = [{"group": "g", "name": n, "seconds": {"median": s}} for n, s in (("ours", 2.0), ("theirs", 8.0))]
    (folder / "a.json").write_text(json.dumps({"parts": {"p": {"figures": figures}}, "share": 0.1234, "fed": 10_293}))
    found, wrong = ["12.3 %", "0.123", "0.25", "4.0", "10,293"], ["12.3", "0.26", "0.124"]
    for text, there in [(text, True) for text in found] + [(text, False) for text in wrong]:
        (tmp_path / "page.md").write_text(f"Found: {text} ([file](benchmarks/results/a.json)).\n")
        (block,) = blocks(tmp_path / "page.md")
        assert (not Results().missing(block)) == there, text
