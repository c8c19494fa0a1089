"""Take a training step, or skip it where a number is not finite and `on_nonfinite` says so."""

import warnings
from collections.abc import Sequence

import torch

from cfa_kernels import Credit
from trainer.checks import SamplingGapError
from trainer.policy import require_finite_parameters
from trainer.report.metrics import SKIPPED, Step, length_metrics, reward_metrics
from trainer.rollouts import NonFiniteLogits
from trainer.state import Batch, Trainer
from trainer.step import training_step


def attempted_step(trainer: Trainer, step: int, problems: Sequence[int]) -> Step:
    """Train one step on some problems, by number, or record what was sampled and change nothing but the learning rate.

    Optimizer steps that the batch took before (`num_iterations` above 1) were finite, and stay.

    Raises:
        FloatingPointError: a reward, a log-prob or a gradient is not finite and steps are not to be skipped, or no
            later one could go better: a weight is not finite, or log-probs are not those of sampling.
    """
    config, trainer.sampled = trainer.config, None
    try:
        done = training_step(trainer, step, problems)
    except FloatingPointError as problem:
        sampled = trainer.sampled
        if sampled is None and isinstance(problem, NonFiniteLogits):
            sampled = Batch.unrewarded([i for i in problems for _ in range(config.num_generations)], problem.rollouts)
        if config.on_nonfinite == "stop" or sampled is None or isinstance(problem, SamplingGapError):
            raise
        require_finite_parameters(trainer.policy)
        trainer.optimizer.zero_grad()
        trainer.policy.eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch, for a step without one of the optimizer
            trainer.scheduler.step()
        return _skipped(sampled, config.num_generations, str(problem))
    if config.on_nonfinite == "skip":
        done.metrics[SKIPPED] = 0.0
    return done


def _skipped(sampled: Batch, num_generations: int, reason: str) -> Step:
    """Record B completions that nothing was learnt from: they have advantage 0, and no credit."""
    rollouts, metrics = sampled.rollouts, {SKIPPED: 1.0}
    if sampled.by_function:
        metrics |= reward_metrics(sampled.rewards, sampled.by_function, num_generations)
    notes = {b: {"skipped": reason} for b in range(len(sampled.problems))}
    return Step(
        metrics | length_metrics(rollouts), sampled.problems, rollouts, sampled.rewards,
        torch.zeros_like(sampled.rewards), Credit.of_parts(rollouts.completion_mask.shape, []), notes, reason,
    )  # fmt: skip
