"""Run `python -m trainer.warmup`, see `trainer.embedded.warmup`."""

from trainer.extras import needed_by

with needed_by("python -m trainer.warmup", "trainer"):
    from trainer.embedded.warmup import main

if __name__ == "__main__":
    raise SystemExit(main())
