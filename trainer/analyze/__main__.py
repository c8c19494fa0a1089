"""Run `python -m trainer.analyze`, see `trainer.analyze.analysis`."""

import sys

from trainer.analyze.analysis import main

if __name__ == "__main__":
    sys.exit(main())
