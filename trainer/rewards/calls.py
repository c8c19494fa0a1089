"""Call reward functions, add their rewards up, and say which function failed, on which row and where in its code."""

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.rollouts import Rollouts

Reward = Callable[..., list[float | None]]
"""TRL's contract: `f(prompts=, completions=, completion_ids=, **columns)`; None abstains."""

ARGUMENTS = ("prompts", "completions", "completion_ids")
FAILURES = (Exception, SystemExit)
"""Whatever a user's code raises that is no signal."""


class RewardError(ValueError):
    """A reward function did not return rewards; the message names it and, if it can be known, the row."""


def require_callable(functions: Mapping[str, Reward], columns: Mapping[str, Any]) -> None:
    """Raise `ValueError` naming the first reward function that cannot be called with `columns` of the data."""
    for name, function in functions.items():
        try:
            signature = inspect.signature(function)
        except ValueError:  # of a builtin that does not say
            continue
        try:
            signature.bind(**dict.fromkeys([*ARGUMENTS, *columns]))
        except TypeError as problem:
            raise ValueError(
                f"reward {name}: {problem}; it is called with prompts, completions, completion_ids and the columns "
                f"{sorted(columns)} by name, and takes those that it does not read by **others"
            ) from problem


def arguments(columns: Mapping[str, Sequence[Any]], rollouts: Rollouts) -> dict[str, Sequence[Any]]:
    """Collect the arguments of reward functions: columns of the data, and what was sampled for their rows."""
    sampled = columns["question"], rollouts.texts, rollouts.ids()
    return {**dict(zip(ARGUMENTS, sampled, strict=True)), **columns}


def compute_rewards(
    functions: Mapping[str, Reward], columns: Mapping[str, Sequence[Any]], *, weights: Sequence[float] = (),
    names: Sequence[str] | None = None,
) -> tuple[Tensor, dict[str, list[float | None]]]:  # fmt: skip
    """Call each reward function on B samples and add the results up, by `weights` if there are any; None abstains.

    Args:
        functions: by the names that they are reported under.
        columns: the functions' arguments, B values of each.
        weights: a factor for each function.
        names: names of the samples in errors, by default "sample 0", "sample 1", ...

    Returns:
        The (B,) fp32 sums and each function's own list, without its weight.

    Raises:
        RewardError: as `rewards_by`, or every function abstains on a sample.
        FloatingPointError: a reward or a sum is not finite in float32; the message names the sample.
    """
    samples = names or [f"sample {i}" for i in range(len(columns["completions"]))]
    by_function = {name: rewards_by(name, function, samples, columns) for name, function in functions.items()}
    total = torch.zeros(len(samples))
    for i, (sample, values) in enumerate(zip(samples, zip(*by_function.values(), strict=True), strict=True)):
        if all(value is None for value in values):
            raise RewardError(f"{sample}: every reward function returned None")
        for value, weight in zip(values, weights or [1.0] * len(values), strict=True):
            total[i] += 0.0 if value is None else weight * value
        if not total[i].isfinite():
            raise FloatingPointError(f"{sample}: the sum of its rewards is {total[i].item()}")
    return total, by_function


def rewards_by(
    name: str, function: Reward, samples: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> list[float | None]:
    """Call one reward function on B samples and check its result; changes that it makes to its lists stay its own.

    A reward is any real number: a float, an integer, a bool, a NumPy number, a tensor without dimensions.

    Raises:
        RewardError: the function raised, and the message has the line of its code; or it returned no list, a wrong
            number of values or a value that is no real number.
        FloatingPointError: a reward is not finite in float32.
    """
    try:
        values: Any = function(**{argument: [*column] for argument, column in columns.items()})
    except FAILURES as problem:
        said = f"{type(problem).__name__}: {problem}{_place(problem)}"
        raise RewardError(f"reward {name} raised {said}") from problem
    is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    if not is_list and getattr(values, "ndim", None) != 1:
        raise RewardError(f"reward {name}: returned a {type(values).__name__}, expected a list of numbers")
    if len(values) != len(samples):
        raise RewardError(f"reward {name}: returned {len(values)} values for {len(samples)} completions")
    return [v if v is None else _real(v, f"{samples[i]}: reward {name}") for i, v in enumerate(values)]


def _real(value: Any, name: str) -> float:
    number: Any = value.item() if getattr(value, "ndim", None) == 0 else value
    if not isinstance(number, Real):
        raise RewardError(f"{name} is {number!r}, expected a real number or None")
    if not abs(number) <= torch.finfo(torch.float32).max:  # type: ignore[operator]
        raise FloatingPointError(f"{name} is {number}, beyond what float32 holds")
    return float(number)


def _place(problem: BaseException) -> str:
    frames = traceback.extract_tb(problem.__traceback__)[1:]  # the first is our call
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" (in {Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
