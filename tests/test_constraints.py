"""Pins of `make test-oldest` are the oldest versions that setup.py allows."""

import re

import pytest

from tests.conftest import REPOSITORY


@pytest.mark.parametrize("package", ["transformers", "triton"])
def test_the_oldest_version_that_is_tested_is_the_oldest_that_is_allowed(package):
    (pin,) = re.findall(rf"^{package}==([\d.]+)$", (REPOSITORY / "constraints-oldest.txt").read_text(), re.MULTILINE)
    (oldest,) = re.findall(rf'"{package}>=([\d.]+)', (REPOSITORY / "setup.py").read_text())
    assert pin.removesuffix(".0") == oldest.removesuffix(".0")
