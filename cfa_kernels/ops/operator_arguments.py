"""Name the arguments of custom operators, and call an operator's function itself where nothing looks for operators."""

import inspect
from collections import namedtuple
from typing import Any

import torch
from torch.library import CustomOpDef


def arguments_of(operator: CustomOpDef) -> Any:
    """Make the named tuple of an operator's arguments, for `Arguments(*inputs)` and gradients; None by default."""
    names = list(inspect.signature(operator._init_fn).parameters)
    return namedtuple("Arguments", names, defaults=[None] * len(names))


def is_traced() -> bool:
    """Whether something records operators: `torch.compile`, fake tensors, a selective checkpoint."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def call(operator: CustomOpDef, **arguments: Any) -> Any:
    """Call an operator without gradient; its function itself, without torch's wrappers, where nothing records it."""
    # The wrappers take the host as long as four launches, and a packed forward makes the call in every layer.
    return operator(**arguments) if is_traced() else operator._init_fn(**arguments)
