"""Write examples/tour.ipynb from the examples and what docs/examples.md shows of them: `python -m docs.notebook`."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).with_name("examples.md")
NOTEBOOK = PAGE.parent.parent / "examples" / "tour.ipynb"
_SECTION = re.compile(r"^(## .*?\[examples/(\w+\.py)\].*?)^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_TO_THE_CHECKOUT = """import os

if not os.path.isdir("examples"):  # a notebook starts in its own folder
    os.chdir("..")
"""


class Example(NamedTuple):
    """A section of the page: its text, the file that it links, what that prints."""

    prose: str
    file: Path
    output: str


def examples() -> list[Example]:
    """Read the page's sections."""
    sections = _SECTION.findall(PAGE.read_text(encoding="utf-8"))
    return [Example(prose, NOTEBOOK.with_name(name), output) for prose, name, output in sections]


def notebook() -> dict[str, Any]:
    """Make the notebook, in Jupyter's format 4.5."""
    cells = [_cell("# Examples\n\nEach runs by itself after the first cell."), _cell(_TO_THE_CHECKOUT, "")]
    for example in examples():
        cells += [_cell(example.prose), _cell(example.file.read_text(encoding="utf-8"), example.output)]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [{"id": f"cell-{i}", **cell} for i, cell in enumerate(cells)]
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}


def _cell(source: str, output: str | None = None) -> dict[str, Any]:
    """Make a cell of text, or one of code if there is an output."""
    kind = "markdown" if output is None else "code"
    cell: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": source.strip().splitlines(keepends=True)}
    if output is not None:
        shown = [{"output_type": "stream", "name": "stdout", "text": output.splitlines(keepends=True)}]
        cell |= {"execution_count": None, "outputs": shown if output else []}
    return cell


if __name__ == "__main__":
    NOTEBOOK.write_text(json.dumps(notebook(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
