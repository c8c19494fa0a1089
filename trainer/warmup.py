"""Run `python -m trainer.warmup`, see `trainer.embedded.warmup`."""

from trainer.embedded.warmup import main

if __name__ == "__main__":
    raise SystemExit(main())
