"""Shape the rewards of a training step by the experiment that its settings ask for.

The step calls `shape_rewards` once, between rewards and advantages, and knows of no experiment by name. An experiment
brings its settings and one function from sampled completions to `Shaped`.
"""

from trainer.experimental.compare_and_correct import compare_and_correct, require_fitting_prompt
from trainer.report.stages import StageTimes
from trainer.state import Batch, Shaped, Trainer


def shape_rewards(trainer: Trainer, batch: Batch, times: StageTimes) -> Shaped:
    """Shape the rewards of a batch as the settings ask; without an experiment they stay as they are."""
    if not trainer.config.compare_and_correct:
        return Shaped(batch.rewards)
    with times.during("correct"):
        return compare_and_correct(trainer, batch)


def check_experiments(trainer: Trainer) -> None:
    """Raise `ValueError` for an experiment that a run's problems and limits leave nothing to do."""
    if trainer.config.compare_and_correct:
        require_fitting_prompt(trainer)
