"""Count the kernels that a piece of code launches and the bytes that they read and write, by what torch dispatches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WRITTEN_ONLY = {"copy_": 0, "fill_": 0, "zero_": 0}  # the argument that is not read
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "device"}


class Traffic(TorchDispatchMode):
    """Within it every operator that is no view counts as one kernel, which reads its operands and writes its results.

    Numbers that a broadcast repeats are read once. Caches are not modelled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.kernels = 0, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if func.is_view or name in _NO_KERNEL or (found is (args[0] if args else None) and not name.endswith("_")):
            return found
        read = [value for i, value in enumerate(args) if _WRITTEN_ONLY.get(name) != i]
        self.bytes += sum(map(_size, tree_leaves([read, found])))
        self.kernels.append(name)
        return found


def _size(value: Any) -> int:
    if not isinstance(value, Tensor):
        return 0
    distinct = [size for size, stride in zip(value.shape, value.stride(), strict=True) if stride or size == 1]
    return torch.Size(distinct).numel() * value.element_size()


def bytes_per_row(run: Callable[[int], object], few: int = 8, more: int = 16) -> float:
    """Return what one row more moves: `run(rows)` moves weights as well, which many rows share."""
    moved = []
    for rows in (few, more):
        with Traffic() as traffic:
            run(rows)
        moved.append(traffic.bytes)
    return (moved[1] - moved[0]) / (more - few)
