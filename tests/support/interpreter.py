"""Triton's interpreter without what it does over and over: the same numbers in half the time.

A launch puts functions of its own into `triton.language` and takes them out when it is done. Triton puts them in again
at every call of one jitted function by another, tens of thousands of times in this suite. And for every intermediate
value it makes the table of NumPy's types anew in which it looks one of them up.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_NOTHING_TO_TAKE_OUT = SimpleNamespace(restore=lambda: None)


def _unless_there(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`_patch_lang`, which does nothing where what a function calls has been put in already."""

    @functools.wraps(patch)
    def patched(function: Any) -> Any:
        seen = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        there = seen and not any(tl.core.is_builtin(language.load) for language in seen)
        return _NOTHING_TO_TAKE_OUT if there else patch(function)

    return patched


def _by_name(look_up: Callable[[Any], np.dtype]) -> Callable[[Any], np.dtype]:
    """`_get_np_dtype`, which looks up a type once; types of pointers and blocks have no hash."""
    found: dict[str, np.dtype] = {}

    @functools.wraps(look_up)
    def looked_up(kind: Any) -> np.dtype:
        if kind.name not in found:
            found[kind.name] = look_up(kind)
        return found[kind.name]

    return looked_up


def install() -> None:
    """Put both into the interpreter, for good."""
    interpreter._patch_lang = _unless_there(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
