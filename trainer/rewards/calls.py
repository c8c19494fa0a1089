"""Call reward functions, and say which one failed, on which row of the data and where in its code."""

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.rollouts import Rollouts

ARGUMENTS = ("prompts", "completions", "completion_ids")
"""What reward functions are given beside the columns of the data, under these names."""


class RewardError(ValueError):
    """A reward function did not give rewards; the message names it and, if it can be known, the row."""


def require_callable(functions: Mapping[str, Callable[..., Any]], columns: Mapping[str, Any]) -> None:
    """Raise `ValueError` naming the first reward function that cannot be called with `columns` of the data."""
    given = dict.fromkeys([*ARGUMENTS, *columns])
    for name, function in functions.items():
        try:
            signature = inspect.signature(function)
        except Exception:  # of a builtin that does not say, or an object of which Python cannot even say that
            continue
        try:
            signature.bind(**given)
        except TypeError as problem:
            raise ValueError(
                f"reward {name}: {problem}; it is called with prompts, completions, completion_ids and the columns "
                f"{sorted(columns)} by name, and takes those that it does not read by **others"
            ) from problem


def arguments(columns: Mapping[str, Sequence[Any]], rollouts: Rollouts) -> dict[str, Sequence[Any]]:
    """Collect what reward functions are called with: columns of the data, and what was sampled for their rows."""
    sampled = columns["question"], rollouts.texts, rollouts.ids()
    return {**dict(zip(ARGUMENTS, sampled, strict=True)), **columns}


def called(name: str, function: Callable[..., Any], samples: Sequence[str], given: Mapping[str, Sequence[Any]]) -> Any:
    """Call a reward function on B samples.

    Args:
        name: what it is reported under.
        function: as TRL calls it.
        samples: what an error calls the B samples.
        given: B values of each argument.

    Returns:
        What it gave, unseen. What it does to the lists it was given changes nothing here.

    Raises:
        RewardError: it raised; the message says where in its code, and for which sample: the first for which it also
            raises when it is called with that one only, unless the error is one of files or network.
    """
    try:
        return function(**_copied(given))
    except (Exception, SystemExit) as problem:
        which = None if isinstance(problem, OSError) else _first_raising(function, len(samples), given)
        where = f"{samples[which]}: " if which is not None else ""
        raise RewardError(
            f"{where}reward {name} raised {type(problem).__name__}: {printed(problem)}{_place(problem)}"
        ) from problem


def printed(value: Any, form: Callable[[Any], str] = str) -> str:
    """Print what a reward function gave or raised, by its type where its own code for that fails."""
    try:
        return form(value)
    except Exception:
        return f"a {type(value).__qualname__} that cannot be printed"


def _copied(given: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    return {argument: [*values] for argument, values in given.items()}


def _place(problem: BaseException) -> str:
    """Name the line of the function's own file that the error came from, if it got so far."""
    frames = traceback.extract_tb(problem.__traceback__)[1:]  # the first is our call
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" (in {Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def _first_raising(function: Callable[..., Any], count: int, given: Mapping[str, Sequence[Any]]) -> int | None:
    for b in range(count):
        try:
            function(**{argument: [values[b]] for argument, values in given.items()})
        except (Exception, SystemExit):
            return b
    return None
