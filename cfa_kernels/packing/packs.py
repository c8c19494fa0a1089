"""Packing token sequences into shared-prefix trees: what is common is laid out, and computed, once.

Every sequence to score, a completion or one of its masked branches, is inserted into a radix tree. Equal
prompts, equal completions, equal branches and any longer common prefix are then shared by construction, and each
sequence adds one segment: the part of it that no earlier sequence had.
"""

import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .prefix_tree import Pack, PrefixTree, Query


@dataclass(frozen=True)
class Limits:
    """What the packs that a model is fed keep to.

    Attributes:
        token_budget: most tokens of a pack; a sequence that is over it by itself gets its own pack.
        continues: whether a pack may continue the rows of an earlier one, by its keys and values.
        most_rows: most rows of a pack and the one that it continues together; None for any number.

    Raises:
        ValueError: a token budget that is not a whole number, at least one.
    """

    token_budget: int
    continues: bool = True
    most_rows: int | None = None

    def __post_init__(self) -> None:
        check_token_budget(self.token_budget)


def check_token_budget(token_budget: int) -> None:
    """Raise `ValueError` for what is not a whole number of tokens, at least one."""
    if isinstance(token_budget, bool) or not isinstance(token_budget, numbers.Integral):
        raise ValueError(f"token_budget must be a whole number of tokens, got {token_budget!r}")
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, got {token_budget}")


def pack_units(units: Sequence[Sequence[Query]], token_budget: int) -> list[Pack]:
    """Cut `units` into packs of at most `token_budget` fed tokens each, in order.

    A unit is what must be scored together: a completion and its masked branches. A unit that alone is over the
    budget gets a pack of its own. Neighbours in `units` share what they have in common, so put completions of
    one prompt side by side. An empty unit costs nothing.

    Raises `ValueError` for a token budget below one.
    """
    return list(lay_out(units, token_budget))


def lay_out(units: Sequence[Sequence[Query]], token_budget: int) -> Iterator[Pack]:
    """`pack_units`, each pack made when it is asked for: while a device runs the one before."""
    return (_whole(units, *cut) for cut in _cut(units, Limits(token_budget)))


def _cut(
    units: Sequence[Sequence[Query]], limits: Limits
) -> Iterator[tuple[range, PrefixTree, list[np.ndarray] | None]]:
    """Neighbouring units that fit in a pack, with their tree and rows; one that alone does not, with an empty tree."""
    tree, rows_of, start = PrefixTree(), list[np.ndarray](), 0
    for i, unit in enumerate(units):
        rows = tree.insert_within(unit, limits.token_budget)
        if rows is None and tree.num_tokens:
            yield range(start, i), tree, rows_of
            tree, rows_of, start = PrefixTree(), [], i
            rows = tree.insert_within(unit, limits.token_budget)
        if rows is None:
            yield range(start, i + 1), tree, None
            tree, start = PrefixTree(), i + 1
        else:
            rows_of += rows
    if tree.num_tokens:
        yield range(start, len(units)), tree, rows_of


def _whole(
    units: Sequence[Sequence[Query]], covered: range, tree: PrefixTree, rows_of: list[np.ndarray] | None
) -> Pack:
    """One pack of all that `_cut` found, also where it does not fit."""
    queries = [query for i in covered for query in units[i]]
    if rows_of is None:
        rows_of = [tree.insert(query.tokens, query.alone_from) for query in queries]
    return _finish(tree, rows_of, queries, covered)


@dataclass(frozen=True)
class Chain:
    """A pack of some units; or, for one that does not fit, a pack of its longest sequence and those that continue it.

    Queries are known by their numbers in a list that all chains share.
    """

    first: Pack  # answers all queries, or none if others continue it
    units: list[Sequence[int]]  # the queries of each of its units
    limits: Limits
    continued: bool

    def packs(self, queries: Sequence[Query]) -> Iterator[tuple[Pack, list[int]]]:
        """Every pack with the numbers of the queries that it answers, in order, made when it is asked for."""
        numbers = [n for unit in self.units for n in unit]
        yield self.first, [] if self.continued else numbers
        if self.continued:
            budget, most = self.limits.token_budget, self.limits.most_rows
            if most is not None:
                budget = max(min(budget, most - self.first.num_tokens), 1)
            for pack in continue_pack(self.first, [queries[n] for n in numbers], budget):
                yield pack, [numbers[i] for i in pack.units]


def chain_units(queries: Sequence[Query], units: Sequence[Sequence[int]], limits: Limits) -> Iterator[Chain]:
    """Cut units of queries, given by number, into chains of packs, in order, each made when it is asked for.

    Units share packs as in `pack_units`. One that alone is over the budget is split: its longest sequence is fed first,
    and what leaves that one goes into packs that continue its rows, so nothing is fed twice; where no pack may continue
    another, each feeds what its queries have in common again. Queries are answered in their order.
    """
    for covered, tree, rows_of in _cut([[queries[n] for n in unit] for unit in units], limits):
        inside = [units[i] for i in covered]
        asked = [queries[n] for unit in inside for n in unit]
        if rows_of is not None:
            yield Chain(_finish(tree, rows_of, asked, covered), inside, limits, continued=False)
        elif limits.continues:
            yield _continued(tree, asked, inside, covered, limits)
        else:
            numbers = [n for unit in inside for n in unit]
            for pack in lay_out([[query] for query in asked], limits.token_budget):
                yield Chain(pack, [[numbers[i] for i in pack.units]], limits, continued=False)


def _continued(
    tree: PrefixTree, asked: Sequence[Query], units: list[Sequence[int]], covered: range, limits: Limits
) -> Chain:
    """A chain that begins with the longest sequence; of that pack alone if all others lie on it."""
    longest = max(asked, key=lambda query: len(query.tokens))
    rows = tree.insert(longest.tokens)
    rows_of = tree.insert_within(asked, tree.num_tokens)
    if rows_of is not None:
        return Chain(_finish(tree, rows_of, asked, covered), units, limits, continued=False)
    silent = replace(longest, targets=longest.targets[:0])
    return Chain(_finish(tree, [rows], [silent], covered), units, limits, continued=True)


def continue_pack(pack: Pack, queries: Sequence[Query], token_budget: int) -> Iterator[Pack]:
    """Packs of only branches: `queries` that continue rows which `pack` fed, at most `token_budget` new rows each.

    A query that is over the budget by itself gets a pack of its own. `units` of the result counts queries. Each is
    made when it is asked for.
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
        made = _finish(tree, rows_of, queries[start:stop], range(start, stop), fed)
        tree.rollback(mark)
        yield made
        start = stop


def _finish(
    tree: PrefixTree, rows_of: list[np.ndarray], queries: Sequence[Query], covered: range, first_row: int = 0
) -> Pack:
    wanted = [rows[q.first : q.first + len(q.targets)] for rows, q in zip(rows_of, queries, strict=True)]
    rows = np.concatenate(wanted).astype(np.int64)
    targets = np.concatenate([query.targets for query in queries])
    tempered = np.repeat([query.tempered for query in queries], [len(query.targets) for query in queries])
    # Two queries that ask the same row for the same token share one head row; tempered ones come last.
    num_ids = int(targets.max(initial=0)) + 1
    key = (tempered * np.int64(tree.num_tokens) + rows) * num_ids + targets
    _, asked, index = np.unique(key, return_index=True, return_inverse=True)
    table = tree.table()
    return Pack(
        input_ids=tree.input_ids()[first_row:],
        position_ids=table.positions()[first_row:],
        table=table,
        rows=rows[asked],
        targets=targets[asked],
        num_tempered=int(tempered[asked].sum()),
        query_index=index,
        units=covered,
        tree=tree,
        first_row=first_row,
    )
