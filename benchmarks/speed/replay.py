"""Replay recorded rollouts to a training step: the contender's input, its clock, and TRL's trainer.

`step_peers.py` holds the contenders themselves.
"""

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.harness.race import Absent
from benchmarks.harness.workloads import Job, JobRollouts
from cfa_kernels import CounterfactualConfig
from cfa_kernels.credit.deferred import DeferredCredit
from cfa_kernels.model.check.verify import check_trainable
from cfa_kernels.model.parts import causal_lm

EPSILON, EPSILON_HIGH = 0.2, 0.28

Weights = list[Tensor]
"""For each completion (T_b,) fp32."""


@dataclass
class Replay:
    """Input of a contender.

    Attributes:
        policy: the model to train, whose trainable parameters take the gradient.
        rollouts: with ids on the policy's device.
        most_rows: of a padded micro-batch; by default TRL's.
    """

    policy: nn.Module
    rollouts: JobRollouts
    most_rows: int = 8
    _trl: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    @property
    def micro_batch(self) -> int:
        """Rows per padded micro-batch."""
        return min(self.most_rows, len(self.job.completions))

    @property
    def job(self) -> Job:
        return self.rollouts.job

    @property
    def causal(self) -> PreTrainedModel:
        return causal_lm(self.policy)

    @property
    def device(self) -> torch.device:
        return next(self.policy.parameters()).device

    def advantages(self, rows: Sequence[int]) -> Tensor:
        """Return the advantages of some rows, on the device."""
        return self.rollouts.advantages[list(rows)].to(self.device)

    def trl(self, *, micro_batch: int | None = None, **settings: bool) -> Any:
        """TRL's trainer around the policy, made once for each of the settings that `_trl_trainer` takes."""
        micro_batch = micro_batch or self.micro_batch
        key = micro_batch, *sorted(settings.items())
        if key not in self._trl:
            self._trl[key] = _trl_trainer(self.policy, self.rollouts, micro_batch, **settings)
        return self._trl[key]


class Mark(NamedTuple):
    """A change of part: what runs from here on, and when, on the host and in the device's queue."""

    part: str | None
    wall: float
    cpu: float
    event: Any


class Stopwatch:
    """Seconds of each part of one step, without a wait in between; a part within another counts to the inner only.

    `inside` makes a context from a part's name, which is entered with the part.
    """

    def __init__(self, device: torch.device, inside: Callable[[str], Any] = torch.profiler.record_function) -> None:
        self._device, self._inside = device, inside
        self._marks: list[Mark] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        outer = self._marks[-1].part if self._marks else None
        self._marks.append(self._mark(name))
        with self._inside(name):
            yield
        self._marks.append(self._mark(outer))

    def _mark(self, part: str | None) -> Mark:
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return Mark(part, time.perf_counter(), time.process_time(), event)

    @property
    def parts(self) -> list[str | None]:
        """The part that runs after each change of part; None between parts."""
        return [mark.part for mark in self._marks]

    def seconds(self) -> dict[str, float]:
        """Seconds of each part until the device has done it; waits for the device."""
        if self._device.type != "cuda":
            return self.host_seconds()
        torch.cuda.synchronize(self._device)
        return self._sums(lambda begin, end: begin.event.elapsed_time(end.event) / 1e3)

    def host_seconds(self) -> dict[str, float]:
        """Seconds that the host took to launch each part."""
        return self._sums(lambda begin, end: end.wall - begin.wall)

    def cpu_seconds(self) -> dict[str, float]:
        """Seconds of the processor in each part."""
        return self._sums(lambda begin, end: end.cpu - begin.cpu)

    def _sums(self, between: Callable[[Mark, Mark], float]) -> dict[str, float]:
        sums = {"credit": 0.0, "update": 0.0}
        for begin, end in itertools.pairwise(self._marks):
            if begin.part is not None:
                sums[begin.part] = sums.get(begin.part, 0.0) + between(begin, end)
        return sums


Step = Callable[[Replay, Stopwatch], tuple[Tensor, Weights | None]]
"""Loss (detached, of the whole batch) and the weights it used, None for 1 throughout."""


@dataclass(frozen=True)
class StepPeer:
    """A contender for the step.

    Attributes:
        run: does it.
        kind: which weights it is to use: "plain" (1), "counterfactual" (the CF paper's), "nearest" (the same, of the
            spans nearest to the answer) or "found" (the same, of spans and answers that it finds itself).
        head_products: products of a row with the head in the update while the head is frozen; one more if it trains.
        head_rows: which rows those are: "active" tokens (with an advantage), all "tokens", or, of padded batches
            and on a CPU only, all "positions".
        own_policy: it changes the policy's layers, so it works on a policy of its own.
        prepare: what is done once for a policy, neither counted nor timed.
    """

    run: Step
    kind: str
    head_products: int
    head_rows: str
    own_policy: bool = False
    prepare: Callable[[Replay], Any] = lambda replay: check_trainable(replay.causal)


def _trl_trainer(
    policy: nn.Module, rollouts: JobRollouts, micro_batch: int, *, credited: bool = False, log_entropy: bool = True
) -> Any:
    """A `GRPOTrainer` that finds `recorded` where it would sample and score completions.

    It is never asked to `train`, which would put Liger's kernels into the model. With `credited` it is a
    `PackedGRPOTrainer`, with `log_entropy` or without, which masks the spans of what was recorded.
    """
    try:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
    except ImportError as error:
        raise Absent(f"TRL does not import: {error}") from error

    class Replaying(GRPOTrainer):
        recorded: dict[str, Tensor]
        folder: tempfile.TemporaryDirectory[str]

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Tensor]:
            self._calculate_rewards(inputs, [], [], [row.tolist() for row in rollouts.job.completions])
            return dict(self.recorded)

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
            return rollouts.rewards.to(self.accelerator.device)[:, None]

    device, dtype = next(policy.parameters()).device, next(policy.parameters()).dtype
    rows = len(rollouts.job.completions)
    if rows % micro_batch or micro_batch > rows:
        raise ValueError(f"micro_batch must divide the {rows} rows, got {micro_batch}")
    folder = tempfile.TemporaryDirectory()  # TRL makes one, and nothing is ever put there
    settings = GRPOConfig(
        folder.name, use_cpu=device.type == "cpu", bf16=dtype == torch.bfloat16, gradient_checkpointing=False,
        per_device_train_batch_size=micro_batch, gradient_accumulation_steps=rows // micro_batch,
        num_generations=rollouts.group, max_completion_length=max(map(len, rollouts.job.completions)) + 1,
        loss_type="dapo", epsilon=EPSILON, epsilon_high=EPSILON_HIGH, beta=0.0, temperature=1.0, report_to=[],
    )  # fmt: skip
    trainer = (_credited(Replaying, log_entropy) if credited else Replaying)(
        model=policy, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["replayed"] * rows}), processing_class=rollouts.job.tokenizer,
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = settings.gradient_accumulation_steps
    trainer.recorded, trainer.folder = padded_layout(rollouts), folder
    return trainer


def _credited(replaying: type, log_entropy: bool) -> type:
    """A class of `PackedGRPOTrainer` that credits what `replaying` recorded."""
    try:
        from cfa_kernels.integrations.trl import CounterfactualMixin
    except ImportError as error:  # this TRL is older than it takes
        raise Absent(str(error)) from error

    class Crediting(CounterfactualMixin, replaying):
        """Its `stopwatch` clocks the credit; `weights` are those of the tokens, a tensor (T_b,) for each completion."""

        stopwatch: Stopwatch
        weights: Weights

        def __init__(self, **options: Any) -> None:
            super().__init__(**options, credit=CounterfactualConfig(), log_entropy=log_entropy)

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Tensor]:
            with self.stopwatch.part("credit"):
                output = super()._generate_and_score_completions(inputs)
            if self._deferred is not None:  # credit is assigned from the training forwards that follow
                self._deferred.by_forward = self._clocked(self._deferred.by_forward)
            return output

        def _clocked(self, assign: Callable[..., None]) -> Callable[..., None]:
            def clocked(*given: Any) -> None:
                with self.stopwatch.part("credit"):
                    assign(*given)

            return clocked

        def _report(self, batch: DeferredCredit) -> None:
            super()._report(batch)
            self.weights = batch.take(range(len(batch.batch))).weights

    return Crediting


def padded_ids(rows: Sequence[Tensor], side: str = "right") -> tuple[Tensor, Tensor]:
    """Pad ids with 0 on a side, (B, longest), and make the mask of what is real."""
    ids, mask = (
        nn.utils.rnn.pad_sequence(list(column), batch_first=True, padding_side=side)
        for column in (rows, [torch.ones_like(row) for row in rows])
    )
    return ids, mask


def padded_layout(rollouts: JobRollouts) -> dict[str, Tensor]:
    """The batch as TRL lays it out: prompts padded on the left, completions on the right."""
    layout = dict(zip(("prompt_ids", "prompt_mask"), padded_ids(rollouts.job.prompts, side="left"), strict=True))
    layout |= zip(("completion_ids", "completion_mask"), padded_ids(rollouts.job.completions), strict=True)
    advantages = rollouts.advantages.to(layout["prompt_ids"].device)
    return layout | {"advantages": advantages, "num_items_in_batch": layout["completion_mask"].sum()}


def trl_update(replay: Replay, trainer: Any) -> Tensor:
    """One optimizer step's worth of `GRPOTrainer.training_step`, the optimizer left out."""
    trainer.recorded["advantages"] = replay.rollouts.advantages.to(replay.device)
    trainer._buffered_inputs, trainer._step = None, 0
    steps = trainer.args.gradient_accumulation_steps
    # Each loss comes back divided by the number of micro-batches, only for the log.
    return torch.stack([trainer.training_step(trainer.model, None, None) for _ in range(steps)]).sum()
