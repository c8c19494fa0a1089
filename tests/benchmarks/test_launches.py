"""The page's count of what a compiled layer launches and moves is what the command prints."""

import json
import re

import pytest
import torch

from benchmarks import launches
from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.traced]

PAGE = (REPOSITORY / "docs" / "benchmarks.md").read_text("utf-8")


@pytest.fixture(autouse=True)
def no_graphs_of_others():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_the_pages_table_is_what_the_command_prints(capsys):
    (printed,) = re.findall(r"<!-- python -m benchmarks launches -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)
    assert launches.main([]) == 0
    assert capsys.readouterr().out == printed + "\n"


def test_launches_of_layers_that_are_not_compiled_are_those_of_the_profile():
    (name,) = (REPOSITORY / "benchmarks" / "results").glob("2026-11-27-*-6ac2c08.json")
    plain, credited, liger, liger_credited = (
        line["launches"] / 28 for line in json.loads(name.read_text())["parts"]["profile"]["result"]
    )
    numbers = [f"{x:.0f}" for x in (plain, liger, credited - plain, liger_credited - liger)]
    sentence = re.search(r"Without compiled layers the profile above has .*?\.\n", PAGE, re.DOTALL)[0]
    assert re.findall(r"\b\d+\b", sentence) == numbers
