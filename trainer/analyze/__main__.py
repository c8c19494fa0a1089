"""Run `python -m trainer.analyze`, see `trainer.analyze.analysis`."""

from ..extras import needed_by

with needed_by("python -m trainer.analyze", "trainer"):
    from .analysis import main

if __name__ == "__main__":
    raise SystemExit(main())
