"""One command line: each command has its help."""

import pytest

from benchmarks import __main__ as command


@pytest.mark.parametrize("name", command.COMMANDS)
def test_every_command_has_a_help_that_says_how_it_is_called(name, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m benchmarks {name}")
