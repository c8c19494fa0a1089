"""Packages that only an extra of setup.py brings, and what a program says without them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OURS = {"cfa_kernels", __name__.partition(".")[0], "benchmarks", "tests"}  # whose absence is a mistake of ours


def program(module: str) -> str:
    """Name a module's program as one calls it: by its entry point, if the running one was called so."""
    entry = {"trainer": "cfa-train", "trainer.analyze": "cfa-analyze", "trainer.analyze compare": "cfa-compare"}
    return entry[module] if Path(sys.argv[0]).name in entry.values() else f"python -m {module}"


def installing(extra: str) -> str:
    """Give the command that installs an `extra`: of the package that is installed, or of the checkout that runs."""
    return f"pip install '{'cfa_kernels' if __name__.startswith('cfa_trainer') else '.'}[{extra}]'"


@contextmanager
def needed_by(program: str, extra: str) -> Iterator[None]:
    """End `program` where an import finds no package, with one line that names the `extra` to install."""
    try:
        yield
    except ModuleNotFoundError as absent:
        if not absent.name or absent.name.partition(".")[0] in _OURS:
            raise
        sys.exit(f"error: {program} needs {absent.name}, which is not installed: {installing(extra)}")
