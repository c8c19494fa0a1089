"""Triton's interpreter with less repeated work: the same numbers in half the time.

A launch puts functions of its own into `triton.language` and takes them out when it is done. Triton puts them in again
at every call of one jitted function by another, and makes a table of NumPy's types for every intermediate value.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    patch, look_up = interpreter._patch_lang, interpreter._get_np_dtype
    dtypes: dict[str, np.dtype] = {}  # by name: types of pointers and blocks have no hash

    def patch_once(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        is_done = languages and not any(tl.core.is_builtin(language.load) for language in languages)
        return SimpleNamespace(restore=lambda: None) if is_done else patch(function)

    def look_up_once(kind: Any) -> np.dtype:
        if kind.name not in dtypes:
            dtypes[kind.name] = look_up(kind)
        return dtypes[kind.name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, look_up_once
