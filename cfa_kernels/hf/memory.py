"""What fits on a device at once: logits where a formula needs them themselves, and work that is cut until it fits.

How many tokens a forward takes is for `limits.default_token_budget` to estimate; what is here holds when it is wrong.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

_Item = TypeVar("_Item")
_Work = TypeVar("_Work")
_Result = TypeVar("_Result")

LOGITS_AT_ONCE = 1 << 24
"""Most logits that exist where a formula needs them themselves, in elements, for gradients, fills and divergences.

Some four tensors of this size live together, the widest in float64. What the passes from the head to log-probs and
losses hold is another matter, tuned for their speed: `STRIP_BYTES` of `ops.linear_logprob_backward`, in bytes, and
`chunk_size` of `linear_policy_loss`, in rows.
"""

_CACHED = 1 << 20  # elements that stay in a CPU's caches


def rows_at_once(vocabulary: int) -> int:
    """Most rows of a strip of whole rows, at least 1.

    Every such strip reads the whole head, so it is as high as memory allows, on every device.
    """
    return max(LOGITS_AT_ONCE // vocabulary, 1)


def columns_at_once(rows: int, device: torch.device) -> int:
    """Most columns of a strip of all of `rows`, at least 256.

    Such strips read the head once between them, however narrow, so on a CPU they are cut to what its caches hold.
    """
    most = _CACHED if device.type == "cpu" else LOGITS_AT_ONCE
    return max(most // max(rows, 1), 256)


_SPELLINGS = ("out of memory", "alloc_failed", "not enough memory", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says that a device has no memory left: PyTorch's own error, or what cuBLAS, a driver or Triton raise.

    Those are plain `RuntimeError`s ("CUBLAS_STATUS_ALLOC_FAILED", "Triton Error [CUDA]: out of memory").
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(spelling in str(error).lower() for spelling in _SPELLINGS)


def run_in_memory(
    works: Iterable[_Work], run: Callable[[_Work], _Result], smaller: Callable[[_Work], Sequence[_Work]]
) -> Iterator[_Result]:
    """`run(work)` of each of `works`, in order; where the device has no memory for one, of smaller ones in its place.

    Each work is made when it is asked for, after the one before has been launched.

    Args:
        works: what is to be done.
        run: does it; what it left half done when it ran out of memory must not matter.
        smaller: works that do the same together, each in less memory; none if there are none.

    Raises:
        RuntimeError: the device's own (`is_out_of_memory`), where nothing smaller can take a work's place.
    """
    for work in works:
        todo = [work]
        while todo:
            one, cut = todo.pop(), list[_Work]()
            try:
                found = run(one)
            except RuntimeError as error:
                cut = list(smaller(one)) if is_out_of_memory(error) else []
                if not cut:
                    raise
            if cut:  # here, where the error no longer holds on to what was made before it
                torch.cuda.empty_cache()
                todo += reversed(cut)
            else:
                yield found


def halves(items: Sequence[_Item], row_of: Callable[[_Item], int]) -> list[Sequence[_Item]]:
    """`items` in two parts, cut between two rows where they are of several; nothing where there is but one item.

    Args:
        items: those of a row side by side.
        row_of: the row of an item.
    """
    rows = list(dict.fromkeys(map(row_of, items)))
    cut = len(items) // 2
    if len(rows) > 1:
        cut = next(i for i, item in enumerate(items) if row_of(item) == rows[len(rows) // 2])
    return [items[:cut], items[cut:]] if cut else []
