"""Load reward functions by name, call them by TRL's contract, add their rewards up, and compare them in groups."""

import functools
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cfa_kernels.options import imported

from .built_in import ARGUMENTS, BUILT_IN, CONTENTS, require_rewards

Reward = Callable[..., list[float | None]]
"""TRL's contract: `f(prompts=, completions=, completion_ids=, **others)`; None abstains."""

FAILURES = (Exception, SystemExit)  # of a user's code; not signals


class RewardError(ValueError):
    """A reward function did not return rewards; the message names it."""


def load_reward(name: str, **options: Any) -> Reward:
    """Load a reward function; one of the program's gets those of `options` that it takes."""
    if ":" in name:
        return imported("reward_funcs", name)
    require_rewards([name])
    function = imported("reward_funcs", BUILT_IN[name].function)
    taken = BUILT_IN[name].options
    own = {option: options[option] for option in taken if options.get(option) is not None}
    if isinstance(function, type):
        return function(**own)

    @functools.wraps(function)
    def reward(**columns: Any) -> list[float | None]:  # a column of the data may have an option's name
        return function(**{name: column for name, column in columns.items() if name not in taken}, **own)

    return reward


def load_rewards(names: Sequence[str], **options: Any) -> dict[str, Reward]:
    """Load reward functions by the name they are reported under, the last part of `names`; no two have one name."""
    functions = {name.rpartition(":")[2]: load_reward(name, **options) for name in names}
    if len(functions) < len(names):
        raise ValueError(f"reward_funcs: two of {', '.join(names)} would be reported by one name; rename one")
    return functions


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
            said = f"it is called with {', '.join(ARGUMENTS)} and the columns {sorted(columns)} by name"
            raise ValueError(f"reward {name}: {problem}; {said}, so let it take **others") from problem


def compute_rewards(
    functions: Mapping[str, Reward], columns: Mapping[str, Sequence[Any]], *, weights: Sequence[float] = (),
    names: Sequence[str] | None = None,
) -> tuple[Tensor, dict[str, list[float | None]]]:  # fmt: skip
    """Call reward functions on B samples and add the results up, each times its weight; None abstains.

    `columns` holds B values of each argument, `names` the samples' in errors. Gives the (B,) fp32 sums and each
    function's own list, without its weight. Raises as `rewards_by`, and if all abstain or a sum is not finite.
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
    """Call one reward function on B samples and check that it returns as many real numbers of any type, or None.

    Raises `RewardError` that names function, line and sample, the first for which the function also raises alone;
    `FloatingPointError` for a reward that is not finite in float32.
    """
    columns = {name: column for name, column in columns.items() if name != CONTENTS or _takes(function, name)}
    try:
        # Copies, for a function may empty or sort the lists that it gets.
        values: Any = function(**{argument: [*column] for argument, column in columns.items()})
    except FAILURES as problem:
        where = "" if isinstance(problem, OSError) else _first_raising(function, samples, columns)
        cause = f"{type(problem).__name__}: {problem}{_place(problem)}"
        raise RewardError(f"{where}reward {name} raised {cause}") from problem
    is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    if not is_list and getattr(values, "ndim", None) != 1:
        raise RewardError(f"reward {name}: returned a {type(values).__name__}, expected a list of numbers")
    if len(values) != len(samples):
        raise RewardError(f"reward {name}: returned {len(values)} values for {len(samples)} completions")
    return [v if v is None else _real(v, f"{samples[i]}: reward {name}") for i, v in enumerate(values)]


def group_advantages(rewards: Tensor, num_generations: int, scale_rewards: str = "group") -> Tensor:
    """Compute (reward - group mean) / (std + 1e-4) of (B,) rewards, groups side by side; (B,) fp32.

    `scale_rewards` names the standard deviation: the group's, the batch's, or none (no division). A group whose
    rewards are all equal has advantage exactly 0, so that nothing spends work on it.
    """
    groups = rewards.float().view(-1, num_generations)  # (groups, G)
    centred = groups - groups.mean(1, keepdim=True)
    if scale_rewards != "none":
        deviation = groups.std(1, keepdim=True) if scale_rewards == "group" else rewards.float().std()
        centred = centred / (deviation + 1e-4)  # TRL's, so that advantages agree with its own
    # Rounding of the mean may leave 1e-8 where all rewards are equal, which the division would blow up.
    mixed = groups.amax(1, keepdim=True) > groups.amin(1, keepdim=True)
    return torch.where(mixed, centred, torch.zeros_like(centred)).flatten()


def _takes(function: Reward, name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # of a builtin that does not say
        return False
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _first_raising(function: Reward, samples: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> str:
    for b, sample in enumerate(samples):
        try:
            function(**{argument: [column[b]] for argument, column in columns.items()})
        except FAILURES:
            return f"{sample}: "
    return ""


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
