"""Run `python -m trainer.judge`, see `trainer.analyze.judge`."""

from trainer.extras import needed_by

with needed_by("python -m trainer.judge", "trainer"):
    from trainer.analyze.judge import main

if __name__ == "__main__":
    raise SystemExit(main())
