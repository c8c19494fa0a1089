"""Deal groups of completions over processes, so that all have about the same to do.

Processes that share a model wait for each other before every forward, so a step takes as long as the one with the most.
"""

import heapq
import math
from collections.abc import Sequence

from ..span import Span


def deal(sizes: Sequence[float], ranks: int) -> list[list[int]]:
    """Deal items over ranks so that the largest sum of sizes is small: each, largest first, to the rank with the least.

    An item that must stay whole, as completions of one prompt do to share its rows, is one size. The largest sum is at
    most 4/3 - 1 / (3 ranks) times the smallest possible (R. L. Graham, Bounds on Multiprocessing Timing Anomalies, SIAM
    Journal on Applied Mathematics 17(2), 1969). Equal sizes give equal answers in every process, so each can deal by
    itself.

    Args:
        sizes: of each item, >= 0: tokens, or rows fed.
        ranks: number of processes, at least 1.

    Returns:
        For each rank the numbers of its items, ascending; none where there are fewer items than ranks.

    Raises:
        ValueError: a size that is negative or not finite, or fewer than 1 rank.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    for i, size in enumerate(sizes):
        if not 0 <= size < math.inf:
            raise ValueError(f"sizes[{i}] must be finite and at least 0, got {size}")
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    least: list[tuple[float, int, int]] = [(0, 0, rank) for rank in range(ranks)]  # sum, number of items, rank
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        total, count, rank = least[0]
        dealt[rank].append(i)
        heapq.heapreplace(least, (total + sizes[i], count + 1, rank))
    return [sorted(items) for items in dealt]


def rows_to_score(prompt_length: int, spans: Sequence[Sequence[Span]], answers: Sequence[Span]) -> int:
    """Count the rows that scoring feeds for completions of one prompt: the size by which to `deal` for it.

    The prompt once, each completion up to its answer, and from each masked span on once more. What completions have in
    common at their beginning is counted for each.

    Args:
        prompt_length: tokens of the prompt.
        spans: of each completion.
        answers: of each completion.
    """
    rows = prompt_length
    for masked, answer in zip(spans, answers, strict=True):
        starts = [0, *(span.start for span in masked if span.start < answer.start)]
        rows += sum(answer.end - 1 - start for start in starts)
    return rows
