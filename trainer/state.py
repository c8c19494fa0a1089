"""Hold the setup of a run, and the rollouts that one step trains on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from cfa_kernels import Credit, Rows
from cfa_kernels.credit.nothing import Nothing

from .config import TrainConfig
from .data import Row, encode_prompts
from .processes import whole_weights
from .rewards.built_in import ARGUMENTS, CONTENTS
from .rewards.calls import Reward, RewardLog, compute_rewards
from .rollouts.engine import Engine, Rollouts


def arguments(rows: Sequence[Mapping[str, Any]], rollouts: Rollouts) -> dict[str, Sequence[Any]]:
    """Collect the arguments of reward functions: columns of B rows of the data, and the samples for them."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    sampled = columns["question"], rollouts.texts, rollouts.ids()
    return {**dict(zip(ARGUMENTS, sampled, strict=True)), **columns, CONTENTS: rollouts.contents or rollouts.texts}


@dataclass
class Trainer:
    """Setup of a run, made once and used by every step."""

    config: TrainConfig
    policy: nn.Module
    tokenizer: PreTrainedTokenizerBase
    engine: Engine
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    reference: nn.Module | None  # for the KL term: a frozen copy, or the policy, whose adapter is then off
    rewards: dict[str, Reward]
    rows: list[Row]
    prompts: list[list[int]]
    held_out: list[Row]
    held_out_prompts: list[list[int]]
    grader: Reward  # solved where it gives 1 or more
    shape: Callable[["Trainer", "Samples", "Shaped"], "Shaped"] | None = None  # an experiment on rewards and credit
    examples: Sequence[Row] = ()  # worked ones before each question

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Name the weights that an optimizer step changes, tied ones once."""
        return {name: weight for name, weight in self.policy.named_parameters() if weight.requires_grad}

    def sample(
        self, keys: Sequence[tuple[int, ...]], prompts: Sequence[Sequence[int]] | None = None,
        names: Sequence[str] | None = None,
    ) -> Rollouts:  # fmt: skip
        """Sample a completion for each key by the run's settings; an error calls the prompts by `names`.

        A key's last but one integer is the number of the problem, whose prompt is the default.
        """
        config, own = self.config, prompts or [self.prompts[key[-2]] for key in keys]
        with whole_weights(self.policy):
            return self.engine(
                own, max_completion_length=config.max_completion_length, keys=keys, temperature=config.temperature,
                top_p=config.top_p, names=names,
            )  # fmt: skip

    def reward(
        self, rows: Sequence[Row], rollouts: Rollouts, names: Sequence[str], keys: Sequence[tuple[int, ...]]
    ) -> "Samples":
        """Put completions, drawn with `keys` for rows of the data, together with their rewards."""
        log = RewardLog(keys[0][1] - 1, self.config.max_steps)
        columns, weights = arguments(rows, rollouts), self.config.reward_weights
        rewards, by_function = compute_rewards(self.rewards, names, columns, weights, log)
        return Samples(keys, rows, rollouts, rewards, by_function, log.metrics, log.rows(len(rows)))

    def encode(self, question: str) -> list[int]:
        """Encode the prompt of a question by the run's settings."""
        return encode_prompts([Row({"question": question})], self.tokenizer, self.config, examples=self.examples)[0]


@dataclass(frozen=True)
class Samples:
    """B sampled completions and their rewards, the groups of a problem side by side."""

    keys: Sequence[tuple[int, ...]]  # B keys that the completions were drawn with; the last but one is the problem
    rows: Sequence[Row]  # B rows of the data
    rollouts: Rollouts
    rewards: Tensor  # (B,) fp32, summed over reward functions; nan where all abstain
    by_function: Mapping[str, list[float | None]] = field(default_factory=dict)  # B values of each reward function
    logged: Sequence[tuple[str, float]] = ()  # metrics that reward functions logged
    extra: Sequence[Mapping[str, Any]] = ()  # B records of what they logged of completions


def joined(parts: Sequence[Any]) -> Any:
    """Put together, one after the other, what several processes hold of their rows: records, lists and tensors."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([*parts])
    if isinstance(first, Rows):
        return Rows(*(joined([getattr(part, name) for part in parts]) for name in ("prompts", "completions")))
    if is_dataclass(first) and not isinstance(first, type):
        return replace(first, **{name: joined([vars(part)[name] for part in parts]) for name in vars(first)})
    if isinstance(first, Mapping):
        return {name: joined([part[name] for part in parts]) for name in first}
    return [one for part in parts for one in part] if isinstance(first, Sequence) else first


@dataclass(frozen=True)
class Shaped:
    """Result of an experiment on the rewards of B completions."""

    rewards: Tensor  # (B,) fp32, to be compared within groups
    edits: list[Tensor] | None = None  # B tensors (T_b,) fp32: 0 on tokens that get no credit; None for 1 everywhere
    metrics: Mapping[str, float] = field(default_factory=dict)  # figures to report
    notes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # by sample, what is logged with it


@dataclass(frozen=True)
class Step:
    """Record of one step: metrics under TRL's names plus `credit/*`, and the batch of B samples they came from."""

    metrics: dict[str, float]
    batch: Samples
    advantages: Tensor  # (B,)
    credit: Credit
    notes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # by sample, what is logged with it
    nothing: Nothing | None = None  # why it taught nothing, or got little credit
