"""The operators that run inside a `with` block."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OperatorCalls(TorchDispatchMode):
    """In `calls`, every operator that ran, and the elements of the largest tensor that it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.calls.append((func, max(sizes, default=0)))
        return out
