"""Measure how long two processes take to meet before a forward; imports little, as each of them has to."""

import datetime
import multiprocessing
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cfa_kernels.hf.ranks import Ranks

SECONDS = 60.0
"""Deadline of the processes."""


def seconds(times: int = 500) -> float:
    """Median seconds in which two processes of this machine meet before a forward, over gloo's loopback.

    Raises:
        TimeoutError: they do not end within their deadline.
        RuntimeError: one of them fails.
    """
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = folder, times, found
        started = [context.Process(target=_meet, args=(rank, *given), daemon=True) for rank in range(2)]
        for process in started:
            process.start()
        for process in started:
            process.join(SECONDS)
        ended = [process.exitcode for process in started]
        for process in started:
            process.kill()
    if None in ended:
        raise TimeoutError(f"two processes that meet {times} times did not end in {SECONDS} s")
    if ended != [0, 0]:
        raise RuntimeError(f"two processes that meet {times} times ended with exit codes {ended}, expected 0")
    return float(found.get())


def _meet(rank: int, folder: str, times: int, found: Any) -> None:
    torch.set_num_threads(1)
    deadline = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=deadline)
    ranks, took = Ranks(nn.Module(), dist.group.WORLD, lambda: None), []
    for _ in range(times):
        start = time.perf_counter()
        ranks.before_forward()
        took.append(time.perf_counter() - start)
    if rank == 0:
        found.put(statistics.median(took))
    dist.barrier()  # one that ends while the other still talks to it may abort
    dist.destroy_process_group()
