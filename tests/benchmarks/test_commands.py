"""One command line: each command has its help, and missing packages are one line."""

import sys

import pytest

from benchmarks import __main__ as command


@pytest.mark.parametrize("name", command.COMMANDS)
def test_every_command_has_a_help_that_says_how_it_is_called(name, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m benchmarks {name}")


def test_a_command_without_its_packages_is_one_line_that_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "drawn.py").write_text("def main(argv):\n    import matplotlib\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(command.COMMANDS, "launches", ("drawn", ""))
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    with pytest.raises(SystemExit) as ended:
        command.main(["launches"])
    line = "error: python -m benchmarks needs matplotlib, which is not installed: pip install '.[bench]'"
    assert ended.value.code == line
