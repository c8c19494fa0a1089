"""Packages that only an extra of setup.py brings, and what a program says without them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

OURS = {"cfa_kernels", "trainer", "benchmarks", "tests"}


@contextmanager
def needed_by(program: str, extra: str) -> Iterator[None]:
    """End the program where an import finds no package, with one line that names the `pip install`; or at Ctrl-C.

    Args:
        program: how it was started.
        extra: the extra of setup.py that brings what it imports.

    Raises:
        ModuleNotFoundError: the module is one of this repository.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as absent:
        if not absent.name or absent.name.partition(".")[0] in OURS:
            raise
        sys.exit(
            f"error: {program} needs {absent.name}, which is not installed; in the checkout: pip install '.[{extra}]'"
        )
