"""Trainers' packages: none is imported before it is asked for, and an absent or old one is an error with a version."""

import importlib
import sys
from importlib import metadata

import pytest

from cfa_kernels import integrations
from tests.support import imports_alone

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("installed", "found"), [(None, "which is not installed"), ("0.8.2", "found 0.8.2")])
@pytest.mark.parametrize("package", ["trl", "verl"])
def test_an_absent_or_old_package_is_an_error_naming_the_version_needed(monkeypatch, package, installed, found):
    def version(name: str) -> str:
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    module = f"cfa_kernels.integrations.{package}"
    monkeypatch.setattr(integrations, "version", version)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ImportError, match=rf"{module} needs {package}>=\d+\.\d+\.\d+, {found}"):
        importlib.import_module(module)


def test_importing_the_library_imports_no_trainer(processes):
    here, there = processes.Pipe(duplex=False)
    process = processes.Process(target=imports_alone.report, args=(there,), daemon=True)
    process.start()
    there.close()
    assert here.recv() == []
    process.join()
