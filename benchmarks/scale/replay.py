"""Replay completions over ranks: deal groups, cut them into packs as the library does, let ranks wait for each other.

Nothing runs on a device. A rank is a process with a GPU. Ranks hold a model in pieces, start every forward together,
and feed idle packs where they have fewer packs than others (`cfa_kernels.hf.ranks`).
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.harness.workloads import SEED, Rollouts
from cfa_kernels.packing.balance import deal, rows_to_score
from cfa_kernels.packing.prefix_tree import PrefixTree, Query
from cfa_kernels.scoring.batch import Row
from cfa_kernels.scoring.plan import ScoringOptions, queries_of

BACKWARD = 2
"""Operations of a backward over those of its forward, where all weights train."""

Bundles = list[list[int]]
"""Rows that the bundles of a group feed: in line i, those of bundle i, of i and i + 1 in one pack, and so on."""


def counted(bundles: Sequence[Sequence[Query]]) -> Bundles:
    """Count the rows of bundles by the library's tree."""

    def rows_from(first: int) -> Iterator[int]:
        tree = PrefixTree()
        for bundle in bundles[first:]:
            for query in bundle:
                tree.insert(query.tokens)
            yield tree.num_tokens

    return [list(rows_from(first)) for first in range(len(bundles))]


def packed(groups: Sequence[Bundles], most: int) -> list[int]:
    """Count the rows of each pack, as `cfa_kernels.packing.packs` cuts groups that share nothing with each other.

    Raises:
        ValueError: a bundle with more than `most` rows, which the library would feed in a chain of packs.
    """
    full, rows = list[int](), 0
    for bundles in groups:
        first, before = 0, rows  # the group's first bundle in this pack, and the rows there before it
        for i in range(len(bundles)):
            if rows and before + bundles[first][i - first] > most:
                full.append(rows)
                first, before = i, 0
            rows = before + bundles[first][i - first]
            if rows > most:
                raise ValueError(f"--rows: a forward must hold the {rows:,} rows of a completion, got {most:,}")
    return full + [rows] * bool(rows)


@dataclass(frozen=True)
class Group:
    """Completions of one prompt, as what the passes of a step feed of them.

    Attributes:
        scored: a bundle for each completion: its answer as it is and with each span masked.
        trained: one bundle, every token of all completions.
        tokens: of the prompt once and of all completions.
        rows: that scoring feeds, by the library's estimate.
        live: whether its rewards differ, so that it has an advantage.
    """

    scored: Bundles
    trained: Bundles
    tokens: int
    rows: int
    live: bool

    @staticmethod
    def of(rows: Sequence[Row], placeholder_id: int, *, live: bool = True) -> "Group":
        """Make the group of some completions, all with an answer."""
        prompt, answers = len(rows[0].prompt), [row.answer for row in rows if row.answer is not None]
        whole = [replace(row, answer=None) for row in rows]
        return Group(
            counted([queries_of(row, ScoringOptions(), placeholder_id) for row in rows]),
            counted([[query for row in whole for query in queries_of(row, ScoringOptions(logprobs=True), None)]]),
            prompt + sum(len(row.completion) for row in rows),
            rows_to_score(prompt, [row.spans for row in rows], answers),
            live,
        )


def groups_of(rollouts: Rollouts) -> list[Group]:
    """Make the groups of rollouts."""
    job, size = rollouts.job, rollouts.group
    rows = [
        Row(prompt.numpy(), completion.numpy(), spans, answer)
        for prompt, completion, spans, answer in zip(job.prompts, job.completions, job.spans, job.answers, strict=True)
    ]
    live = rollouts.advantages.view(-1, size).ne(0).any(1).tolist()
    return [Group.of(rows[g * size : (g + 1) * size], job.placeholder_id, live=one) for g, one in enumerate(live)]


def _drawn(groups: Sequence[Group], count: int) -> list[Group]:
    """Draw groups in passes over all of them, each pass in a random order."""
    rng = random.Random(SEED)
    passes = (i for _ in itertools.count() for i in rng.sample(range(len(groups)), len(groups)))
    return [groups[i] for i in itertools.islice(passes, count)]


Deal = Callable[[Group], float] | None
"""Sizes by which groups are dealt over ranks; None leaves each group where it was sampled."""

DEALS: dict[str, Deal] = {
    "as sampled": None,
    "by tokens": lambda group: group.tokens,
    "by rows": lambda group: group.rows,
    "by both": lambda group: group.rows + (1 + BACKWARD) * group.tokens,
}


def shares(
    groups: Sequence[Group], ranks: int, per_rank: int, *, live: bool
) -> Iterator[tuple[str, list[list[Group]]]]:
    """Yield what each rank gets of `per_rank` groups sampled per rank, for each of `DEALS`.

    `live` leaves out groups without an advantage.
    """
    drawn = _drawn(groups, ranks * per_rank)
    for name, size in DEALS.items():
        if size is None:
            own = [drawn[rank * per_rank : (rank + 1) * per_rank] for rank in range(ranks)]
            yield name, [[group for group in share if group.live or not live] for share in own]
        else:
            kept = [group for group in drawn if group.live or not live]
            yield name, [[kept[i] for i in share] for share in deal([size(group) for group in kept], ranks)]


@dataclass(frozen=True)
class Outcome:
    """What ranks do in one pass or several.

    Attributes:
        forwards: that every rank runs: as many as the one with the most packs.
        rows: fed by a rank, in the mean.
        own: seconds of a rank's own packs, in the mean.
        whole: seconds that it takes, as every forward takes as long as on the rank with the most rows in it.
    """

    forwards: int
    rows: float
    own: float
    whole: float

    @property
    def idle(self) -> float:
        """Share of the ranks' time in which they wait for others or feed idle packs."""
        return max(1 - self.own / self.whole, 0.0) if self.whole else 0.0

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(
            self.forwards + other.forwards, self.rows + other.rows, self.own + other.own, self.whole + other.whole
        )


def in_step(packs: Sequence[Sequence[int]], seconds: Callable[[int], float]) -> Outcome:
    """Let ranks run packs of so many rows each, every forward started together.

    Args:
        packs: rows of each pack of each rank.
        seconds: of a forward of so many rows, with its backward where there is one.
    """
    forwards = list(itertools.zip_longest(*packs, fillvalue=1))  # an idle pack is one token
    own = sum(seconds(rows) for rank in packs for rows in rank) / len(packs)
    rows = sum(map(sum, packs)) / len(packs)
    return Outcome(len(forwards), rows, own, sum(max(map(seconds, forward)) for forward in forwards))
