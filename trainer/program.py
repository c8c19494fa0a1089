"""Train by settings: check them, set up, run, and say in one line what is wrong."""

import atexit
import gc
import sys
from typing import TextIO

from transformers.utils import logging

from cfa_kernels.model.memory import is_out_of_memory

from . import processes
from .checkpoints.run_folder import Finished, Refused, open_run
from .cli import refusing
from .config import TrainConfig
from .endings import Ended, Ending
from .extras import needed_by, program
from .rewards.calls import RewardError
from .run import set_up, train
from .settings import TrainSettings

# Problems that one line explains; others, and a ValueError elsewhere than in set-up, are mistakes of ours.
_PROBLEMS = (Refused, RewardError, OSError, ImportError, FloatingPointError, NotImplementedError)


def main(settings: TrainSettings) -> int:
    """Run the program: exit code 0; 1 or 2 and one line on stderr for what is wrong with settings, data or the disk."""
    with refusing(program("trainer")):
        config = TrainConfig(**vars(settings))
    logging.disable_progress_bar()
    expected: tuple[type[Exception], ...] = (ValueError, *_PROBLEMS)
    with Ending() as ending:
        try:
            with needed_by(program("trainer"), "trainer"):
                processes.start(config)
                with open_run(config) as folder:
                    trainer = set_up(config, folder.started)
                    expected = _PROBLEMS
                    gc.collect()
                    gc.freeze()  # to look at what stays, modules and tokenizer, takes a fifth of a second each time
                    atexit.register(gc.unfreeze)  # else modules outlive the interpreter; Triton 3.9 calls that a leak
                    train(trainer, folder, ending)
        except Finished as finished:
            _say(str(finished), sys.stdout)
        except Ended as ended:
            _say(processes.describe_failure(ended))
        except Exception as problem:
            exhausted = isinstance(problem, MemoryError) or is_out_of_memory(problem)
            if not (exhausted or isinstance(problem, expected) or processes.is_silence(problem)):
                raise
            if exhausted:
                # The launcher ends the other processes, which may be waiting in the middle of a forward.
                where = f"rank {processes.rank()}: " if processes.count() > 1 else ""
                hint = "lower token_budget, max_completion_length or num_generations"
                print(f"error: {where}out of memory ({' '.join(str(problem).split())}); {hint}", file=sys.stderr)
                return 1
            _say(f"error: {' '.join(processes.describe_failure(problem).split())}")
            processes.end()
            return 1
    processes.end()
    return ending.exit_code


def _say(text: str, stream: TextIO | None = None) -> None:
    if processes.rank() == 0:
        print(text, file=stream or sys.stderr)
