"""`python -m trainer`: counterfactual DAPO from flags, YAML or nothing at all."""

import sys

from trainer.extras import needed_by

with needed_by("python -m trainer", "trainer"):
    from transformers.utils import logging

    from trainer.checkpoints.run_folder import Finished, Refused, open_run
    from trainer.cli import parse
    from trainer.config import TrainConfig
    from trainer.endings import Ended, Ending
    from trainer.run import set_up, train

DESCRIPTION = """Train a language model by reinforcement with counterfactual credit assignment. With no setting it
trains the embedded model on generated word problems in a few minutes on a CPU; with --model <hub name or folder> and
--dataset <hub name or file> it is the CF paper's run."""


# Problems that one line explains; others, and these elsewhere, are mistakes of ours.
_OF_SET_UP: tuple[type[Exception], ...] = (ValueError, OSError, ImportError, FloatingPointError, NotImplementedError)
_OF_TRAINING: tuple[type[Exception], ...] = (Refused, OSError, ImportError, FloatingPointError)


def main(argv: list[str] | None = None) -> int:
    """Run the program: exit code 0; 1 or 2 and one line on stderr for what is wrong with settings, data or the disk."""
    argv = sys.argv[1:] if argv is None else argv
    config = parse(TrainConfig, argv, prog="python -m trainer", description=DESCRIPTION)
    logging.disable_progress_bar()
    expected = _OF_SET_UP
    with Ending() as ending:
        try:
            with needed_by("python -m trainer", "trainer"), open_run(config) as folder:
                trainer = set_up(config)
                expected = _OF_TRAINING
                train(trainer, folder, ending)
        except Finished as finished:
            print(finished)
        except Ended:
            print("ended before the first step; nothing was written", file=sys.stderr)
        except expected as problem:
            print(f"error: {problem}", file=sys.stderr)
            return 1
    return ending.exit_code


if __name__ == "__main__":
    sys.exit(main())
