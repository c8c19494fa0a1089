"""Run the sampling before a training step in each contender's own way, made to sample what was recorded."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from benchmarks.harness.race import Contender, Lap, WrongAnswer
from benchmarks.harness.workloads import SEED
from benchmarks.speed.replay import Replay
from trainer.rollouts import generate


class _Recorded(LogitsProcessor):
    """Leaves one token possible for each row: that of its recorded completion, then the end."""

    def __init__(self, completions: Sequence[Tensor], end: int) -> None:
        self._left = [[*completion.tolist(), end] for completion in completions]
        self._end, self._position = end, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) in; 0 at the recorded token and -inf elsewhere out."""
        at, self._position = self._position, self._position + 1
        tokens = torch.tensor([[row[at] if at < len(row) else self._end] for row in self._left], device=scores.device)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)


@contextlib.contextmanager
def _sampling_what_was_recorded(replay: Replay) -> Iterator[None]:
    """Whatever samples from the policy gets the recorded completions, at the cost of sampling them."""
    causal, job = replay.causal, replay.job
    sample = causal.generate

    def recorded(*args: Any, logits_processor: Any = None, **kwargs: Any) -> Any:
        forced = _Recorded(job.completions, job.tokenizer.eos_token_id)
        return sample(*args, logits_processor=LogitsProcessorList([*(logits_processor or []), forced]), **kwargs)

    with mock.patch.object(causal, "generate", recorded):
        yield


def sample_with_trl(replay: Replay) -> list[list[int]]:
    """TRL's own way to transformers' `generate`."""
    trainer = replay.trl()
    prompts = [prompt.tolist() for prompt in replay.job.prompts]
    with _sampling_what_was_recorded(replay):
        return trainer._generate_single_turn(prompts, None, {}, replay.rollouts.group)[0]


def sample_with_ours(replay: Replay) -> list[list[int]]:
    """The trainer's `generate`."""
    job = replay.job
    with _sampling_what_was_recorded(replay):
        rollouts = generate(
            replay.policy,
            job.tokenizer,
            [prompt.tolist() for prompt in job.prompts],
            max_completion_length=max(map(len, job.completions)) + 1,
            keys=[(SEED, b) for b in range(len(job.prompts))],
        )
    return rollouts.ids()


def sampling_contenders(replay: Replay) -> list[Contender]:
    """Both ways to sample, which must give what was recorded."""
    end = replay.job.tokenizer.eos_token_id

    def check(sampled: list[list[int]]) -> None:
        if sampled != [[*completion.tolist(), end] for completion in replay.job.completions]:
            raise WrongAnswer("other completions were sampled than those recorded")

    runs = {"TRL": sample_with_trl, "ours": sample_with_ours}
    return [Contender(name, functools.partial(run, replay), check) for name, run in runs.items()]


def with_sampling(lap: Lap, sampling: Lap) -> Lap:
    """A step's lap with the median of the sampling before it on top of every round."""
    if not sampling.seconds or not lap.seconds:
        return replace(lap, seconds=[], absent=lap.absent or sampling.absent, refused=lap.refused or sampling.refused)
    seconds = [sampling.median + step for step in lap.seconds]
    return replace(lap, seconds=seconds, facts={**lap.facts, "sampling_seconds": sampling.median})
