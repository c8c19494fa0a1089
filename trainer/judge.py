"""Run `python -m trainer.judge`, see `trainer.analyze.judge`."""

import sys

from trainer.analyze.judge import main

if __name__ == "__main__":
    sys.exit(main())
