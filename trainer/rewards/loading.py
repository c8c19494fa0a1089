"""Load reward functions by name: those of the program, or `module:function` on the import path."""

import functools
import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from cfa_kernels.text.rules import AnswerFormat
from trainer.rewards.calls import FAILURES, Reward
from trainer.rewards.settings import BUILT_IN

_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # no pattern for an answer: it has no group


def load_reward(name: str, **options: Any) -> Reward:
    """Load a reward function; one of the program's gets those of `options` that it takes."""
    if ":" in name:
        return _imported("reward_funcs", name)
    if name not in BUILT_IN:
        names = ", ".join(map(repr, BUILT_IN))
        raise ValueError(f"reward_funcs: {name!r} is neither one of {names} nor of the form 'module:function'")
    function = _imported("reward_funcs", BUILT_IN[name].function)
    own = {option: options[option] for option in BUILT_IN[name].options if options.get(option) is not None}
    return function(**own) if isinstance(function, type) else functools.partial(function, **own)


def load_rewards(names: Sequence[str], **options: Any) -> dict[str, Reward]:
    """Load reward functions by the name they are reported under, the last part of `names`; no two have one name."""
    functions: dict[str, Reward] = {}
    for name in names:
        last = name.rpartition(":")[2]
        if last in functions:
            raise ValueError(f"reward_funcs: two of {', '.join(names)} would be reported as {last!r}; rename one")
        functions[last] = load_reward(name, **options)
    return functions


def load_answer_format(name: str | None) -> AnswerFormat | None:
    """Load a run's form of answers by its setting: `module:function` on the import path, or a pattern as it stands."""
    return _imported("answer_format", name) if name is not None and _REFERENCE.fullmatch(name) else name


def _imported(setting: str, name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except FAILURES as problem:  # a module may raise anything while it is imported
        raise ValueError(f"{setting}: cannot import {name!r}: {type(problem).__name__}: {problem}") from problem
    if not callable(function):
        raise ValueError(f"{setting}: {name!r} is a {type(function).__name__}, not a function")
    return function
