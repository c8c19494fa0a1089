"""Run `python -m trainer.analyze`, `cfa-analyze` or `cfa-compare`: see `analysis`."""

from ..extras import needed_by, program

with needed_by(program("trainer.analyze"), "trainer"):
    from .analysis import main

if __name__ == "__main__":
    raise SystemExit(main())
