"""The page on credit lists every option as the parts of the configuration declare it."""

import re
from dataclasses import fields
from pathlib import Path

from cfa_kernels import CounterfactualConfig
from cfa_kernels.credit.config import flat_options
from docs.options import option_docs

PAGE = Path(__file__).parents[2] / "docs" / "credit.md"
HEADER = "| option | part | default | meaning |\n|---|---|---|---|\n"


def listed(page: str) -> list[tuple[str, str, str, str]]:
    """Option, part, default and meaning of each row of the page's table of options."""
    table = page.partition(HEADER)[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]
    return [(name.strip("`"), re.sub("`(.*?)`.*", r"\1", part), default, text) for name, part, default, text in rows]


def test_the_page_on_credit_lists_every_option_with_its_default_and_meaning() -> None:
    rows = listed(PAGE.read_text("utf-8"))
    of_parts = [
        (name, part.__name__, f"`{entry.default}`", option_docs(part)[name].replace("|", "\\|"))
        for name, part, entry in flat_options()
    ]
    assert [row for row in rows if row[1]] == of_parts
    texts = option_docs(CounterfactualConfig)
    own = [entry.name for entry in fields(CounterfactualConfig) if entry.name not in ("spans", "answers")]
    found = {name: text for name, part, _, text in rows if not part}
    assert found == {name: texts[name].replace("|", "\\|") for name in own}
