"""Run `python -m trainer.warmup`, see `trainer.embedded.warmup`."""

import sys

from trainer.embedded.warmup import main

if __name__ == "__main__":
    sys.exit(main())
