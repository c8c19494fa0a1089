"""Deal groups of completions over processes that wait for each other, so that all have about equal work."""

import heapq
from collections.abc import Sequence


def deal(sizes: Sequence[float], ranks: int) -> list[list[int]]:
    """Deal items of `sizes` >= 0 over ranks: each, largest first, to the rank with the smallest sum.

    The largest sum is at most 4/3 - 1 / (3 ranks) times the smallest possible (R. L. Graham, Bounds on Multiprocessing
    Timing Anomalies, SIAM Journal on Applied Mathematics 17(2), 1969). Returns the items of each rank, by number,
    ascending.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    least: list[tuple[float, int, int]] = [(0, 0, rank) for rank in range(ranks)]  # sum, number of items, rank
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        total, count, rank = least[0]
        dealt[rank].append(i)
        heapq.heapreplace(least, (total + sizes[i], count + 1, rank))
    return [sorted(items) for items in dealt]
