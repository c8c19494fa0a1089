"""Would a step be shorter if finished groups were worked on while others are still decoded?

Decoding reads memory, scoring multiplies: side by side they could share a GPU. Two jobs run at once, each at the speed
that is left to it of what both ask for: tensor cores, bandwidth and the host's thread.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from torch import nn

from benchmarks.explain.batch import Described
from benchmarks.explain.rates import HOST, Rates
from benchmarks.explain.step import BACKWARD, CREDIT, DECODE, FORWARD, LOSS, PREFILL, count_decoding, count_update
from benchmarks.explain.tally import ATTENTION, GEMM, HEAD, PARTS, Counts
from benchmarks.harness.workloads import SEED, corpus

TILE = 25e-6
"""Seconds that a block of a large product keeps one of an H200's 132 multiprocessors: 128 x 256 sums of 2,048 terms.

Blocks are not interrupted, also by a stream of higher priority: a kernel that needs all multiprocessors waits for half
of it on average. An estimate.
"""


@dataclass(frozen=True)
class Work:
    """Seconds that a job takes by itself, and for which it needs each thing that jobs share."""

    alone: float = 0.0
    products: float = 0.0
    bandwidth: float = 0.0
    host: float = 0.0

    @staticmethod
    def of(counts: Counts, rates: Rates, section: str, *, only: str | None = None, but: str | None = None) -> "Work":
        """Add up a section, of one part or of all but one; a host that runs ahead of the device takes no time."""
        parts = [part for part in PARTS if part != but and only in (None, part)]
        return Work(counts.seconds(rates, section, *parts), *counts.needs(rates, section, *parts))

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, count: float, host: float = 0.0) -> "Work":
        """Return `count` of it, launched in `host` seconds by a thread that other jobs use as well."""
        return Work(max(count * self.alone, host), count * self.products, count * self.bandwidth, host)

    def beside(self, other: "Work") -> float:
        """Factor by which both slow down when they run at once."""
        one, two = ([need / work.alone for need in astuple(work)[1:]] for work in (self, other))
        return max(1.0, *(a + b for a, b in zip(one, two, strict=True)))


def overlapped(ends: Sequence[int], tokens: Sequence[Work], waited: float, jobs: Sequence[Work]) -> float:
    """Seconds until all tokens are decoded and all jobs done, one after the other.

    Args:
        ends: tokens after which each job can start, ascending; the last is decoded last.
        tokens: each one of every completion that goes on, in order.
        waited: seconds more that a token takes while a job runs.
        jobs: with what they need.
    """
    clock, position = 0.0, 0
    queue: list[tuple[Work, float]] = []  # with the share that is left
    for end, arriving in zip(ends, jobs, strict=True):
        alone = sum(tokens[position:end], Work())
        slowed = alone + Work((end - position) * waited)
        left = 1.0  # of these tokens
        while queue and end > position and left > 0:
            job, rest = queue.pop(0)
            slower = slowed.beside(job)
            decoded, done = left * slowed.alone * slower, rest * job.alone * slower
            clock += min(decoded, done)
            left = max(0.0, left * (1 - done / decoded))
            if decoded < done:
                queue.insert(0, (job, rest * (1 - decoded / done)))
        clock += left * alone.alone
        position = end
        queue.append((arriving, 1.0))
    return clock + sum(job.alone * left for job, left in queue)


@dataclass(frozen=True)
class Parts:
    """Work of a step.

    Attributes:
        prompts: seconds of the prompts' forward.
        tokens: each token of every completion that goes on, in order.
        ends: tokens after which each group ends, ascending.
        waiting: kernels of a token that need the whole GPU.
        group: of a group, by section.
        host: seconds of the host for a pack, by section.
        packed: groups of a pack when all are there.
    """

    prompts: float
    tokens: list[Work]
    ends: list[int]
    waiting: int
    group: dict[str, Work]
    host: dict[str, float]
    packed: float

    @staticmethod
    def of(
        policy: nn.Module,
        shape: Callable[..., Described],
        lengths: Sequence[Sequence[int]],
        rates: Rates,
        *,
        padded: bool,
    ) -> "Parts":
        """Count decoding of groups of `lengths`, in a graph with adapters merged, and the update of four such groups.

        Args:
            policy: on torch's `meta` device.
            shape: makes a batch of so many problems, in groups of a size, decoded up to a longest.
            lengths: tokens of each completion, by group.
            rates: of the GPU.
            padded: completions that have ended are decoded on and every place of the cache is read, as `generate`
                does; else only what goes on, as by continuous batching.
        """
        group, longest = len(lengths[0]), max(map(max, lengths))
        some = shape(min(4, len(lengths)), group, longest)
        counts, fed = count_update(policy, some, rates.memory, fused=True)
        batch = shape(len(lengths), group, longest)
        many = count_decoding(policy, batch, merged=True)
        few = many if padded else count_decoding(policy, shape(1, group, longest), merged=True)
        rows, fewer, size = len(batch.prompts), group, len(batch.prompts[0]) + longest
        tokens = []
        for position in range(longest):
            live = sum(length > position for row in lengths for length in row)
            seen = 1.0 if padded else live * (size - longest + position + 1) / (rows * size)
            share = 1.0 if padded or rows == fewer else (live - fewer) / (rows - fewer)
            one = Work.of(few, rates, DECODE, but=ATTENTION).times(1 - share)
            one += Work.of(many, rates, DECODE, but=ATTENTION).times(share)
            one += Work.of(many, rates, DECODE, only=ATTENTION).times(seen)
            tokens.append(one + Work(HOST.replay, host=HOST.replay))
        return Parts(
            many.seconds(rates, PREFILL),
            tokens,
            sorted(max(row) for row in lengths),
            many.launches(DECODE, GEMM, HEAD, ATTENTION),
            {section: Work.of(counts, rates, section).times(1 / some.mixed) for section in ALL},
            {section: counts.launches(section) / fed["packs"] * (HOST.backward if section == BACKWARD else HOST.forward)
             for section in ALL},
            some.mixed / fed["packs"],
        )  # fmt: skip

    def job(self, sections: Sequence[str], groups: float, *, host: bool = True) -> Work:
        """Work on so many groups in one pack, with what it needs of the host or without."""
        one = sum((self.group[section] for section in sections), Work())
        return one.times(groups, sum(self.host[section] for section in sections) if host else 0.0)


ALL = (FORWARD, CREDIT, LOSS, BACKWARD)
SCORING, LEARNING = (FORWARD, CREDIT), (FORWARD, LOSS, BACKWARD)
AFTER = "all after decoding"
SCHEDULES = {
    AFTER: ((), ALL, True),
    "credit beside decoding": (SCORING, LEARNING, True),
    "credit and update beside decoding": (ALL, (), True),
    "credit while another GPU decodes": (SCORING, LEARNING, False),
    "credit and update while another GPU decodes": (ALL, (), False),
}
"""By name: what is done as groups end, what after all have, and whether decoding is on the same GPU and host.

Beside decoding credit takes a forward of its own, for the update's keeps what its backward reads; with the update it
continues that one's keys and values.
"""


def seconds(of: Parts, schedule: str) -> float:
    """Time of a step; as many of the groups that wait share a pack as is best."""
    meanwhile, later, shared = SCHEDULES[schedule]
    groups = len(of.ends)
    after = of.prompts + groups / of.packed * of.job(later, of.packed).alone
    if not meanwhile:
        return after + sum(of.tokens, Work()).alone
    tokens = of.tokens if shared else [Work(token.alone) for token in of.tokens]
    found = []
    for size in (2**power for power in range(groups.bit_length())):
        cuts = [of.ends[i : i + size] for i in range(0, groups, size)]
        jobs = [of.job(meanwhile, len(cut)) for cut in cuts]
        found.append(overlapped([cut[-1] for cut in cuts], tokens, of.waiting * TILE / 2 * shared, jobs))
    return after + min(found)


def bound(of: Parts, schedule: str) -> float:
    """Least time of a step, however products and bandwidth are shared; nothing else is shared or waited for."""
    meanwhile, later, shared = SCHEDULES[schedule]
    groups = len(of.ends)
    after = of.prompts + groups * of.job(later, 1, host=False).alone
    decoded, job = sum(of.tokens, Work()), of.job(meanwhile, groups, host=False)
    both = decoded + job if shared else Work()
    first = sum(of.tokens[: of.ends[0]], Work()).alone + job.alone
    return after + max(first, decoded.alone + job.alone / groups, both.products, both.bandwidth)


def real_lengths(problems: int, group: int, mean: int, longest: int) -> list[list[int]]:
    """Tokens of each completion, by group: those of the corpus by their characters, scaled to a mean of `mean`.

    Four solutions of each problem, as often as a group takes; those above `longest` are cut off.
    """
    lengths = [[len(text) for text in solutions[:4]] for _, solutions in corpus().problems]
    scale = mean * sum(map(len, lengths)) / sum(map(sum, lengths))
    drawn = random.Random(SEED).sample(lengths, problems)
    return [[min(round(row[i % len(row)] * scale), longest) for i in range(group)] for row in drawn]


def markdown(columns: dict[str, Parts]) -> str:
    """The table in milliseconds: the least that sharing could take, what it is predicted to take, and the change."""
    lines = [["schedule, ms", *columns], ["---", *["---:"] * len(columns)]]
    for name in SCHEDULES:
        cells = []
        for of in columns.values():
            took, today = seconds(of, name), seconds(of, AFTER)
            change = f" ({took / today - 1:+.0%}; at least {bound(of, name) * 1e3:,.0f})" if name != AFTER else ""
            cells.append(f"{took * 1e3:,.0f}{change}")
        lines.append([name, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
