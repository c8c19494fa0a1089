"""One command line: each command has its help, and missing packages are one line."""

import re
import sys

import pytest

from benchmarks import __main__ as command
from benchmarks.research.command import MEASURES


@pytest.mark.parametrize("name", command.COMMANDS)
def test_every_command_has_a_help_that_says_how_it_is_called(name, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m benchmarks {name}")


@pytest.mark.parametrize("name", MEASURES)
def test_every_option_of_an_evidence_command_is_explained(name, capsys):
    with pytest.raises(SystemExit):
        command.main(["evidence", name, "--help"])
    printed = re.sub("[│─╭╮╰╯]", " ", capsys.readouterr().out)
    options = re.split(r"\n +(?=--\w)", printed)[1:]
    assert len(options) > 4
    for option in options:
        flag, *words = option.split()
        assert len([word for word in words if word.islower()]) > 1, flag


def test_a_command_without_its_packages_is_one_line_that_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "drawn.py").write_text("def main(argv):\n    import matplotlib\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(command.COMMANDS, "launches", ("drawn", ""))
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    with pytest.raises(SystemExit) as ended:
        command.main(["launches"])
    line = "error: python -m benchmarks needs matplotlib, which is not installed: pip install '.[bench]'"
    assert ended.value.code == line
