"""`python -m trainer`: counterfactual DAPO from flags, YAML or nothing at all."""

import sys

from trainer.extras import needed_by

with needed_by("python -m trainer", "trainer"):
    from transformers.utils import logging

    from cfa_kernels.hf.memory import is_out_of_memory
    from trainer.calls import RewardError
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
_OF_TRAINING = (Refused, RewardError, OSError, ImportError, FloatingPointError, NotImplementedError)


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
            return _failed(problem)
        except (MemoryError, RuntimeError) as problem:
            if isinstance(problem, RuntimeError) and not is_out_of_memory(problem):
                raise
            return _failed(f"out of memory ({problem}); lower token_budget, max_completion_length or num_generations")
    return ending.exit_code


def _failed(problem: Exception | str) -> int:
    """Say in one line what went wrong."""
    print(f"error: {' '.join(str(problem).split())}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
