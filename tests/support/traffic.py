"""Count the kernels that a piece of code launches and the bytes that they read and write, by what torch dispatches.

Every operator that is no view counts as one kernel, which reads its operands once and writes its results; numbers that
a broadcast repeats are read once. Caches are not modelled.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_FREE = {  # allocate or ask, and launch nothing
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "alias", "detach", "device", "lift_fresh",
    "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "resize_", "set_", "stack_trace",
}  # fmt: skip
_BY_INDEX = {"embedding", "index_select", "gather", "index"}  # read as much as they write
_INTO = {"index_copy_", "scatter_", "index_put_"}  # write as much as they are given
_SORT_PASSES = 4  # of a radix sort of float32: 8 bits each, keys and their places read and written


def launches(func: Any) -> bool:
    """Whether an operator, as `__torch_dispatch__` is given it, launches a kernel."""
    return not func.is_view and operator_name(func) not in _FREE


def operator_name(func: Any) -> str:
    """Return the name of an operator without its namespace and overload."""
    return str(func._overloadpacket.__name__)


def moved_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Any) -> int:
    """Count what an operator that gave `found` reads and writes, bytes. Where it was told to write is not read."""
    name = operator_name(func)
    given = tree_leaves([args, {key: value for key, value in kwargs.items() if key != "out"}])
    tensors, results = ([leaf for leaf in leaves if isinstance(leaf, Tensor)] for leaves in (given, tree_leaves(found)))
    if name in _BY_INDEX:
        return 2 * nbytes(results)
    if name in _INTO:
        return 2 * nbytes(tensors[1:])
    if name.startswith("new_") or name.endswith("_like") or name in ("zero_", "fill_"):
        return nbytes(results)
    if name == "copy_":
        return nbytes(tensors)
    return (2 * _SORT_PASSES if name == "sort" else 1) * nbytes(results) + nbytes(tensors)


def nbytes(tensors: Sequence[Tensor]) -> int:
    """Add up the memory of tensors, bytes, that of a dimension which repeats the same once."""
    sizes = (math.prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride) for t in tensors)
    return sum(size * t.element_size() for size, t in zip(sizes, tensors, strict=True))


class Traffic(TorchDispatchMode):
    """Within it kernels are listed by name, in `kernels`, and their bytes added up, in `bytes`."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.kernels = 0, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if launches(func):
            self.bytes += moved_bytes(func, args, kwargs, found)
            self.kernels.append(operator_name(func))
        return found


def bytes_per_row(run: Callable[[int], object], few: int = 8, more: int = 16) -> float:
    """Return what one row more moves: `run(rows)` moves weights as well, which many rows share."""
    moved = []
    for rows in (few, more):
        with Traffic() as traffic:
            run(rows)
        moved.append(traffic.bytes)
    return (moved[1] - moved[0]) / (more - few)
