"""Plug-in of pytest that writes after every test how many have run and which failed.

`python -m pytest -p benchmarks.harness.progress --progress FILE`; works under pytest-xdist, too.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file whole: a reader meanwhile, or after a kill, finds the old one or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(content, indent=1) + "\n")
    draft.replace(path)


class Progress:
    """Counts of the tests that ended, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.tests: set[str] = set()
        self.counts = {"failures": 0, "errors": 0, "skipped": 0}
        self.failed: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._add("errors", report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tests.add(report.nodeid)
        if report.failed:
            self._add("failures" if report.when == "call" else "errors", report.nodeid)
        if report.skipped:
            self.counts["skipped"] += 1
        if report.when == "teardown":
            self._write()

    def _add(self, kind: str, name: str) -> None:
        self.counts[kind] += 1
        self.failed.append(name)
        self._write()

    def _write(self) -> None:
        write_json(self._path, {"tests": len(self.tests), **self.counts, "failed": self.failed})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--progress", help="JSON file to write counts of tests to")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--progress")
    if path is not None and not hasattr(config, "workerinput"):  # under pytest-xdist one process writes
        config.pluginmanager.register(Progress(Path(path)))
        # Shells start what runs in their background with SIGINT ignored; that is how a part is stopped.
        signal.signal(signal.SIGINT, signal.default_int_handler)
