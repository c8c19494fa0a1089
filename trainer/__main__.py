"""`python -m trainer`: counterfactual DAPO from flags, YAML or nothing at all."""

import sys

from trainer.extras import needed_by

with needed_by("python -m trainer", "trainer"):
    from transformers.utils import logging

    from cfa_kernels.hf.memory import is_out_of_memory
    from trainer import processes
    from trainer.checkpoints.run_folder import Finished, Refused, open_run
    from trainer.cli import parse
    from trainer.config import TrainConfig
    from trainer.endings import Ended, Ending, even_unheard
    from trainer.rewards.calls import RewardError
    from trainer.run import set_up, train

DESCRIPTION = """Train a language model by reinforcement with counterfactual credit assignment. With no setting it
trains the embedded model on generated word problems in a few minutes on a CPU; with --model <hub name or folder> and
--dataset <hub name or file> it is the CF paper's run."""


# Problems that one line explains; others, and these elsewhere, are mistakes of ours.
_OF_SET_UP: tuple[type[Exception], ...] = (ValueError, OSError, ImportError, FloatingPointError, NotImplementedError)
_OF_TRAINING = (Refused, RewardError, OSError, ImportError, FloatingPointError, NotImplementedError)


@even_unheard()
def main(argv: list[str] | None = None) -> int:
    """Run the program: exit code 0; 1 or 2 and one line on stderr for what is wrong with settings, data or the disk."""
    argv = sys.argv[1:] if argv is None else argv
    with processes.quiet_unless_first():
        config = parse(TrainConfig, argv, prog="python -m trainer", description=DESCRIPTION)
    logging.disable_progress_bar()
    expected = _OF_SET_UP
    with Ending() as ending:
        try:
            with needed_by("python -m trainer", "trainer"):
                processes.start(config)
                with open_run(config) as folder:
                    trainer = set_up(config)
                    expected = _OF_TRAINING
                    train(trainer, folder, ending)
        except Finished as finished:
            if processes.is_first():
                print(finished)
        except Ended as ended:
            told = processes.failed(ended)
            if processes.is_first():
                print(told, file=sys.stderr)
        except expected as problem:
            return _failed(problem)
        except (MemoryError, RuntimeError) as problem:
            if processes.is_silence(problem):
                return _failed(processes.OtherProcessFailed(processes.silence(problem)))
            if isinstance(problem, RuntimeError) and not is_out_of_memory(problem):
                raise
            where = f"rank {processes.rank()}: " if processes.count() > 1 else ""
            # Of several processes the launcher ends the others, which may be waiting in the middle of a forward.
            _say(f"{where}out of memory ({problem}); lower token_budget, max_completion_length or num_generations")
            return 1
    processes.end()
    return ending.exit_code


def _failed(problem: Exception) -> int:
    """Say what ended the run, once for all its processes; give the exit code."""
    told = processes.failed(problem)
    if processes.is_first():
        _say(told)
    processes.end()
    return 1


def _say(problem: str) -> None:
    """Say in one line what went wrong."""
    print(f"error: {' '.join(problem.split())}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
