"""Reward completions and turn rewards into advantages.

A reward function follows TRL's contract
`f(prompts=, completions=, completion_ids=, **columns) -> list[float | None]`, where None abstains.
"""

import functools
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from cfa_kernels.text.rules import AnswerFormat
from trainer.rewards.calls import RewardError, called, printed
from trainer.rewards.code.isolation import Isolation
from trainer.rewards.code.reward import CodeReward
from trainer.rewards.math.reward import MathReward
from trainer.rewards.numbers import final_number, gold_number
from trainer.rewards.settings import BUILT_IN

Reward = Callable[..., list[float | None]]

STD_EPSILON = 1e-4  # TRL's, so that advantages agree with its own
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # no pattern for an answer: it has no group


def exact_match(
    *,
    completions: Sequence[str],
    answer: Sequence[str],
    answer_format: AnswerFormat | None = None,
    answer_fallback: str | None = None,
    **_: Any,
) -> list[float | None]:
    """Give 1 where the completion's number equals that of the data set's answer, else 0.

    `answer_format` and `answer_fallback` say how completions give their answer, as in `answer_text_span`; errors about
    them name the sample.
    """
    matches: list[float | None] = []
    for i, (completion, gold) in enumerate(zip(completions, answer, strict=True)):
        try:
            number = final_number(completion, answer_format, answer_fallback)
        except (TypeError, ValueError) as problem:
            raise type(problem)(f"sample {i}: {problem}") from problem
        matches.append(float(number is not None and number == gold_number(gold)))
    return matches


def load_reward(name: str, *, timeout: float = 10.0, isolation: Isolation = "auto", **answers: Any) -> Reward:
    """Find a reward function by name: one of the program's, or `module:function` on the import path.

    `exact_match` reads completions by `answers`, the run's `answer_format` and `answer_fallback`; a function of another
    module knows its own. `timeout` (seconds) and `isolation` are those of `MathReward` and `CodeReward`.
    """
    if name == "math_verify":
        return MathReward(timeout)
    if name == "code":
        return CodeReward(timeout, isolation)
    if name != "exact_match" and ":" not in name:
        known = ", ".join(map(repr, BUILT_IN))
        raise ValueError(f"reward_funcs: {name!r} is neither one of {known} nor of the form 'module:function'")
    reward = exact_match if name == "exact_match" else _imported("reward_funcs", name)
    given = any(value is not None for value in answers.values())
    return functools.partial(exact_match, **answers) if reward is exact_match and given else reward


def load_rewards(names: Sequence[str], **options: Any) -> dict[str, Reward]:
    """Load reward functions by the name they are reported under, the last part of `names`; no two have one name.

    `options` are those of `load_reward`.
    """
    full_names: dict[str, str] = {}
    for full_name in names:
        name = full_name.rpartition(":")[2]
        if name in full_names:
            raise ValueError(
                f"reward_funcs: {full_names[name]!r} and {full_name!r} would both be reported as {name!r}; rename one"
            )
        full_names[name] = full_name
    return {name: load_reward(full_name, **options) for name, full_name in full_names.items()}


def load_answer_format(name: str | None) -> AnswerFormat | None:
    """Load a run's form of answers by its setting: `module:function` on the import path, or a pattern as it stands."""
    return _imported("answer_format", name) if name is not None and _REFERENCE.fullmatch(name) else name


def _imported(setting: str, name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as problem:  # a module may raise anything while it is imported
        said = f"{type(problem).__name__}: {printed(problem)}"
        raise ValueError(f"{setting}: cannot import {name!r}: {said}") from problem
    if not callable(found):
        raise ValueError(f"{setting}: {name!r} is a {type(found).__name__}, not a function")
    return found


def compute_rewards(
    functions: dict[str, Reward],
    given: Mapping[str, Sequence[Any]],
    *,
    weights: Sequence[float] = (),
    names: Sequence[str] | None = None,
) -> tuple[Tensor, dict[str, list[float | None]]]:
    """Call each reward function on B samples and add the results up, by `weights` if there are any; None abstains.

    A reward is any real number: a float, an integer, a bool, a NumPy number, a tensor without dimensions. `given` are
    the arguments, B values of each; `names` what an error calls the samples, by default "sample 0", "sample 1", ...

    Returns:
        The (B,) fp32 sums and each function's own list, without its weight.

    Raises:
        RewardError: a function raises, returns no list, the wrong number of values or a value that is no real number,
            or every function abstains on a sample.
        FloatingPointError: a reward or a sum is not finite in float32. Messages name function, sample and value.
    """
    by_function: dict[str, list[float | None]] = {}
    samples = names or [f"sample {i}" for i in range(len(given["completions"]))]
    total, voted = torch.zeros(len(samples)), [False] * len(samples)
    for (name, function), weight in zip(functions.items(), weights or [1.0] * len(functions), strict=True):
        by_function[name] = rewards_by(name, function, samples, given)
        for i, number in enumerate(by_function[name]):
            if number is not None:
                total[i] += weight * number
                voted[i] = True
    if not all(voted):
        raise RewardError(f"{samples[voted.index(False)]}: every reward function returned None")
    if not total.isfinite().all():
        i = int((~total.isfinite()).nonzero()[0])
        raise FloatingPointError(f"{samples[i]}: the sum of its rewards is {total[i].item()}")
    return total, by_function


def rewards_by(
    name: str, function: Reward, samples: Sequence[str], given: Mapping[str, Sequence[Any]]
) -> list[float | None]:
    """Call one reward function on B samples, and check what it gives; arguments and errors are `compute_rewards`'."""
    values: Any = called(name, function, samples, given)
    is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    if not is_list and getattr(values, "ndim", None) != 1:
        raise RewardError(f"reward {name}: returned a {type(values).__name__}, expected a list of numbers")
    if len(values) != len(samples):
        raise RewardError(f"reward {name}: returned {len(values)} values for {len(samples)} completions")
    return [v if v is None else _real(v, f"{samples[i]}: reward {name}") for i, v in enumerate(values)]


def _real(value: Any, what: str) -> float:
    """The number that a reward function gave, or an error that begins with `what`."""
    number: Any = value.item() if getattr(value, "ndim", None) == 0 else value
    if not isinstance(number, Real):
        raise RewardError(f"{what} is {printed(value, repr)}, expected a real number or None")
    if not abs(number) <= torch.finfo(torch.float32).max:  # type: ignore[operator]
        too_long = isinstance(number, int) and abs(number) > 10**20
        raise FloatingPointError(
            f"{what} is {'an integer' if too_long else printed(value, format)}, beyond what float32 holds"
        )
    return float(number)


def group_advantages(rewards: Tensor, num_generations: int, scale_rewards: str = "group") -> Tensor:
    """Compute (reward - group mean) / (std + 1e-4) of (B,) rewards, groups side by side; (B,) fp32.

    `scale_rewards` names the standard deviation: the group's, the batch's, or none (no division). A group whose
    rewards are all equal has advantage exactly 0, so that nothing spends work on it.
    """
    groups = rewards.float().view(-1, num_generations)  # (groups, G)
    centred = groups - groups.mean(1, keepdim=True)
    if scale_rewards == "group":
        centred = centred / (groups.std(1, keepdim=True) + STD_EPSILON)
    elif scale_rewards == "batch":
        centred = centred / (rewards.float().std() + STD_EPSILON)
    elif scale_rewards != "none":
        raise ValueError(f"scale_rewards must be 'group', 'batch' or 'none', got {scale_rewards!r}")
    mixed = groups.amax(1, keepdim=True) > groups.amin(1, keepdim=True)
    return torch.where(mixed, centred, torch.zeros_like(centred)).flatten()
