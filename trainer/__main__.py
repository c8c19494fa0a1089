"""`python -m trainer`: counterfactual DAPO from flags, YAML or nothing at all."""

import contextlib
import os
import sys
import time

from trainer.extras import needed_by

with needed_by("python -m trainer", "trainer"):
    from transformers.utils import logging

    from cfa_kernels.hf.memory import is_out_of_memory
    from trainer import processes
    from trainer.checkpoints.run_folder import Finished, Refused, open_run
    from trainer.cli import parse
    from trainer.config import TrainConfig
    from trainer.endings import Ended, Ending, ignore_broken_pipe
    from trainer.rewards.calls import RewardError
    from trainer.run import set_up, train

DESCRIPTION = """Train a language model by reinforcement with counterfactual credit assignment. With no setting it
trains the embedded model on generated word problems in a few minutes on a CPU; with --model <hub name or folder> and
--dataset <hub name or file> it is the CF paper's run."""


# Problems that one line explains; others, and a ValueError elsewhere than in set-up, are mistakes of ours.
_PROBLEMS = (Refused, RewardError, OSError, ImportError, FloatingPointError, NotImplementedError)


@ignore_broken_pipe()
def main(argv: list[str] | None = None) -> int:
    """Run the program: exit code 0; 1 or 2 and one line on stderr for what is wrong with settings, data or the disk."""
    try:
        with contextlib.ExitStack() as unheard:
            if os.environ.get("RANK", "0") != "0":  # of several processes the first one speaks
                nowhere = unheard.enter_context(open(os.devnull, "w"))
                unheard.enter_context(contextlib.redirect_stdout(nowhere))
                unheard.enter_context(contextlib.redirect_stderr(nowhere))
            config = parse(
                TrainConfig, sys.argv[1:] if argv is None else argv, prog="python -m trainer", description=DESCRIPTION
            )
    except SystemExit as wrong:
        if os.environ.get("RANK", "0") != "0" and wrong.code:
            time.sleep(30)  # the launcher ends this one when the first has said why it ends
        raise
    logging.disable_progress_bar()
    expected: tuple[type[Exception], ...] = (ValueError, *_PROBLEMS)
    with Ending() as ending:
        try:
            with needed_by("python -m trainer", "trainer"):
                processes.start(config)
                with open_run(config) as folder:
                    trainer = set_up(config)
                    expected = _PROBLEMS
                    train(trainer, folder, ending)
        except Finished as finished:
            if processes.is_first():
                print(finished)
        except Ended as ended:
            said = processes.failed(ended)
            if processes.is_first():
                print(said, file=sys.stderr)
        except expected as problem:
            return _fail(problem)
        except (MemoryError, RuntimeError) as problem:
            if processes.is_silence(problem):
                return _fail(processes.OtherProcessFailed(processes.silence(problem)))
            if isinstance(problem, RuntimeError) and not is_out_of_memory(problem):
                raise
            where = f"rank {processes.rank()}: " if processes.count() > 1 else ""
            # Of several processes the launcher ends the others, which may be waiting in the middle of a forward.
            _say(f"{where}out of memory ({problem}); lower token_budget, max_completion_length or num_generations")
            return 1
    processes.end()
    return ending.exit_code


def _fail(problem: Exception) -> int:
    """Say what ended the run, once for all its processes; give the exit code."""
    said = processes.failed(problem)
    if processes.is_first():
        _say(said)
    processes.end()
    return 1


def _say(problem: str) -> None:
    print(f"error: {' '.join(problem.split())}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
