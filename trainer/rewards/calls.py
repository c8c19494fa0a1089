"""Load reward functions by name, call them by TRL's contract, add their rewards up, and compare them in groups."""

import asyncio
import contextlib
import functools
import inspect
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerState

from cfa_kernels.options import imported

from .built_in import ARGUMENTS, BUILT_IN, OPTIONAL, require_rewards

_LOG = logging.getLogger(__name__)

Reward = Callable[..., Any]
"""TRL's contract: `f(prompts=, completions=, completion_ids=, **others)` gives a list, or is async; None abstains."""

FAILURES = (Exception, SystemExit)  # of a user's code; not signals


class RewardError(ValueError):
    """A reward function did not return rewards; the message names it."""


def load_reward(name: str, **options: Any) -> Reward:
    """Load a reward function; one of the program's gets those of `options` that it takes."""
    if ":" in name:
        return imported("reward_funcs", name)
    require_rewards([name])
    function = imported("reward_funcs", f"{__package__}.{BUILT_IN[name].function}")
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


class RewardLog:
    """State of the run after `step` steps and two functions to log by, as TRL passes them, and what they logged."""

    def __init__(self, step: int, max_steps: int) -> None:
        self.metrics: list[tuple[str, float]] = []
        self.columns: dict[str, list[Any]] = {}
        state = TrainerState(global_step=step, max_steps=max_steps)
        self.arguments = {"trainer_state": state, "log_metric": self._log_metric, "log_extra": self._log_extra}

    def _log_metric(self, name: str, value: float) -> None:
        self.metrics.append((name, float(value)))

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        self.columns[column] = [one if isinstance(one, str | int | float | None) else str(one) for one in values]

    def rows(self, count: int) -> list[dict[str, Any]]:
        """Give the columns that were logged as a record of each of so many samples."""
        for name, values in self.columns.items():
            if len(values) != count:
                raise RewardError(f"log_extra: column {name!r} has {len(values)} values for {count} completions")
        return [{name: values[i] for name, values in self.columns.items()} for i in range(count)]


def require_callable(functions: Mapping[str, Reward], columns: Mapping[str, Any]) -> None:
    """Raise `ValueError` naming the first reward function that cannot be called with `columns` of the data."""
    for name, function in functions.items():
        try:
            inspect.signature(function).bind(**_taken(function, dict.fromkeys([*ARGUMENTS, *columns, *OPTIONAL])))
        except ValueError:  # of a builtin that does not say what it takes
            continue
        except TypeError as problem:
            said = f"it is called with {', '.join(ARGUMENTS)} and the columns {sorted(columns)} by name"
            raise ValueError(f"reward {name}: {problem}; {said}, so let it take **others") from problem


def compute_rewards(
    functions: Mapping[str, Reward], samples: Sequence[str], columns: Mapping[str, Sequence[Any]],
    weights: Sequence[float] = (), log: RewardLog | None = None,
) -> tuple[Tensor, dict[str, list[float | None]]]:  # fmt: skip
    """Call reward functions on B samples and add the results up, each times its weight; None abstains.

    `columns` holds B values of each argument, `samples` their names in errors. Gives the (B,) fp32 sums, nan for a
    sample that all functions abstain on, and each function's own list, without its weight. Raises as `rewards_by`, and
    if a sum is not finite.
    """
    by_function = rewards_by(functions, samples, columns, log)
    votes = [[torch.nan if value is None else value for value in values] for values in by_function.values()]
    values = torch.tensor(votes, dtype=torch.float64)  # (functions, B)
    factors = torch.tensor(weights or [1.0] * len(values), dtype=torch.float64)
    total = (values * factors[:, None]).nansum(0).float()
    if beyond := [(sample, one) for sample, one in zip(samples, total.tolist(), strict=True) if not isfinite(one)]:
        raise FloatingPointError("{}: the sum of its rewards is {}".format(*beyond[0]))
    total[values.isnan().all(0)] = torch.nan
    if silent := [sample for sample, one in zip(samples, total, strict=True) if one.isnan()]:
        others = f" and of {len(silent) - 1} others" * (len(silent) > 1)
        _LOG.warning("%s%s: every reward function returned None, so there is no advantage", silent[0], others)
    return total, by_function


def rewards_by(
    functions: Mapping[str, Reward], samples: Sequence[str], columns: Mapping[str, Sequence[Any]],
    log: RewardLog | None = None,
) -> dict[str, list[float | None]]:  # fmt: skip
    """Call reward functions on B samples, and check that each gives as many real numbers of any type, or None.

    Coroutines of all functions are awaited together, in one event loop for the whole run. Raises `RewardError` that
    names function and line, and `FloatingPointError` for a reward that is not finite in float32.
    """
    results = dict[str, Any]()
    for name, function in functions.items():
        # Copies, for a function may empty or sort the lists that it gets.
        own = {argument: [*column] for argument, column in columns.items()} | (log.arguments if log else {})
        try:
            results[name] = function(**_taken(function, own))
        except FAILURES as problem:
            results[name] = problem
    for name, result in zip(functions, _awaited([*results.values()]), strict=True):
        if isinstance(result, FAILURES):
            place = _place(result)
            raise RewardError(f"reward {name} raised {type(result).__name__}: {result}{place}") from result
        results[name] = _checked(name, result, samples)
    return results


def _taken(function: Reward, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Omit the optional arguments that a function does not take."""
    parameters: Mapping[str, inspect.Parameter] = {}
    with contextlib.suppress(ValueError):  # of a builtin that does not say
        parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {name: one for name, one in arguments.items() if takes_all or name in parameters or name not in OPTIONAL}


def _awaited(results: list[Any]) -> list[Any]:
    """Await the results that are awaitable, together; what one raises takes its place."""

    async def outcome(result: Any) -> Any:
        try:
            return await result if inspect.isawaitable(result) else result
        except FAILURES as problem:
            return problem

    async def all_of() -> list[Any]:
        return await asyncio.gather(*map(outcome, results))

    return _loop().run_until_complete(all_of()) if any(map(inspect.isawaitable, results)) else results


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One loop for all steps: a client that a user's module keeps belongs to the loop of its first request."""
    return asyncio.new_event_loop()


def _checked(name: str, values: Any, samples: Sequence[str]) -> list[float | None]:
    is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    if not (is_list or getattr(values, "ndim", None) == 1) or len(values) != len(samples):
        said = f"{len(values)} values" if is_list else f"a {type(values).__name__}"
        raise RewardError(f"reward {name}: returned {said}, expected a list of {len(samples)} numbers")
    checked: list[float | None] = []
    for sample, value in zip(samples, values, strict=True):
        number: Any = value.item() if getattr(value, "ndim", None) == 0 else value
        if not isinstance(number, Real | None):
            raise RewardError(f"{sample}: reward {name} is {number!r}, expected a real number or None")
        if number is not None and not abs(number) <= torch.finfo(torch.float32).max:  # type: ignore[operator]
            raise FloatingPointError(f"{sample}: reward {name} is {number}, beyond what float32 holds")
        checked.append(number if number is None else float(number))
    return checked


def group_advantages(rewards: Tensor, num_generations: int, scale_rewards: str = "group") -> Tensor:
    """Compute (reward - group mean) / (std + 1e-4) of (B,) rewards, groups side by side; (B,) fp32.

    `scale_rewards` names the standard deviation: the group's, the batch's, or none (no division). A group whose
    rewards are all equal has advantage exactly 0, so that nothing spends work on it. A completion without a reward
    (nan) has advantage 0 and is in no mean, as in TRL.
    """
    groups = rewards.float().view(-1, num_generations)  # (groups, G)
    known = ~groups.isnan()
    centred = groups - groups.nanmean(1, keepdim=True)
    if scale_rewards != "none":
        rows = [row[~row.isnan()] for row in (groups if scale_rewards == "group" else groups.view(1, -1))]
        deviations = torch.stack([row.std() if len(row) > 1 else torch.zeros(()) for row in rows])
        centred = centred / (deviations[:, None] + 1e-4)  # TRL's, so that advantages agree with its own
    # Rounding of the mean may leave 1e-8 where all rewards are equal, which the division would blow up.
    return torch.where(known & mixed_groups(groups)[:, None], centred, 0.0).flatten()


def mixed_groups(groups: Tensor) -> Tensor:
    """Say of each row of (groups, G) rewards whether two differ that are not nan; (groups,) bool."""
    return groups.nan_to_num(-torch.inf).amax(1) > groups.nan_to_num(torch.inf).amin(1)


def _place(problem: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if frame.filename != __file__]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" (in {Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
