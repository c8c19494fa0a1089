"""Name the arguments of custom operators in every function that torch passes them to as one tuple."""

import inspect
from collections import namedtuple
from typing import Any

from torch.library import CustomOpDef


def arguments_of(operator: CustomOpDef) -> Any:
    """Make the named tuple of an operator's arguments, for `Arguments(*inputs)` and gradients; None by default."""
    names = list(inspect.signature(operator._init_fn).parameters)
    return namedtuple("Arguments", names, defaults=[None] * len(names))
