"""The table: seconds of each part of a step, in columns of what the program runs it with, and what was measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from benchmarks.explain.batch import Described
from benchmarks.explain.rates import HOST, Rates
from benchmarks.explain.step import (
    BACKWARD,
    CREDIT,
    DECODE,
    FORWARD,
    LOSS,
    PREFILL,
    Training,
    count_decoding,
    count_update,
    policy_on_meta,
)
from benchmarks.explain.tally import ADAPTERS, ATTENTION, CACHE, GEMM, HEAD, OTHER, SAMPLER, Counts

OPTIMIZER_BYTES = 40
"""A trained float32 weight: AdamW reads weight, gradient and two moments and writes three; the norm reads the gradient
once more, the clip reads and writes it."""


@dataclass(frozen=True)
class Variant:
    """What a column runs: full training in float32 or bfloat16 products; adapters, decoding."""

    name: str
    mixed_precision: bool = True
    fused: bool = False
    merged: bool = False


def variants(training: Training) -> list[Variant]:
    """From every part in its plainest form to all of them done better, one at a time."""
    if training.rank:
        return [
            Variant("eager"),
            Variant("adapters as one op", fused=True),
            Variant("+ decode merged, in a graph", fused=True, merged=True),
        ]
    return [
        Variant("eager", mixed_precision=False),
        Variant("mixed precision"),
        Variant("+ decode in a graph", merged=True),
    ]


@dataclass(frozen=True)
class Row:
    """A line of the table: seconds by variant, what was counted for the first of them, and whether it is a sum."""

    name: str
    seconds: list[float]
    counted: str = ""
    total: bool = False


@dataclass(frozen=True)
class Explained:
    """The table with what it is made from."""

    columns: list[str]
    rows: list[Row]
    fed: dict[str, int]
    trained: int

    def of(self, name: str) -> Row:
        """Find a row by its name."""
        return next(row for row in self.rows if row.name == name)


@dataclass(frozen=True)
class _Counted:
    update: Counts
    decoding: Counts
    trained: int


def explain(
    model: Callable[[], Any], training: Training, batch: Described, rates: Rates, *, most: int | None = None
) -> Explained:
    """Count a step of a model, whose configuration `model` makes anew, in every variant, and time it at `rates`.

    `most`: rows of a forward with gradients; by default what half of the GPU's free memory holds.
    """
    columns = variants(training)
    policies: dict[bool, nn.Module] = {}
    updates: dict[tuple[bool, bool], tuple[Counts, dict[str, int]]] = {}
    decodings: dict[tuple[bool, bool], Counts] = {}
    counted = []
    for variant in columns:
        precision = variant.mixed_precision
        if precision not in policies:
            policies[precision] = policy_on_meta(model(), training, float32=not precision)
        policy = policies[precision]
        if (precision, variant.fused) not in updates:
            updates[precision, variant.fused] = count_update(
                policy, batch, rates.memory, fused=variant.fused, most=most
            )
        if (precision, variant.merged) not in decodings:
            decodings[precision, variant.merged] = count_decoding(policy, batch, merged=variant.merged)
        trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        counted.append(_Counted(updates[precision, variant.fused][0], decodings[precision, variant.merged], trained))
    fed = next(iter(updates.values()))[1]
    sampling = _decoding(columns, counted, batch.positions, rates)
    learning = _update(columns, counted, fed, rates)
    step = _sum(STEP, [row for row in (*sampling, *learning) if row.name in (ROLLOUTS, UPDATE)])
    return Explained([v.name for v in columns], [*sampling, *learning, step], fed, counted[0].trained)


ORDER = (FORWARD, CREDIT, LOSS, BACKWARD)
ROLLOUTS, UPDATE, STEP, CREDITS = "rollouts", "update and credit", "step", "of it credit"


def _line(
    name: str, counted: Sequence[_Counted], pick: str, rates: Rates, section: str, *chosen: str, times: int = 1
) -> Row:
    """A part of a section in every column, and its operations, bytes and launches in the first."""
    seconds = [times * getattr(one, pick).seconds(rates, section, *chosen) for one in counted]
    first: Counts = getattr(counted[0], pick)
    flops, moved = (times * first.total(quantity, section, *chosen) for quantity in ("flops", "moved"))
    launches = times * first.launches(section, *chosen)
    return Row(name, seconds, f"{_amount(flops, 'FLOP')}, {_amount(moved, 'B')}, {launches:,} launches")


def _amount(value: float, unit: str) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def _decoding(columns: Sequence[Variant], counted: Sequence[_Counted], positions: int, rates: Rates) -> list[Row]:
    named = {
        "base GEMMs and head": (GEMM,),
        "adapters": (ADAPTERS,),
        "norms, rotary, gates, residuals": (OTHER,),
        "attention, keys and values": (ATTENTION, CACHE),
        "sampler": (SAMPLER,),
    }
    rows = [_line("rollouts: prompts", counted, "decoding", rates, PREFILL)]
    for name, chosen in named.items():
        rows.append(_line(f"decode: {name}", counted, "decoding", rates, DECODE, *chosen, times=positions))
    waits = []
    for variant, one in zip(columns, counted, strict=True):
        prompts, token = (
            max(HOST.forward * one.decoding.launches(section) - one.decoding.seconds(rates, section), 0.0)
            for section in (PREFILL, DECODE)
        )
        # Eager launches run beside the device; a replay, and what is done between two, wait for the token drawn.
        waits.append(prompts + positions * (HOST.replay if variant.merged else token))
    rows.append(Row("rollouts: the device waits for the host", waits, f"{positions} tokens"))
    return [*rows, _sum(ROLLOUTS, rows)]


def _update(columns: Sequence[Variant], counted: Sequence[_Counted], fed: dict[str, int], rates: Rates) -> list[Row]:
    names = {"base GEMMs": (GEMM, HEAD), "adapters": (ADAPTERS,), "norms, rotary, gates, residuals": (OTHER,),
             "attention": (ATTENTION, CACHE)}  # fmt: skip
    rows: list[Row] = []

    def section(title: str, name: str, chosen: dict[str, tuple[str, ...]]) -> None:
        rows.extend(_line(f"{title}: {part}", counted, "update", rates, name, *some) for part, some in chosen.items())

    section("forward", FORWARD, names)
    rows.append(_line("head and loss, gradient included", counted, "update", rates, LOSS))
    section("backward", BACKWARD, names)
    bytes_of_optimizer = OPTIMIZER_BYTES * counted[0].trained
    rows.append(Row("optimizer, norm", [bytes_of_optimizer / rates.bandwidth] * len(columns),
                    f"{_amount(bytes_of_optimizer, 'B')}"))  # fmt: skip
    idle = [_waits(one, fed["packs"], rates) for one in counted]
    visits = counted[0].update.visits
    updating = [sum(one.values()) - one[CREDIT] for one in idle]
    rows.append(Row("update: the device waits for the host", updating,
                    f"{sum(visits[section] for section in ORDER if section != CREDIT):,} modules visited"))  # fmt: skip
    first = len(rows)
    section(
        "credit",
        CREDIT,
        names | {"base GEMMs": (GEMM,), "attention": (ATTENTION,), "keys, values, head": (CACHE, HEAD)},
    )
    scoring = [one[CREDIT] for one in idle]
    rows.append(Row("credit: the device waits for the host", scoring, f"{visits[CREDIT]:,} modules visited"))
    return [*rows, _sum(UPDATE, rows), _sum(CREDITS, rows[first:])]


def _waits(one: _Counted, packs: int, rates: Rates) -> dict[str, float]:
    """Seconds that the device stands idle in each section, for every pack in the order in which the trainer runs them.

    The host walks over modules, then queues launches and runs ahead, until a section asks for values of the device.
    """
    host = device = 0.0
    idle = dict.fromkeys(ORDER, 0.0)
    for _ in range(packs):
        for section in ORDER:
            host += HOST.visit * one.update.visits[section] / packs
            busy = one.update.seconds(rates, section) / packs
            per_launch = HOST.backward if section == BACKWARD else HOST.forward
            queued = host + per_launch * one.update.launches(section) / packs
            ends = max(max(device, host) + busy, queued)
            idle[section] += max(ends - device - busy, 0.0)
            device = ends
            host = device if one.update.waits[section] else queued
    return idle


def _sum(name: str, rows: Sequence[Row]) -> Row:
    return Row(name, [sum(column) for column in zip(*(row.seconds for row in rows), strict=True)], total=True)


def markdown(explained: Explained, found: dict[str, str]) -> str:
    """The table in milliseconds; `found` is what was measured, by row, and stands in a column of its own."""
    lines = [
        ["part, ms", "counted (first column)", *explained.columns, "measured"],
        ["---", "---", *["---:"] * len(explained.columns), "---"],
    ]
    for row in explained.rows:
        mark = "**" if row.total else ""
        cells = [f"{mark}{milliseconds(seconds)}{mark}" for seconds in row.seconds]
        lines.append([f"{mark}{row.name}{mark}", row.counted, *cells, found.get(row.name, "not measured")])
    credit, step = explained.of(CREDITS).seconds, explained.of(STEP).seconds
    shares = [f"{c / s:.1%}" for c, s in zip(credit, step, strict=True)]
    lines.append(["credit's share of the step", "", *shares, ""])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def milliseconds(seconds: float) -> str:
    """Three digits at most behind the comma of thousands, for figures that are not known better."""
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
