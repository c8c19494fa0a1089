"""Programs whose packages are not installed end with one line that says what to install."""

import sys

import pytest

from trainer.__main__ import main
from trainer.analyze.__main__ import main as analyze
from trainer.extras import needed_by


@pytest.mark.parametrize(
    ("package", "modules", "program", "start"),
    [
        ("tyro", ["trainer.cli"], "trainer", lambda: main([])),
        ("pandas", ["trainer.analyze.tables"], "trainer.analyze", lambda: analyze(["a"])),
    ],
)
def test_a_program_without_its_packages_is_one_line_that_names_the_extra(monkeypatch, package, modules, program, start):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    for module in modules:
        monkeypatch.delitem(sys.modules, module, raising=False)
    said = f"error: python -m {program} needs {package}, which is not installed: pip install '.[trainer]'"
    with pytest.raises(SystemExit) as ended:
        start()
    assert ended.value.code == said


def test_a_module_of_this_repository_that_is_not_there_is_an_error_as_ever():
    with pytest.raises(ModuleNotFoundError, match=r"trainer\.absent"), needed_by("python -m trainer", "trainer"):
        import trainer.absent  # noqa: F401
