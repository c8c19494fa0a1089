"""Pack token sequences into prefix trees, so that common prefixes are laid out and computed once.

Queries that are scored together, a completion and its masked branches, are a bundle. Bundles and packs name queries by
their place in a list, or key in a mapping.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .prefix_tree import Pack, PrefixTree, Query

Queries = Sequence[Query] | Mapping[int, Query]


@dataclass(frozen=True)
class Limits:
    """Limits of the packs that a model is fed."""

    token_budget: int  # maximum tokens of a pack; a longer sequence gets its own pack
    trunks: bool = True  # whether a pack may continue the rows of an earlier one, by their keys and values
    most_rows: int | None = None  # maximum rows of a pack together with its trunk


def groups_within(sizes: Sequence[int], most: int, total: Callable[[Sequence[int]], int] = sum) -> list[range]:
    """Cut neighbours into groups whose sizes have a `total` of at most `most`; a larger one is a group by itself."""
    start = 0

    def fits(i: int, first: bool) -> bool:
        nonlocal start
        start = i if first else start
        return total(sizes[start : i + 1]) <= most

    return list(_groups(len(sizes), fits))


def lay_out(
    queries: Queries, bundles: Sequence[Sequence[int]], token_budget: int, *, trunk: Pack | None = None
) -> Iterator[Pack]:
    """Cut bundles into packs of at most `token_budget` fed tokens each, in order, one pack at a time.

    A bundle over the budget gets its own pack. Neighbours share common prefixes, so put completions of
    one prompt side by side. Packs that continue a `trunk` feed only what it has not fed.
    """
    for chosen, tree, rows_of in _fill(queries, bundles, token_budget, trunk):
        if rows_of is None:
            rows_of = [tree.insert(queries[n].tokens, queries[n].alone_from) for n in chosen]
        yield pack_of(tree, queries, chosen, rows_of, trunk=trunk)


def lay_out_each(queries: Queries, chosen: Sequence[int], token_budget: int, *, trunk: Pack) -> Iterator[Pack]:
    """Lay out queries that may each be in any pack, as `lay_out` does, behind a `trunk`.

    If one pack does not hold them, those that share rows which the trunk has not fed are put side by side.
    """
    tree = trunk.tree.copy()
    rows_of = tree.insert_within([queries[n] for n in chosen], tree.num_tokens + token_budget)
    if rows_of is None:
        order = [n for own in _alike(queries, chosen, trunk.tree) for n in own]
        yield from lay_out(queries, [[n] for n in order], token_budget, trunk=trunk)
    elif chosen:
        yield pack_of(tree, queries, chosen, rows_of, trunk=trunk)


def lay_out_split(queries: Queries, groups: Sequence[Sequence[Sequence[int]]], limits: Limits) -> Iterator[Pack]:
    """Lay out the bundles of groups as `lay_out` does, and split what is over the budget by itself.

    A pack without queries is fed first, and those that answer the queries continue it as their trunk, so nothing is fed
    twice. It holds the bundle's longest sequence. A group over the budget whose bundles share other rows too has one
    trunk: the first sequence of each bundle. Without trunks, each pack feeds the common prefix of its queries again.
    """
    together = list[Sequence[int]]()
    for bundles in groups:
        if (tree := _shared_trunk(queries, bundles, limits) if limits.trunks else None) is None:
            together += bundles
            continue
        yield from _split(queries, together, limits)
        yield from lay_out_behind(pack_of(tree), queries, bundles, limits, feed=True)
        together = []
    yield from _split(queries, together, limits)


def _split(queries: Queries, bundles: Sequence[Sequence[int]], limits: Limits) -> Iterator[Pack]:
    for chosen, tree, rows_of in _fill(queries, bundles, limits.token_budget):
        if rows_of is None and not limits.trunks:
            yield from lay_out(queries, [[n] for n in chosen], limits.token_budget)
            continue
        if rows_of is None:
            tree.insert(max((queries[n].tokens for n in chosen), key=len))
            rows_of = tree.insert_within([queries[n] for n in chosen], tree.num_tokens)
        if rows_of is not None:
            yield pack_of(tree, queries, chosen, rows_of)
        else:
            yield from lay_out_behind(pack_of(tree), queries, [chosen], limits, feed=True)


def lay_out_behind(
    trunk: Pack, queries: Queries, bundles: Sequence[Sequence[int]], limits: Limits, *, feed: bool = False
) -> Iterator[Pack]:
    """Lay out what bundles add to a `trunk`, which comes first if something continues it and `feed` is set.

    Queries for which the trunk leaves too few of `most_rows` come last, in packs without it.
    """
    rest = None if limits.most_rows is None else limits.most_rows - trunk.num_tokens
    behind, apart = list[int](), list[int]()
    for bundle in bundles:
        fits = [rest is None or trunk.tree.num_missing(queries[n]) <= rest for n in bundle]
        # A divergence is read after the first query of its bundle.
        all_apart = bool(bundle) and queries[bundle[0]].divergence and not fits[0]
        for n, one in zip(bundle, fits, strict=True):
            (behind if one and not all_apart else apart).append(n)
    if feed and behind:
        yield trunk
    most = limits.token_budget if rest is None else min(limits.token_budget, rest)
    yield from lay_out_each(queries, behind, most, trunk=trunk)
    yield from lay_out(queries, [[n] for n in apart], limits.token_budget)


def _shared_trunk(queries: Queries, bundles: Sequence[Sequence[int]], limits: Limits) -> PrefixTree | None:
    """Lay out the first query of each bundle, if bundles share rows beyond them and do not fit in one pack."""
    tree, chosen = PrefixTree(), [n for bundle in bundles for n in bundle]
    # At most half a pack: it is not cut where memory ends.
    if not tree.insert_within([queries[bundle[0]] for bundle in bundles if bundle], limits.token_budget // 2):
        return None
    bundle_of = {n: i for i, bundle in enumerate(bundles) for n in bundle}
    if all(len({bundle_of[n] for n in own}) == 1 for own in _alike(queries, chosen, tree)):
        return None
    fits = tree.copy().insert_within([queries[n] for n in chosen], limits.token_budget) is not None
    return None if fits else tree


def _alike(queries: Queries, chosen: Sequence[int], tree: PrefixTree) -> list[list[int]]:
    """List queries that leave a tree alike together, in the order of their tokens, and all others by themselves."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for n in chosen:
        tokens, (segment, depth) = queries[n].tokens[: queries[n].alone_from], tree.find_shared(queries[n])
        # A divergence is read after the first query of its bundle.
        stays = depth == len(tokens) or queries[n].divergence
        alike.setdefault((n,) if stays else (segment, depth, tokens.item(depth)), []).append(n)
    return [sorted(own, key=lambda n: queries[n].tokens.tobytes()) for own in alike.values()]


def idle_pack() -> Pack:
    """Make a pack of one token without a target, for a process that must run a forward because others do."""
    tree = PrefixTree()
    tree.insert(np.zeros(1, np.int64))
    return pack_of(tree)


def pack_of(
    tree: PrefixTree,
    queries: Queries = (),
    chosen: Sequence[int] = (),
    rows_of: Sequence[np.ndarray] = (),
    *,
    trunk: Pack | None = None,
) -> Pack:
    """Make the pack of a tree's rows, without those of its trunk.

    It answers the `chosen` of the queries, whose tokens have the rows `rows_of`.
    """
    asked, none = [queries[n] for n in chosen], np.zeros(0, np.int64)
    wanted = [rows[q.first : q.first + len(q.targets)] for rows, q in zip(rows_of, asked, strict=True)]
    rows = np.concatenate([none, *wanted]).astype(np.int64)
    targets = np.concatenate([none, *(query.targets for query in asked)])
    # Queries that ask the same row for the same token share one logits row.
    key = rows * (int(targets.max(initial=0)) + 1) + targets
    _, unique, index = np.unique(key, return_index=True, return_inverse=True)
    table = tree.table()
    first_row = 0 if trunk is None else trunk.tree.num_tokens
    return Pack(
        input_ids=tree.input_ids()[first_row:],
        position_ids=table.positions()[first_row:],
        table=table,
        rows=rows[unique],
        targets=targets[unique],
        query_index=index,
        queries=list(chosen),
        tree=tree,
        first_row=first_row,
        trunk=trunk,
    )


def _fill(
    queries: Queries, bundles: Sequence[Sequence[int]], token_budget: int, trunk: Pack | None = None
) -> Iterator[tuple[list[int], PrefixTree, list[np.ndarray] | None]]:
    """Yield the queries of neighbouring bundles that fit in a pack, with tree and rows; no rows if one does not fit."""
    base = PrefixTree() if trunk is None else trunk.tree
    tree, rows_of = base, list[np.ndarray]()

    def fits(i: int, first: bool) -> bool:
        nonlocal tree, rows_of
        if first:
            tree, rows_of = base.copy(), []
        rows = tree.insert_within([queries[n] for n in bundles[i]], base.num_tokens + token_budget)
        rows_of += rows or []
        return rows is not None

    for group in _groups(len(bundles), fits):
        if chosen := [n for i in group for n in bundles[i]]:
            yield chosen, tree, rows_of or None


def _groups(count: int, fits: Callable[[int, bool], bool]) -> Iterator[range]:
    """Cut neighbours into groups as long as `fits(i, first)`; `first` begins a group, and stays in any case."""
    start, is_open = 0, False
    for i in range(count):
        if not (is_open and fits(i, False)):
            if i:
                yield range(start, i)
            start, is_open = i, fits(i, True)
    if count:
        yield range(start, count)
