"""Kinds of credit whose steps are compared: each side of a group by a configuration, or advantages of one's own."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.research.models import Problem, clock
from cfa_kernels import (
    Batch,
    CounterfactualConfig,
    Credit,
    Entropy,
    Gradient,
    Importances,
    Masking,
    OwnFunction,
    PrefixGain,
    Rows,
    SpanRules,
    counterfactual_credit,
    packed_forward,
)
from trainer.rewards.calls import group_advantages

PLAIN = "plain"
NEAR = ", 3 nearest spans"
"""Ending of the name of an arm that is compared with the arm of all spans."""


def position(model: Any, batch: Batch) -> Importances:
    """Score units by their place."""
    return Importances([torch.arange(len(units)).float() for units in batch.units])


def length(model: Any, batch: Batch) -> Importances:
    """Score units by their number of tokens."""
    return Importances([torch.tensor([float(unit.end - unit.start) for unit in units]) for units in batch.units])


@dataclass(frozen=True)
class Groups:
    """Completions of N problems that each have right and wrong ones, G of each problem, one problem after the other."""

    rows: Rows  # N G of them
    rewards: Tensor  # (N G,)
    problems: list[Problem]  # N G, that of each completion
    size: int  # G

    @property
    def means(self) -> Tensor:
        """Mean reward of each completion's problem, (N G,)."""
        return self.rewards.view(-1, self.size).mean(1).repeat_interleave(self.size)


@dataclass(frozen=True)
class Arm:
    """A kind of credit.

    Attributes:
        right, wrong: configuration for the completions of positive, of negative advantage; None for weights of 1.
        times: factors of the two kinds of completions.
        advantages: gives every token's advantage, B tensors (T_b,), in place of all that; takes a `Judged`, which has
            the credit of `right` and `wrong` by then.
        twin: it draws, so it is asked twice; products of the two gradients hold none of the draws' noise.
    """

    right: CounterfactualConfig | None = None
    wrong: CounterfactualConfig | None = None
    times: tuple[float, float] = (1.0, 1.0)
    advantages: Callable[["Judged"], Sequence[Tensor]] | None = None
    twin: bool = False


class Judged:
    """Groups, the policy's forward of them, and what arms share."""

    def __init__(self, policy: Any, groups: Groups) -> None:
        self.seconds: dict[Any, float] = {}
        """Seconds by `clock`, of parts of a step, and of the credit of configurations and functions."""
        self.policy, self.groups = policy, groups
        self.plain = group_advantages(groups.rewards, groups.size)
        self._credits = dict[Any, Credit]()
        self.forward = self._timed("forward", lambda: packed_forward(
            policy.model, groups.rows, keep_states=True, token_budget=policy.token_budget
        ))  # fmt: skip
        self._gradient = self._timed("head", lambda: policy.gradients(self.forward))

    def gradient(self, arm: Arm) -> Tensor:
        """Compute the gradient of the sum over tokens of log-prob times an arm's advantage.

        Returns:
            (1, D), or (2, D): the arm's own and its twin's.
        """
        rows = [self.token_advantages(arm) for _ in range(1 + arm.twin)]
        return torch.stack([
            self._timed("backward", lambda: self._gradient(own))  # noqa: B023
            for own in rows
        ])  # fmt: skip

    def token_advantages(self, arm: Arm) -> Sequence[Tensor]:
        """An arm's advantage of each token, (T_b,) each."""
        right, wrong = self._credited(arm.right), self._credited(arm.wrong)
        if (own := arm.advantages) is not None:
            return self._timed(own, lambda: own(self))  # type: ignore[no-any-return]
        rows = zip(right, wrong, self.plain, strict=True)
        return [arm.times[0] * r if a > 0 else arm.times[1] * w for r, w, a in rows]

    def credit(self, config: CounterfactualConfig) -> Credit:
        """Compute the credit of the groups, once for each configuration."""
        if config not in self._credits:
            rows = self.groups.rows
            access = self.forward if config.estimator.continues else self.policy.model
            self._credits[config] = self._timed(config, lambda: counterfactual_credit(
                access, self.policy.tokenizer, rows, advantages=self.plain, rewards=self.groups.rewards, config=config,
                groups=torch.arange(len(rows)) // self.groups.size, seed=rows.lengths,
                entropies=self._entropies() if config.reads_entropies else None,
            ))  # fmt: skip
        return self._credits[config]

    def cost(self, arm: Arm) -> float:
        """Seconds by `clock` that the credit of an arm took."""
        keys = {arm.right, arm.wrong, arm.advantages}
        return (1 + arm.twin) * sum(self.seconds.get(key, 0.0) for key in keys)

    def _credited(self, config: CounterfactualConfig | None) -> list[Tensor]:
        rows = self.plain if config is None else self.credit(config).applied_to(self.plain)
        return [row.expand(n) for row, n in zip(rows, self.groups.rows.lengths, strict=True)]

    def _entropies(self) -> list[Tensor]:
        with torch.no_grad():
            return self.forward.logprobs(self.policy.temperature, return_entropy=True)[1]

    def _timed(self, key: Any, work: Callable[[], Any]) -> Any:
        start = clock(self.policy.model.device)
        result = work()
        self.seconds[key] = clock(self.policy.model.device) - start
        return result


def unscaled(judged: Judged) -> list[Tensor]:
    """Reward less the group's mean, not divided by its spread (Dr. GRPO)."""
    rewards, rows = judged.groups.rewards - judged.groups.means, judged.groups.rows
    return [reward.expand(n) for reward, n in zip(rewards, rows.lengths, strict=True)]


def ceiling(judged: Judged) -> list[Tensor]:
    """By how much each step of a completion moves the share of continuations that are right.

    A step ends where a line with a number ends, so idle lines belong to the step behind them.
    """
    policy, groups, completions = judged.policy, judged.groups, judged.groups.rows.completions
    ends = [[end for end, counts in line_ends(row, policy.tokenizer) if counts] for row in completions]
    begun = [row[:end] for row, own in zip(completions, ends, strict=True) for end in own]
    asked = [problem for problem, own in zip(groups.problems, ends, strict=True) for _ in own]
    values, advantages = iter(policy.values(asked, begun, policy.continuations)), []
    for row, own, reward, mean in zip(completions, ends, groups.rewards, groups.means, strict=True):
        value = torch.stack([mean, *(next(values) for _ in own), reward])
        advantages.append(value.diff().repeat_interleave(torch.tensor([0, *own, len(row)]).diff()))
    return advantages


def line_ends(row: Tensor, tokenizer: Any) -> list[tuple[int, bool]]:
    """Where a completion's lines end, and whether they hold a number; what stands behind the last newline is none."""
    ends, start = [], 0
    for t, token in enumerate(row.tolist(), 1):
        if "\n" in tokenizer.decode([token]):
            ends.append((t, any(c.isdigit() for c in tokenizer.decode(row[start:t]))))
            start = t
    return ends


def _mean(estimator: Any, *weights: Any, **options: Any) -> CounterfactualConfig:
    return CounterfactualConfig(estimator, *weights, normalize="mean", **options)


CF, GAIN = _mean(Masking()), _mean(PrefixGain())
NEAREST = _mean(Masking(), spans=SpanRules(max_spans=3, selection="nearest"))
INVERTED = _mean(Masking(), control="inverted")
PERMUTED, POSITION, LENGTH = (
    _mean(Masking(), control="permuted"),
    _mean(OwnFunction(position)),
    _mean(OwnFunction(length)),
)
ARMS = {
    PLAIN: Arm(),
    "CF": Arm(CF, CF),
    "prefix gain": Arm(GAIN, GAIN),
    "CF, permuted": Arm(PERMUTED, PERMUTED),
    "CF, inverted": Arm(INVERTED, INVERTED),
    "position": Arm(POSITION, POSITION),
    "length": Arm(LENGTH, LENGTH),
    "CF where right": Arm(CF),
    "prefix gain where right": Arm(GAIN),
    "permuted where right": Arm(PERMUTED),
    "position where right": Arm(POSITION),
    "CF where wrong": Arm(wrong=CF),
    "right times 4": Arm(times=(4, 1)),
    "unscaled": Arm(advantages=unscaled),
    "ceiling": Arm(advantages=ceiling, twin=True),
    f"CF{NEAR}": Arm(NEAREST, NEAREST),
    f"CF where right{NEAR}": Arm(NEAREST),
    "CF where right, spans open": Arm(_mean(Masking(), open_spans=True, completions="positive")),
    "prefix gain where right, spans open": Arm(_mean(PrefixGain(), open_spans=True, completions="positive")),
    "prefix gain permuted where right, spans open": Arm(
        _mean(PrefixGain(), control="permuted", open_spans=True, completions="positive")
    ),
    "entropy where right": Arm(_mean(Entropy(), "bilevel")),
    "OAR-G where right": Arm(_mean(Gradient("mean", 1e-3, 1), "bilevel")),
    "CF by tokens, where right": Arm(_mean(Masking(), units="tokens")),
    "OAR-P where right": Arm(_mean(Masking("mean"), "bilevel", units="tokens")),
}
"""Arms by name."""
SETS = {
    "main": list(ARMS)[: list(ARMS).index("ceiling") + 1],
    "tokens": [PLAIN, "CF where right", "entropy where right", "OAR-G where right", *list(ARMS)[-2:]],
}
"""Arms that are measured by default, and by token, of which the last two cost several steps."""


def arms_of(names: Sequence[str]) -> Mapping[str, Arm]:
    """Look up names of arms, of `SETS`, or "module:name" of an arm, a configuration or an estimator of one's own.

    Raises:
        ValueError: an unknown name.
    """
    found = {PLAIN: ARMS[PLAIN]}
    for name in [one for given in names for one in SETS.get(given, [given])]:
        if name in ARMS:
            found[name] = ARMS[name]
        elif ":" in name:
            module, _, attribute = name.partition(":")
            own = getattr(importlib.import_module(module), attribute)
            config = own if isinstance(own, CounterfactualConfig | Arm) else _mean(own)
            found[name] = config if isinstance(config, Arm) else Arm(config, config)
        else:
            known = ", ".join([*SETS, *ARMS])
            raise ValueError(f"arms must be among {known}, or module:name, got {name!r}")
    return found
