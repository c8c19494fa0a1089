"""`python -m benchmarks scale`: predict how long ranks that share a model wait for each other, by their number.

Groups of real lengths are dealt over ranks, their packs cut as the library cuts them, and a forward takes as long as on
the rank with the most rows in it. Nothing runs on a device. The tables are in `docs/planning.md`.
"""

import argparse
import copy
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness.results import table
from benchmarks.harness.workloads import MODELS, SEED, JobRollouts, gsm8k_rollouts
from cfa_kernels.tree.balance import deal, rows_to_score

MATMUL_SHARE = 0.73
"""Share of a data sheet's rate that large matrix products reach."""

RATES = {
    name: tflops * MATMUL_SHARE * 1e12
    for name, tflops in {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "MI300X": 1307.4}.items()
}
"""Multiply-adds, twice, per second: NVIDIA's and AMD's data sheets, SXM where there is one, dense bfloat16."""

RANKS = tuple(2**power for power in range(11))

NODE = 8
"""GPUs of a node, joined by NVLink."""

INSIDE, ACROSS = 360e9, 200e9
"""Bus bandwidth of an all-gather, bytes/s: among the 8 H100 of a node (NVIDIA/nccl-tests issue 326), and among 256 H100
in 32 nodes with eight adapters each (NVIDIA/nccl issue 1218, reported there as low)."""

BACKWARD = 2
"""Products of a backward in which all weights train, relative to its forward."""

HALF, FLOAT, INT64 = 2, 4, 8


@dataclass(frozen=True)
class ShardedRanks:
    """Ranks that hold a model in pieces, all of whose weights train.

    Attributes:
        count: how many.
        products: weights that a row is multiplied by.
        weights: all of them, gathered in bfloat16.
        rate: multiply-adds, twice, per second of a rank.
    """

    count: int
    products: int
    weights: int
    rate: float

    def moving(self, size: float) -> float:
        """Seconds in which `size` bytes are gathered from all ranks, or summed and scattered over them."""
        return size * (self.count - 1) / self.count / (INSIDE if self.count <= NODE else ACROSS)

    def forward(self, rows: float) -> float:
        """Seconds of a forward: products, or gathering if that is longer, as the two run side by side."""
        return max(2 * self.products * rows / self.rate, self.moving(HALF * self.weights))

    def update(self, rows: float) -> float:
        """Seconds of a forward with its backward: weights gathered twice, float32 gradients summed once."""
        moved = self.moving((2 * HALF + FLOAT) * self.weights)
        return max((1 + BACKWARD) * 2 * self.products * rows / self.rate, moved)


@dataclass(frozen=True)
class GroupRows:
    """Completions of one prompt.

    Attributes:
        prompt: its tokens.
        scored: rows that scoring feeds of each completion, the prompt left out.
        tokens: of the prompt once and of all completions.
        live: whether its rewards differ, so that it has an advantage.
    """

    prompt: int
    scored: tuple[int, ...]
    tokens: int
    live: bool

    @property
    def rows(self) -> int:
        """Rows that scoring feeds."""
        return self.prompt + sum(self.scored)


def weights_of(model: str) -> tuple[int, int]:
    """Count a dense model's weights that a row is multiplied by, the head left out, and all of them; it gets no memory.

    Args:
        model: a preset, a `config.json`, or the folder that it is in.

    Raises:
        ValueError: neither of them, or a model with experts, whose rows do not meet all weights.
    """
    try:
        known = MODELS.get(model)
        config = AutoConfig.from_pretrained(model, local_files_only=True) if known is None else copy.deepcopy(known)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model: must be one of {', '.join(MODELS)}, or a config.json; got {model!r}") from error
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    if experts := [name for name, module in made.named_modules() if hasattr(module, "num_experts")]:
        raise ValueError(f"--model: experts ({experts[0]}) are not counted; name a dense model")
    head = made.get_output_embeddings()
    layers = [m for m in made.modules() if isinstance(m, nn.Linear) and m is not head]
    return sum(m.weight.numel() for m in layers), made.num_parameters()


def groups_of(rollouts: JobRollouts) -> list[GroupRows]:
    """Make the groups of rollouts."""
    job, size = rollouts.job, rollouts.group
    groups = []
    for first in range(0, len(job.prompts), size):
        rows, prompt = range(first, first + size), len(job.prompts[first])
        scored = tuple(rows_to_score(0, [job.spans[b]], [job.answers[b]]) for b in rows)
        live = bool(rollouts.advantages[first : first + size].any())
        groups.append(GroupRows(prompt, scored, prompt + sum(len(job.completions[b]) for b in rows), live))
    return groups


def packs(groups: Sequence[GroupRows], most: int) -> list[int]:
    """Count the rows of each pack: completions one after the other, their prompt once in a pack.

    Raises:
        ValueError: a completion that no pack of `most` rows holds.
    """
    full, rows = list[int](), 0
    for group in groups:
        prompt = group.prompt
        for completion in group.scored:
            if group.prompt + completion > most:
                raise ValueError(f"--rows: a forward must hold {group.prompt + completion:,} rows, got {most:,}")
            if rows + prompt + completion > most:
                full, rows, prompt = [*full, rows], 0, group.prompt
            rows, prompt = rows + prompt + completion, 0
    return full + [rows] * bool(rows)


DEALS: dict[str, Callable[[GroupRows], float] | None] = {
    "as sampled": None,
    "by tokens": lambda group: group.tokens,
    "by rows": lambda group: group.rows,
}
"""Sizes by which groups are dealt over ranks; None leaves each group where it was sampled."""


def shares(
    groups: Sequence[GroupRows], ranks: int, per_rank: int, *, live: bool
) -> Iterator[tuple[str, list[list[GroupRows]]]]:
    """Yield what each rank gets of `per_rank` groups sampled per rank, for each of `DEALS`.

    `live` leaves out groups without an advantage. Groups are drawn in passes over all of them.
    """
    rng, everything = random.Random(SEED), list(groups)
    passes = itertools.chain.from_iterable(rng.sample(everything, len(everything)) for _ in itertools.count())
    drawn = list(itertools.islice(passes, ranks * per_rank))
    own = [[group for group in drawn[first : first + per_rank] if group.live or not live]
           for first in range(0, len(drawn), per_rank)]  # fmt: skip
    left = [group for share in own for group in share]
    for name, size in DEALS.items():
        yield name, own if size is None else [[left[i] for i in rank] for rank in deal([*map(size, left)], ranks)]


@dataclass(frozen=True)
class RankPass:
    """Pass of all ranks over their packs: forwards of each, and the share of their time in which they wait."""

    forwards: int
    idle: float

    def __str__(self) -> str:
        return f"{self.idle:.1%}" + (f" ({self.forwards})" if self.forwards > 1 else "")


def in_step(packs: Sequence[Sequence[int]], seconds: Callable[[float], float]) -> RankPass:
    """Let ranks run packs of so many rows each, every forward started together; an idle pack is one token."""
    forwards = list(itertools.zip_longest(*packs, fillvalue=1))
    own = sum(seconds(rows) for rank in packs for rows in rank) / len(packs)
    whole = sum(max(map(seconds, forward)) for forward in forwards)
    return RankPass(len(forwards), max(1 - own / whole, 0.0) if whole else 0.0)


def traffic(rollouts: JobRollouts) -> dict[str, float]:
    """Bytes per completion between a controller and its workers: ids and edges int64, log-probs float32.

    Log-prob requests are those of verl: `input_ids`, `position_ids` of prompt and completion, `prompts`, and
    `responses`, `response_mask` and `loss_mask`, for the answer and once for each span; a float32 per token comes back.
    """
    job = rollouts.job
    count, prompts = len(job.completions), sum(map(len, job.prompts))
    tokens, spans = sum(map(len, job.completions)), sum(map(len, job.spans))
    sent = came = 0.0
    for prompt, completion, own in zip(job.prompts, job.completions, job.spans, strict=True):
        sent += (1 + len(own)) * INT64 * (3 * len(prompt) + 5 * len(completion))
        came += (1 + len(own)) * FLOAT * (len(prompt) + len(completion))
    tree = INT64 * (prompts / rollouts.group + tokens + 2 * (spans + count)) + FLOAT * (spans + count)
    return {
        "ordinary log-prob requests, one for the answer and one for each span": (sent + came) / count,
        "of these, what comes back": came / count,
        "ids, spans and answer once, and a number for each of them back": tree / count,
        "a weight for each token": FLOAT * tokens / count,
    }


def page(options: argparse.Namespace) -> str:
    """The tables with what they hold for, as Markdown."""
    rollouts = gsm8k_rollouts(options.problems, mixed=False)
    per_rank, left = divmod(options.completions, rollouts.group)
    if left or not per_rank:
        raise ValueError(f"--completions: {options.completions} are not whole groups of {rollouts.group}")
    groups, (products, weights) = groups_of(rollouts), weights_of(options.model)
    one, job = ShardedRanks(1, products, weights, RATES[options.gpu]), rollouts.job.describe()
    parts = [
        f"{options.model}, {weights / 1e9:.2f} G weights, all of them train; {options.gpu}. {len(groups)} problems "
        f"({job['source']}), {rollouts.group} completions each. A completion has {job['completion_tokens_mean']:.0f} "
        f"tokens and {job['spans_mean']:.1f} spans in the mean. {sum(group.live for group in groups)} problems have "
        f"rewards that differ. Each rank samples {options.completions} completions; a forward has at most "
        f"{options.rows:,} rows.\nFigures are shares of the ranks' time in which they wait.\n"
    ]
    head = ["ranks", "gathering, ms", *(f"scoring: {name}" for name in DEALS), *(f"update: {name}" for name in DEALS)]
    for live, words in ((False, "Every group"), (True, "Only groups whose rewards differ")):
        rows = [_row(replace(one, count=n), groups, per_rank, options.rows, live=live) for n in options.ranks]
        parts.append(f"{words}:\n\n{table(head, rows)}")
    sent = [[what, f"{size:,.0f}"] for what, size in traffic(rollouts).items()]
    parts.append(f"Between a controller and its workers:\n\n{table(['what', 'bytes per completion'], sent)}")
    return "\n".join(parts)


def _row(ranks: ShardedRanks, groups: Sequence[GroupRows], per_rank: int, most: int, *, live: bool) -> list[str]:
    dealt = [share for _, share in shares(groups, ranks.count, per_rank, live=live)]
    scoring = [in_step([packs(share, most) for share in one], ranks.forward) for one in dealt]
    update = [in_step([[sum(group.tokens for group in share)] for share in one], ranks.update) for one in dealt]
    return [
        f"{ranks.count:,}",
        f"{ranks.moving(HALF * ranks.weights) * 1e3:.1f}",
        *map(str, scoring),
        *map(str, update),
    ]


def parser() -> argparse.ArgumentParser:
    """Options of the command."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", default="Qwen3-1.7B", help=f"{', '.join(MODELS)}, or a config.json or its folder")
    made.add_argument(
        "--gpu", default="H200", choices=list(RATES), help="GPU whose rates are used (default: %(default)s)"
    )
    made.add_argument("--ranks", type=int, nargs="+", default=RANKS, metavar="N", help="default: 1, 2, 4, ... 1024")
    made.add_argument("--completions", type=int, default=64, help="completions of each rank (default: %(default)s)")
    made.add_argument(
        "--problems", type=int, help="problems to draw from; default: all with four completions and an answer"
    )
    made.add_argument(
        "--rows", type=int, default=65_536, help="most rows of a forward that scores (default: %(default)s)"
    )
    return made


def main(argv: list[str]) -> int:
    """Print the tables; returns the exit status."""
    options = parser().parse_args(argv)
    try:
        print(page(options))
    except ValueError as error:
        parser().error(str(error))
    return 0
