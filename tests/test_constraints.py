"""The requirements of setup.py, and the pins of `make test` and of `make test-oldest`."""

import re
import runpy
from typing import Any
from unittest import mock

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.conftest import REPOSITORY


@pytest.mark.parametrize("package", ["accelerate", "peft", "transformers", "triton"])
def test_the_oldest_version_that_is_tested_is_the_oldest_that_is_allowed(package):
    (pin,) = re.findall(rf"^{package}==([\d.]+)$", (REPOSITORY / "constraints-oldest.txt").read_text(), re.MULTILINE)
    (oldest,) = (each.version for each in _requirements("trl")[package].specifier if each.operator == ">=")
    assert Version(pin) == Version(oldest)


def _setup() -> dict[str, Any]:
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(REPOSITORY / "setup.py"))
    return setup.call_args.kwargs


def _requirements(*extras: str) -> dict[str, Requirement]:
    """The requirements of `pip install .[extras]`, by name."""
    options = _setup()
    lines = [*options["install_requires"], *(line for extra in extras for line in options["extras_require"][extra])]
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def test_what_the_two_commands_of_the_readme_install_is_pinned_within_its_range():
    pins = dict(line.split("==") for line in (REPOSITORY / "constraints.txt").read_text().split())
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    for name, requirement in _requirements("test", "lint", "docs", "trainer").items():
        assert name in pins, name
        assert requirement.specifier.contains(pins[name]), requirement


def test_the_two_commands_of_the_readme_install_every_extra_that_their_code_imports():
    assert ".[test,lint,docs]" in (REPOSITORY / "Makefile").read_text()
    assert _requirements("trainer", "trl").keys() <= _requirements("test", "lint").keys()


def test_a_commit_is_checked_by_the_linter_of_make_lint():
    (hook,) = re.findall(r"rev: v(\S+)", (REPOSITORY / ".pre-commit-config.yaml").read_text())
    assert f"\nruff=={hook}\n" in (REPOSITORY / "constraints.txt").read_text()


@pytest.mark.parametrize("host", ["trl", "verl", "openrlhf"])
def test_an_extra_asks_for_the_oldest_version_that_its_integration_takes(host):
    modules = (REPOSITORY / "cfa_kernels" / "integrations").glob(f"{host}*.py")
    source = "".join(module.read_text() for module in modules)
    (oldest,) = re.findall(r'^OLDEST = "([\d.]+)"$', source, re.MULTILINE)
    (least,) = (Version(each.version) for each in _requirements(host)[host].specifier if each.operator == ">=")
    assert least == Version(oldest)


def test_a_machine_without_a_network_is_carried_what_it_may_lack_of_the_requirements():
    page = (REPOSITORY / "benchmarks" / "README.md").read_text()
    (there,) = re.findall(r"The machine needs (.+?)\.", page)
    (carried,) = re.findall(r"--dest carry \\\n(.+)\n", page)
    brought = {"numpy", "tqdm", "filelock", "safetensors", "pyyaml"}  # by those packages
    known = {*there.lower().replace(" and ", ", ").split(", "), *carried.split(), *brought}
    assert _requirements("trainer", "trl").keys() <= known


def test_every_extra_is_tried_by_default():
    (tried,) = re.findall(r"set -- (.+)$", (REPOSITORY / ".ci" / "extras").read_text(), re.MULTILINE)
    beside = {"quantised", "mistral", "served"}  # the tests with packages that no extra brings
    assert set(tried.split()) == _setup()["extras_require"].keys() | beside
