"""Pack token sequences into prefix trees, so that what they have in common is laid out and computed once.

Every sequence to score, a completion or one of its masked branches, is inserted into a radix tree. Equal prompts,
equal completions, equal branches and any longer common prefix are thereby shared, and each sequence adds one segment:
the part of it that no earlier sequence had. Queries that are scored together, those of one completion, are a bundle.
"""

import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from .prefix_tree import Pack, PrefixTree, Query


@dataclass(frozen=True)
class Limits:
    """Limits of the packs that a model is fed.

    Attributes:
        token_budget: maximum tokens of a pack; a longer sequence gets a pack of its own.
        continues: whether a pack may continue the rows of an earlier one, by its keys and values.
        most_rows: maximum rows of a pack together with the one that it continues; None for any number.

    Raises:
        ValueError: the token budget is not a whole number of at least 1.
    """

    token_budget: int
    continues: bool = True
    most_rows: int | None = None

    def __post_init__(self) -> None:
        check_token_budget(self.token_budget)


def check_token_budget(token_budget: int) -> None:
    """Raise `ValueError` unless the budget is a whole number of tokens, at least 1."""
    if isinstance(token_budget, bool) or not isinstance(token_budget, numbers.Integral):
        raise ValueError(f"token_budget must be a whole number of tokens, got {token_budget!r}")
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, got {token_budget}")


def lay_out(bundles: Sequence[Sequence[Query]], token_budget: int) -> Iterator[Pack]:
    """Cut `bundles` into packs of at most `token_budget` fed tokens each, in order, one pack at a time.

    A bundle is what must be scored together: a completion and its masked branches. One that is over the budget by
    itself gets a pack of its own. Neighbours in `bundles` share what they have in common, so put completions of one
    prompt side by side. An empty bundle costs nothing.

    Raises `ValueError` for a token budget below 1.
    """
    return (_whole(bundles, *cut) for cut in _cut(bundles, Limits(token_budget)))


def groups_within(sizes: Sequence[int], most: int) -> list[range]:
    """Cut neighbours into groups whose sizes sum to at most `most`; a larger one is a group by itself."""
    starts, total = list[int](), 0
    for i, size in enumerate(sizes):
        if not starts or total + size > most:
            starts.append(i)
            total = 0
        total += size
    return [range(start, stop) for start, stop in pairwise([*starts, len(sizes)])]


def idle_pack() -> Pack:
    """Make a pack of one token without a target, for a process that must run a forward because others do."""
    token = np.zeros(1, np.int64)
    return next(lay_out([[Query(token, 0, token[:0])]], 1))


def _cut(
    bundles: Sequence[Sequence[Query]], limits: Limits
) -> Iterator[tuple[range, PrefixTree, list[np.ndarray] | None]]:
    """Yield neighbouring bundles that fit in a pack, with tree and rows; one too large for a pack has an empty tree."""
    tree, rows_of, start = PrefixTree(), list[np.ndarray](), 0
    for i, bundle in enumerate(bundles):
        rows = tree.insert_within(bundle, limits.token_budget)
        if rows is None and tree.num_tokens:
            yield range(start, i), tree, rows_of
            tree, rows_of, start = PrefixTree(), [], i
            rows = tree.insert_within(bundle, limits.token_budget)
        if rows is None:
            yield range(start, i + 1), tree, None
            tree, start = PrefixTree(), i + 1
        else:
            rows_of += rows
    if tree.num_tokens:
        yield range(start, len(bundles)), tree, rows_of


def _whole(
    bundles: Sequence[Sequence[Query]], covered: range, tree: PrefixTree, rows_of: list[np.ndarray] | None
) -> Pack:
    """Make one pack of the bundles that `_cut` found, also where they do not fit."""
    queries = [query for i in covered for query in bundles[i]]
    if rows_of is None:
        rows_of = [tree.insert(query.tokens, query.alone_from) for query in queries]
    return pack_of(tree, rows_of, queries, covered)


@dataclass(frozen=True)
class Chain:
    """Chain of packs: one for bundles that fit; else one of the longest sequence, and those that continue it.

    Queries are given by their numbers in a list that all chains share.
    """

    first: Pack  # answers all queries, or none if others continue it
    bundles: list[Sequence[int]]  # the queries of each of its bundles
    limits: Limits
    continued: bool

    def packs(self, queries: Sequence[Query]) -> Iterator[tuple[Pack, list[int]]]:
        """Yield every pack, in order, with the numbers of the queries that it answers."""
        numbers = [n for bundle in self.bundles for n in bundle]
        yield self.first, [] if self.continued else numbers
        if self.continued:
            budget, most = self.limits.token_budget, self.limits.most_rows
            if most is not None:
                budget = max(min(budget, most - self.first.num_tokens), 1)
            for pack in continue_pack(self.first, [queries[n] for n in numbers], budget):
                yield pack, [numbers[i] for i in pack.bundles]


def chain_bundles(queries: Sequence[Query], bundles: Sequence[Sequence[int]], limits: Limits) -> Iterator[Chain]:
    """Cut bundles of queries, given by number, into chains of packs, in order, one at a time.

    Bundles share packs as in `lay_out`. One that is over the budget by itself is split: its longest sequence is
    fed first, and its branches go into packs that continue those rows, so nothing is fed twice; where no pack may
    continue another, each feeds again what its queries have in common. Queries are answered in their order.
    """
    for covered, tree, rows_of in _cut([[queries[n] for n in bundle] for bundle in bundles], limits):
        inside = [bundles[i] for i in covered]
        asked = [queries[n] for bundle in inside for n in bundle]
        if rows_of is not None:
            yield Chain(pack_of(tree, rows_of, asked, covered), inside, limits, continued=False)
        elif limits.continues:
            yield _continued(tree, asked, inside, covered, limits)
        else:
            numbers = [n for bundle in inside for n in bundle]
            for pack in lay_out([[query] for query in asked], limits.token_budget):
                yield Chain(pack, [[numbers[i] for i in pack.bundles]], limits, continued=False)


def _continued(
    tree: PrefixTree, asked: Sequence[Query], bundles: list[Sequence[int]], covered: range, limits: Limits
) -> Chain:
    """Make a chain that begins with the longest sequence; only that pack if it contains all others."""
    longest = max(asked, key=lambda query: len(query.tokens))
    rows = tree.insert(longest.tokens)
    rows_of = tree.insert_within(asked, tree.num_tokens)
    if rows_of is not None:
        return Chain(pack_of(tree, rows_of, asked, covered), bundles, limits, continued=False)
    silent = replace(longest, targets=longest.targets[:0])
    return Chain(pack_of(tree, [rows], [silent], covered), bundles, limits, continued=True)


def continue_pack(pack: Pack, queries: Sequence[Query], token_budget: int) -> Iterator[Pack]:
    """Yield packs of branches only, `queries` that continue rows of `pack`, with at most `token_budget` new rows each.

    A query that is over the budget by itself gets a pack of its own. Each query counts as a bundle.
    """
    tree, start = pack.tree, 0
    mark, fed = tree.checkpoint(), tree.num_tokens
    while start < len(queries):
        rows_of, stop = [tree.insert(queries[start].tokens, queries[start].alone_from)], start + 1
        while stop < len(queries):
            rows = tree.insert_within(queries[stop : stop + 1], fed + token_budget)
            if rows is None:
                break
            rows_of += rows
            stop += 1
        made = pack_of(tree, rows_of, queries[start:stop], range(start, stop), fed)
        tree.rollback(mark)
        yield made
        start = stop


def pack_of(
    tree: PrefixTree, rows_of: list[np.ndarray], queries: Sequence[Query], covered: range, first_row: int = 0
) -> Pack:
    """Make the pack of a tree's rows from `first_row` on, for queries whose tokens have the rows `rows_of`."""
    none = np.zeros(0, np.int64)
    wanted = [rows[q.first : q.first + len(q.targets)] for rows, q in zip(rows_of, queries, strict=True)]
    rows = np.concatenate([none, *wanted]).astype(np.int64)
    targets = np.concatenate([none, *(query.targets for query in queries)])
    # Queries that ask the same row for the same token share one logits row.
    key = rows * (int(targets.max(initial=0)) + 1) + targets
    _, asked, index = np.unique(key, return_index=True, return_inverse=True)
    table = tree.table()
    return Pack(
        input_ids=tree.input_ids()[first_row:],
        position_ids=table.positions()[first_row:],
        table=table,
        rows=rows[asked],
        targets=targets[asked],
        query_index=index,
        bundles=covered,
        tree=tree,
        first_row=first_row,
    )
