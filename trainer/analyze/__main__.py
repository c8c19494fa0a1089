"""Run `python -m trainer.analyze`, see `trainer.analyze.analysis`."""

from trainer.analyze.analysis import main

if __name__ == "__main__":
    raise SystemExit(main())
