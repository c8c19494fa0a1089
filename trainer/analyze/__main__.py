"""Run `python -m trainer.analyze`, `cfa-analyze` or `cfa-compare`: see `analysis`."""

import sys

from ..extras import needed_by, program

with needed_by(program("trainer.analyze"), "trainer"):
    from .analysis import main


def compare() -> int:
    """Compare runs: the entry point `cfa-compare`."""
    return main(["compare", *sys.argv[1:]])


if __name__ == "__main__":
    raise SystemExit(main())
