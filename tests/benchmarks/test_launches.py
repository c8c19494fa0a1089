"""The page's count of what a compiled layer launches and moves is what the command prints."""

import json
import re

import pytest

from benchmarks.__main__ import main
from tests.conftest import REPOSITORY, fill_fresh_memory
from tests.support.runs import printed

pytestmark = pytest.mark.slow

PAGE = (REPOSITORY / "docs" / "benchmarks.md").read_text("utf-8")


def launches(argv):
    fill_fresh_memory()
    return main(argv)


def test_the_pages_table_is_what_the_command_prints():
    """In a process of its own: what others have compiled here changes what inductor fuses. Fresh memory is not zero."""
    (table,) = re.findall(r"<!-- python -m benchmarks launches -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)
    assert printed(launches, ["launches"]) == (0, table + "\n")


def test_launches_of_layers_that_are_not_compiled_are_those_of_the_profile():
    (name,) = (REPOSITORY / "benchmarks" / "results").glob("2026-11-27-*-6ac2c08.json")
    plain, credited, liger, liger_credited = (
        line["launches"] / 28 for line in json.loads(name.read_text())["parts"]["profile"]["result"]
    )
    numbers = [f"{x:.0f}" for x in (plain, liger, credited - plain, liger_credited - liger)]
    sentence = re.search(r"layers that are not compiled have .*?\.\n", PAGE, re.DOTALL)[0]
    assert re.findall(r"\b\d+\b", sentence) == numbers
