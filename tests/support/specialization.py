"""Launches as Triton builds them where an integer is 1: the argument becomes a constant of the kernel.

The interpreter builds nothing anew, so only a compiler shows what such a constant breaks.
"""

import dataclasses
import importlib

from tests.support.aot import AotCase


def never_specialized(kernel: str) -> set[str]:
    """The arguments of `"package.module:function"` that its decorator keeps as run-time arguments."""
    module, _, function = kernel.partition(":")
    found = getattr(importlib.import_module(module), function)
    # The interpreter's stand-in keeps what the decorator was given; the compiler's function has it as an attribute.
    names = found.kwargs["do_not_specialize"] if hasattr(found, "kwargs") else found.do_not_specialize
    return set(names or ())


def with_ones(case: AotCase) -> AotCase:
    """The build of `case` for a launch in which every integer that may become a constant is 1."""
    kept = never_specialized(case.kernel)
    ones = [name for name, kind in case.arguments.items() if kind[0] == "i" and name not in kept]
    arguments = {name: kind for name, kind in case.arguments.items() if name not in ones}
    return dataclasses.replace(
        case, name=f"{case.name} ones", arguments=arguments, constexprs={**case.constexprs, **dict.fromkeys(ones, 1)}
    )
