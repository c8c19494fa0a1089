"""`python -m benchmarks scale`: replay completions over 1 to 1,024 ranks and say how long they wait for each other.

Nothing runs on a device: packs are those that the library lays out, their times a roofline (`docs/scale.md`). With
`--measure` it measures instead what a CPU can: how long two processes take to meet, and what a pack of one token takes;
with `--race`, trees against log-prob requests in two processes that hold one model in pieces.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.explain.command import write
from benchmarks.explain.rates import GPUS
from benchmarks.harness.environment import describe_environment, slug
from benchmarks.harness.progress import write_json
from benchmarks.harness.provenance import describe_source, document_head
from benchmarks.harness.tables import RESULTS, table
from benchmarks.harness.workloads import MODELS, REPOSITORY, Rollouts, gsm8k_rollouts
from benchmarks.scale import idle_packs, meeting, trees
from benchmarks.scale.cost import SCORING_ROWS, Sharded, Traffic, traffic
from benchmarks.scale.replay import BACKWARD, Group, Outcome, groups_of, in_step, packed, shares

RANKS = tuple(2**power for power in range(11))


def main(argv: list[str]) -> int:
    """Print the tables; returns the exit status."""
    options = parser().parse_args(argv)
    try:
        given = argv[: argv.index("--write")] + argv[argv.index("--write") + 2 :] if options.write else argv
        command = " ".join(["python -m benchmarks scale", *given])
        text = measurements() if options.measure else raced(command) if options.race else page(options)
        print(text)
        if options.write:
            write(options.write, command, text)
    except ValueError as error:
        parser().error(str(error))
    return 0


def page(options: argparse.Namespace) -> str:
    """The tables with what they hold for, as Markdown."""
    rollouts = gsm8k_rollouts(options.problems, mixed=False)
    per_rank, left = divmod(options.completions, rollouts.group)
    if left or not per_rank:
        raise ValueError(f"--completions: {options.completions} are not whole groups of {rollouts.group}")
    groups, model = groups_of(rollouts), Sharded.of(options.model, GPUS[options.gpu])
    parts = [_heading(options.model, options.completions, rollouts, groups, model)]
    for live, words in ((False, "Every group"), (True, "Only groups whose rewards differ")):
        rows = [_row(n, groups, replace(model, ranks=n), per_rank, live=live) for n in options.ranks]
        parts.append(f"{words}:\n\n{table(_HEAD, rows)}")
    at = replace(model, ranks=options.at)
    rows = [_row_of_budget(most, groups, at, per_rank) for most in options.rows]
    parts.append(f"Scoring on {options.at} ranks, with fewer rows in a forward:\n\n{table(_HEAD_OF_BUDGETS, rows)}")
    parts.append(f"Between a controller and its workers, bytes:\n\n{_traffic(traffic(rollouts), options)}")
    return "\n".join(parts).rstrip("\n") + "\n"


_HEAD = (
    "ranks", "gathering, ms", "scoring: as sampled", "by tokens", "by rows", "update: as sampled", "by tokens",
    "both, dealt once: as sampled", "by tokens", "by both", "in products",
)  # fmt: skip
_HEAD_OF_BUDGETS = (
    "rows of a forward", "products, ms", "gathering, ms", "every group: as sampled", "by tokens", "by rows",
    "rewards differ: as sampled", "by tokens", "by rows",
)  # fmt: skip


def _heading(name: str, completions: int, rollouts: Rollouts, groups: Sequence[Group], model: Sharded) -> str:
    job, count = rollouts.job.describe(), len(groups)
    return (
        f"{name if name in MODELS else Path(name).name}, {model.weights / 1e9:.2f} G weights in bfloat16, all of them "
        f"train. {count} problems ({job['source']}), {rollouts.group} completions each, of "
        f"{job['completion_tokens_mean']:.0f} tokens and {job['spans_mean']:.1f} spans in the mean; "
        f"{sum(group.live for group in groups)} have rewards that differ. A group feeds "
        f"{sum(group.rows for group in groups) / count:,.0f} rows to be scored (at most "
        f"{max(group.rows for group in groups):,}) and has {sum(group.tokens for group in groups) / count:,.0f} tokens "
        f"(at most {max(group.tokens for group in groups):,}).\n"
        f"{completions} completions sampled by each rank; at most {SCORING_ROWS:,} rows in a forward that scores, "
        f"{model.training_rows:,} in one with gradients.\n"
        f"{model.rates.name}: {model.rates.halves / 1e12:,.0f} TFLOP/s of bfloat16 products ({model.rates.source}).\n"
        "Shares of the ranks' time in which they wait or feed idle packs; in brackets forwards, where more than one.\n"
    )


def outcomes(
    groups: Sequence[Group], model: Sharded, per_rank: int, *, live: bool
) -> dict[str, tuple[Outcome, Outcome]]:
    """What ranks do in scoring and in the update, for each way of dealing."""
    return {
        name: (
            in_step([_scored(share, SCORING_ROWS) for share in dealt], model.forward),
            in_step([_trained(share, model.training_rows) for share in dealt], model.update),
        )
        for name, dealt in shares(groups, model.ranks, per_rank, live=live)
    }


def _scored(share: Sequence[Group], most: int) -> list[int]:
    return packed([group.scored for group in share], most)


def _trained(share: Sequence[Group], most: int) -> list[int]:
    return packed([group.trained for group in share], most)


def _row(ranks: int, groups: Sequence[Group], model: Sharded, per_rank: int, *, live: bool) -> list[str]:
    found = outcomes(groups, model, per_rank, live=live)
    scoring, update = ({name: both[i] for name, both in found.items()} for i in (0, 1))
    both = {name: one + other for name, (one, other) in found.items()}
    return [
        f"{ranks:,}",
        f"{model.moving(model.bytes) * 1e3:.1f}",
        *_cells(scoring, "as sampled", "by tokens", "by rows"),
        *_cells(update, "as sampled", "by tokens"),
        *_cells(both, "as sampled", "by tokens", "by both"),
        f"{_in_products(model, *found['by both']):.0%}",
    ]


def _in_products(model: Sharded, scoring: Outcome, update: Outcome) -> float:
    """Share of the time that ranks spend in products, if nothing but them and gathering takes any."""
    took = model.products(scoring.rows) + (1 + BACKWARD) * model.products(update.rows)
    return took / (scoring.whole + update.whole)


def _row_of_budget(most: int, groups: Sequence[Group], model: Sharded, per_rank: int) -> list[str]:
    cells: list[str] = []
    for live in (False, True):
        found = {
            name: in_step([_scored(share, most) for share in dealt], model.forward)
            for name, dealt in shares(groups, model.ranks, per_rank, live=live)
            if name != "by both"
        }
        cells += _cells(found, *found)
    alone = replace(model, ranks=1)
    return [f"{most:,}", f"{alone.forward(most) * 1e3:.1f}", f"{model.moving(model.bytes) * 1e3:.1f}", *cells]


def _cells(found: Mapping[str, Outcome], *names: str) -> list[str]:
    forwards = {name: f" ({found[name].forwards})" if found[name].forwards > 1 else "" for name in names}
    return [f"{found[name].idle:.1%}{forwards[name]}" for name in names]


def _traffic(carried: Traffic, options: argparse.Namespace) -> str:
    completions = options.completions * options.at
    rows = [
        ("ordinary log-prob requests, one for the answer and one for each span", carried.requests),
        ("of these, what comes back", carried.answers),
        ("ids, spans and answer once, and a number for each of them back", carried.tree),
        ("a weight for each token", carried.weights),
    ]
    head = ("what", "per completion", f"per step of {completions:,}")
    return table(head, [[what, f"{size:,.0f}", f"{size * completions / 1e6:,.1f} MB"] for what, size in rows])


def measurements() -> str:
    """What is measured here, as Markdown."""
    found = describe_environment(torch.device("cpu"), None)
    idle, full = idle_packs.seconds()
    rows = [
        ["meeting before a forward, two processes, gloo over loopback", f"{meeting.seconds() * 1e3:.2f} ms"],
        ["forward of a pack of one token", f"{idle * 1e3:.1f} ms"],
        [f"forward of a pack of {idle_packs.ROWS:,} rows", f"{full * 1e3:,.0f} ms"],
        ["idle pack relative to a full one", f"{idle / full:.1%}"],
    ]
    return (
        f"Measured on {found['device']['name']}, cores: {len(os.sched_getaffinity(0))}, torch "
        f"{found['versions']['torch']}; {idle_packs.MODEL} in float32, in one process; medians.\n\n"
        f"{table(('what', 'time'), rows)}"
    )


def raced(command: str) -> str:
    """The race of trees against requests, as Markdown; also in a file of results."""
    head, found = document_head(describe_source(command)), trees.race()
    shares = trees.shares(found)
    environment = head["environment"]
    file = RESULTS / f"{environment['date'][:10]}-{slug(environment)}-scale.json"
    write_json(file, head | found | {"trees_share_of": shares})
    rows = [
        [name, f"{one['tokens']:,}", f"{one['cpu_seconds']:.2f}", f"{one['seconds']:.2f}"]
        + ([f"{share:.1%}" for share in shares[name].values()] if name in shares else ["–"] * 3)
        for name, one in found["contenders"].items()
    ]
    job, model = found["job"], found["model"]
    header = ("contender", "tokens fed", "CPU s", "s", "trees feed", "trees' CPU time", "trees' time")
    return (
        f"{environment['device']['name']}, torch {environment['versions']['torch']}; {model['name']} with "
        f"{model['layers']} layers and {model['vocabulary']:,} tokens, {model['dtype']}, in pieces (FSDP2) on "
        f"{found['processes']} processes; {job['completions']} completions ({job['source']}) of "
        f"{job['distinct_prompts']} prompts, {job['spans_mean']:.1f} spans in the mean. Medians of {found['rounds']} "
        f"rounds in turns; scores differ by at most {found['difference']:.1g} nats "
        f"([file](../{file.relative_to(REPOSITORY)})).\n\n{table(header, rows)}"
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", default="Qwen3-1.7B", help=f"{', '.join(MODELS)}, or a config.json or its folder")
    made.add_argument("--gpu", default="H200", choices=list(GPUS), help="whose rates (default: %(default)s)")
    made.add_argument("--ranks", type=int, nargs="+", default=RANKS, metavar="N", help="default: 1, 2, 4, ... 1024")
    made.add_argument("--completions", type=int, default=64, help="that each rank samples (default: %(default)s)")
    made.add_argument("--problems", type=int, help="drawn from; default: all with four completions and an answer")
    made.add_argument("--at", type=int, default=64, help="ranks of the tables by rows and bytes (default: %(default)s)")
    made.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[32768, 16384, 8192, 4096],
        help="of a forward that scores, at these ranks",
    )
    made.add_argument("--measure", action="store_true", help="measure on this CPU instead")
    made.add_argument("--race", action="store_true", help="trees against log-prob requests on this CPU instead")
    made.add_argument("--write", type=Path, metavar="PAGE", help="also into a page, in place of its earlier table")
    return made
