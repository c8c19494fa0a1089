"""Run `python -m trainer.judge`, see `trainer.analyze.judge`."""

from trainer.analyze.judge import main

if __name__ == "__main__":
    raise SystemExit(main())
