"""Copy several host arrays to a device in one asynchronous transfer."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: Triton compiles wide loads for pointers that are multiples of it


def stream_of(device: torch.device) -> int | None:
    """Return the stream of work on `device`, whose copies another stream need not see yet; None for a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def upload(arrays: Sequence[np.ndarray | Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Copy host arrays to `device`, by one copy for all; each starts at a multiple of `ALIGNMENT` bytes.

    Raises `RuntimeError` while a CUDA graph is captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph cannot capture work whose index arrays are still on the host: run it once before the "
            "capture, with the same SegmentTable on the stream that will be captured, or leave it out of the graph"
        )
    host = [torch.from_numpy(array) if isinstance(array, np.ndarray) else array for array in arrays]
    sizes = [part.numel() * part.element_size() for part in host]
    *starts, total = itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)

    # Pinned, so that the copy queues up behind kernels while the host continues; PyTorch's host allocator hands the
    # buffer out again only when the copy is done.
    buffer = torch.zeros(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    data = buffer.numpy()
    for start, size, part in zip(starts, sizes, arrays, strict=True):
        if isinstance(part, np.ndarray):  # a third of the time that torch takes
            data[start : start + size] = np.frombuffer(part.tobytes(), np.uint8)
        else:
            buffer[start : start + size].view(part.dtype).view(part.shape).copy_(part.detach())
    there = buffer.to(device, non_blocking=True)
    return tuple(
        there[start : start + size].view(part.dtype).view(part.shape)
        for part, start, size in zip(host, starts, sizes, strict=True)
    )
