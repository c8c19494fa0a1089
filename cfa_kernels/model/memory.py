"""Limit memory: strips of logits for formulas that need them, and work that is cut until it fits the device."""

import contextlib
import ctypes
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

_Work = TypeVar("_Work")
_Result = TypeVar("_Result")

LOGITS_AT_ONCE = 1 << 24
"""Maximum number of logits in memory, for gradients and divergences: about four such tensors exist at a time."""

_CACHED = 1 << 20  # elements that stay in a CPU's caches


def rows_at_once(vocabulary: int) -> int:
    """Return the maximum rows of a strip of whole rows, at least 1: each such strip reads the whole head."""
    return max(LOGITS_AT_ONCE // vocabulary, 1)


def columns_at_once(rows: int, device: torch.device) -> int:
    """Return the maximum columns of a strip of all `rows`, at least 256; on a CPU strips fit its caches."""
    most = _CACHED if device.type == "cpu" else LOGITS_AT_ONCE
    return max(most // max(rows, 1), 256)


def free_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that are free, in the allocator or outside of it."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


_SPELLINGS = ("out of memory", "alloc_failed", "not enough memory", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of PyTorch, cuBLAS, a driver or Triton means that a device is out of memory."""
    spelled = isinstance(error, RuntimeError) and any(spelling in str(error).lower() for spelling in _SPELLINGS)
    return spelled or isinstance(error, torch.OutOfMemoryError)


def run_in_memory(
    works: Iterable[_Work], run: Callable[[_Work], _Result], smaller: Callable[[_Work], Iterable[_Work]]
) -> Iterator[_Result]:
    """Yield `run(work)` of each work, in order; if the device has no memory for one, of `smaller` ones instead.

    Each work is made only after the one before it has been launched. One that has fewer than two `smaller` raises.
    """
    for work in works:
        todo = [work]
        while todo:
            one, cut = todo.pop(), list[_Work]()
            try:
                result = run(one)
            except RuntimeError as error:
                cut = list(smaller(one)) if is_out_of_memory(error) else []
                if len(cut) < 2:
                    raise
            if cut:  # outside the except block: the error would keep what was allocated before it alive
                torch.cuda.empty_cache()
                todo += reversed(cut)
            else:
                yield result


def keep_freed_memory() -> None:
    """Let glibc give blocks of up to 256 MB out again that were freed, where it would return them to the system.

    The system fills every page with zeros first, which takes longer than most operations on logits. Limits that the
    environment sets stay.
    """
    if re.search("malloc.(mmap|trim)_threshold", " ".join([*os.environ, os.environ.get("GLIBC_TUNABLES", "")]).lower()):
        return
    with contextlib.suppress(AttributeError, OSError):  # another C library
        library = ctypes.CDLL(None)
        # M_MMAP_THRESHOLD: before glibc 2.35 32 MB at most. Without one it would stay at 128 kB once the other is set.
        if library.mallopt(-3, 1 << 28) or library.mallopt(-3, 1 << 25):
            library.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD, free memory that stays
