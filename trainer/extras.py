"""Packages that only an extra of setup.py brings, and what a program says without them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_OURS = {"cfa_kernels", "trainer", "benchmarks", "tests"}  # modules whose absence is a mistake of ours


@contextmanager
def needed_by(program: str, extra: str) -> Iterator[None]:
    """End `program` where an import finds no package, with one line that names the `extra` to install; or at Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as absent:
        if not absent.name or absent.name.partition(".")[0] in _OURS:
            raise
        sys.exit(
            f"error: {program} needs {absent.name}, which is not installed; in the checkout: pip install '.[{extra}]'"
        )
