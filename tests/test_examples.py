"""Examples and their notebook run, and print what their page shows."""

import json
import re
import subprocess
import sys

import pytest

from docs.notebook import NOTEBOOK, PAGE, examples, notebook
from tests.conftest import REPOSITORY
from tests.support.runs import main

NUMBER = re.compile(r"-?\b\d+(?:\.\d+)?\b")
DRAWN = ("with_trl.py", "own_reward.py")  # sampled completions differ from one processor to another


def test_notebook_page_and_readme_hold_the_examples() -> None:
    assert json.loads(NOTEBOOK.read_text("utf-8")) == notebook(), "run python -m docs.notebook"
    texts = {example.file: example.file.read_text("utf-8") for example in examples()}
    page = PAGE.read_text("utf-8")
    assert all(f"examples/{file.name}" in page for file in NOTEBOOK.parent.glob("[!_]*.py"))
    assert all(text.count("\n") < 60 for text in texts.values())
    loop = next(iter(texts.values())).partition('"""\n\n')[2]
    assert f"```python\n{loop}```" in (REPOSITORY / "README.md").read_text("utf-8")


def trained_here(command: list[str], run=subprocess.run, **options):
    """Train as the command that an example starts, in this process and less; what is drawn is not compared."""
    if command[:3] != [sys.executable, "-m", "trainer"]:
        return run(command, **options)
    assert main([*command[3:], "--eval_problems=2", "--generation_batch_size=16"])[0] == 0
    return None


@pytest.mark.slow
def test_the_cells_of_the_notebook_run_and_print_what_the_page_shows(tmp_path, monkeypatch, capsys) -> None:
    for name in ("examples", "trainer"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    monkeypatch.chdir(tmp_path)  # where an example writes
    monkeypatch.setattr(subprocess, "run", trained_here)
    namespace = {"__name__": "__main__"}
    cells = [cell for cell in notebook()["cells"] if cell["cell_type"] == "code"]
    for cell, name in zip(cells, ["", *(example.file.name for example in examples())], strict=True):
        exec(compile("".join(cell["source"]), name, "exec"), namespace)
        shown = "".join(line for output in cell["outputs"] for line in output["text"])
        printed = "".join(capsys.readouterr().out.splitlines(keepends=True)[-shown.count("\n") :])
        assert NUMBER.sub("N", printed) == NUMBER.sub("N", shown)
        if name not in DRAWN:
            ours, theirs = (list(map(float, NUMBER.findall(text))) for text in (printed, shown))
            assert ours == pytest.approx(theirs, rel=0.02, abs=0.02)
