"""The page's count of what a compiled layer launches and moves is what the command prints."""

import re

import pytest
import torch

from benchmarks.__main__ import main
from tests.conftest import REPOSITORY, fill_fresh_memory
from tests.support.runs import printed

pytestmark = pytest.mark.slow

PAGE = (REPOSITORY / "docs" / "benchmarks.md").read_text("utf-8")


def launches(argv):
    fill_fresh_memory()
    return main(argv)


@pytest.mark.skipif(
    f"\ntorch=={torch.__version__.partition('+')[0]}\n" not in (REPOSITORY / "constraints.txt").read_text(),
    reason=f"the table is about the schedule of another torch than {torch.__version__}",
)
def test_the_pages_table_is_what_the_command_prints():
    """In a process of its own: what others have compiled here changes what inductor fuses. Fresh memory is not zero."""
    (table,) = re.findall(r"<!-- python -m benchmarks launches -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)
    assert printed(launches, ["launches"]) == (0, table + "\n")
