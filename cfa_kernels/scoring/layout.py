"""Lay out whole completions as packs for a forward with gradients."""

import numbers
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
from transformers import PreTrainedModel

from ..model.limits import apart_by_length
from ..model.sharded.ranks import Ranks, inside
from ..model.walk import ModelWalk
from ..rows import Rows, check_columns
from ..tree.packs import idle_pack, lay_out
from ..tree.prefix_tree import Pack, Query


def packs_of(
    rows: Rows, groups: Sequence[int], counts: np.ndarray, walk: ModelWalk, order: Sequence[int], budget: int,
    whole: bool = False, foreseen: Sequence[Sequence[Query]] | None = None,
) -> Iterator[Pack]:  # fmt: skip
    """Lay out the first `counts` tokens of each row in `order`, a group together; the queries of packs are rows.

    Tokens that no target needs are fed if `whole`: the last one, those after `counts`, and prompts by themselves. Those
    of the queries `foreseen` for a row are fed with it, under numbers below 0, and without targets.
    """
    lengths = [len(rows.prompts[b]) + len(rows.completions[b]) for b in order]
    bundles, parts = apart_by_length(
        walk, [_sequence(rows, b, int(counts[b]), whole) for b in order], lengths, [rows.index[b] for b in order]
    )
    queries = {b: query for b, bundle in zip(order, bundles, strict=True) for query in bundle}
    with_row: dict[int, list[int]] = {b: [b] for b in order}
    for b in order:
        for query in () if foreseen is None else foreseen[b]:
            with_row[b].append(-1 - len(queries))
            queries[with_row[b][-1]] = replace(query, targets=query.targets[:0])
    for part in parts:
        together = groupby([order[i] for i in part], groups.__getitem__)
        yield from lay_out(queries, [[n for b in group for n in with_row[b]] for _, group in together], budget)


def as_many_as_others(model: PreTrainedModel, packs: Iterable[Pack], *, at_least: int = 0) -> Iterable[Pack]:
    """Add idle packs where there are fewer than `at_least`, and where processes that share `model` feed more.

    Processes that share a model must all run the same number of forwards and backwards.
    """
    ranks = inside(model)
    if ranks is None and not at_least:
        return packs
    own = list(packs)
    wanted = max(len(own), at_least)
    if ranks is not None:
        wanted = ranks.forwards(wanted)
    return own + [idle_pack()] * (wanted - len(own))


def trained_first(
    model: PreTrainedModel, groups: Sequence[int], counts: np.ndarray, trained: Sequence[bool] | None
) -> tuple[list[int], list[int]]:
    """Split rows into those whose group needs a gradient and all others.

    If processes share `model`, and so must run equally many forwards, all rows are of the first kind.
    """
    order = sorted(range(len(groups)), key=groups.__getitem__)
    if trained is None:
        return order, []
    check_columns(groups, trained=trained)
    reached = {groups[b] for b in order if trained[b] and counts[b]}
    if isinstance(inside(model), Ranks):
        reached = set(groups)
    return [b for b in order if groups[b] in reached], [b for b in order if groups[b] not in reached]


def checked_needed(needed: Sequence[int] | None, lengths: Sequence[int]) -> np.ndarray:
    """Return how many tokens of each completion are to be fed, (B,) int64."""
    if needed is None:
        return np.array(lengths, dtype=np.int64)
    check_columns(lengths, needed=needed)
    for b, (count, length) in enumerate(zip(needed, lengths, strict=True)):
        if isinstance(count, bool) or not isinstance(count, numbers.Integral) or not 0 <= count <= length:
            raise ValueError(f"needed row {b}: must be a number of tokens from 0 to {length}, got {count!r}")
    return np.array(needed, dtype=np.int64)


def _sequence(rows: Rows, b: int, count: int, whole: bool) -> list[Query]:
    """Make the query of a completion's first `count` tokens; none for 0, unless the `whole` row is fed."""
    if count == 0 and not whole:
        return []
    first, tokens = len(rows.prompts[b]) - 1, rows.whole(b)
    fed = len(tokens) if whole else first + count
    return [Query(tokens[:fed], first, tokens[first + 1 : first + 1 + count], beyond=tokens[fed:])]
