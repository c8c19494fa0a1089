"""Programs whose packages are not installed end with one line that says what to install."""

import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from tests.support.embedded import SMALL
from trainer.__main__ import main
from trainer.extras import needed_by

START = """
import runpy, sys
sys.modules[sys.argv.pop(1)] = None  # as if it were not installed
runpy.run_module(sys.argv.pop(), run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "module", "argv"), [("tyro", "trainer", []), ("yaml", "trainer.analyze", [__file__])]
)
def test_a_program_without_its_packages_is_one_line_that_names_the_extra(package, module, argv):
    command = [sys.executable, "-c", START, package, *argv, module]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert ended.returncode == 1
    said = f"error: python -m {module} needs {package}, which is not installed: pip install '.[trainer]'\n"
    assert ended.stderr == said


def test_a_package_that_is_needed_only_after_the_start_is_named_as_well(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SystemExit, match=r"needs datasets, .* pip install '\.\[trainer\]'"):
        main([*SMALL, "--dataset=openai/gsm8k", f"--output_dir={tmp_path / 'run'}"])


def test_a_module_of_this_repository_that_is_not_there_is_an_error_as_ever():
    with pytest.raises(ModuleNotFoundError, match=r"trainer\.absent"), needed_by("python -m trainer", "trainer"):
        import trainer.absent  # noqa: F401


def test_ctrl_c_while_packages_are_imported_is_no_traceback():
    with pytest.raises(SystemExit, match=r"^130$"), needed_by("python -m trainer", "trainer"):
        raise KeyboardInterrupt
