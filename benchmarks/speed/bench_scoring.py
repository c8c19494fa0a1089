"""Race the scoring of masked spans against everything a user could pick instead, on the same completions and model.

Sweeps race a few of them on made-up shapes, one number of which grows: how the cost grows with it.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.harness.counting import counted
from benchmarks.harness.race import Budget, Contender, Figures, Lap, race, release_memory, replay_clock, times_ours
from benchmarks.harness.workloads import SEED, Job, gsm8k_job, long_job, random_model, shaped_job
from benchmarks.speed.command import chosen_peers, workload_set
from benchmarks.speed.peers import BEST_PADDED, PEERS, REFERENCE, Observed, Peer, as_is, best_batch_size
from benchmarks.speed.reference import Reference


@dataclass(frozen=True)
class ScoringWorkload:
    """A model, a job, and by what factor ours is to beat a peer there; `axis` and `value` of a point of a sweep."""

    model: str
    job: Callable[[], Job]
    dtype: torch.dtype
    floors: dict[str, float]
    padded_sizes: tuple[int, ...]
    axis: str | None = None
    value: int = 0


_GPU_FLOORS = {REFERENCE: 20.0, "aligntune batched": 8.0, **dict.fromkeys(BEST_PADDED, 3.0)}
_GPU_SIZES = (1, 2, 4, 8, 16, 32)
SWEPT = ("per span with logits_to_keep", "padded batches of 8 with logits_to_keep", "ours")


def sweep(
    model: str, dtype: torch.dtype, shape: dict[str, int], points: dict[str, tuple[int, ...]]
) -> dict[str, ScoringWorkload]:
    """Points of each axis, which replace one number of the shape."""
    return {
        f"sweep {axis}={value}": ScoringWorkload(
            model, functools.partial(shaped_job, **{**shape, axis: value}, span_tokens=8), dtype, {}, (), axis, value
        )
        for axis, values in points.items()
        for value in values
    }


WORKLOADS: dict[str, dict[str, ScoringWorkload]] = {
    "smoke": {
        "qwen3-tiny gsm8k": ScoringWorkload("qwen3-tiny", functools.partial(gsm8k_job, 1), torch.float32, {}, (4,)),
        **sweep(
            "qwen3-tiny", torch.float32, {"group": 2, "prompt": 20, "completion": 40, "spans": 2}, {"group": (1, 2)}
        ),
    },
    "cpu": {
        "qwen3-40m gsm8k": ScoringWorkload(
            "qwen3-40m",
            functools.partial(gsm8k_job, 4),
            torch.float32,
            {REFERENCE: 4.0, "aligntune batched": 4.0, "best padded batch": 3.5},
            (2, 4, 8, 16),
        ),
        "qwen3-40m long": ScoringWorkload(
            "qwen3-40m", functools.partial(long_job, 1, length=400, spans=4), torch.float32, {}, (2, 4)
        ),
        **sweep(
            "qwen3-40m",
            torch.float32,
            {"group": 2, "prompt": 110, "completion": 155, "spans": 5},
            {"spans": (1, 2, 4, 8), "completion": (96, 192, 384), "group": (1, 2, 4)},
        ),
    },
    "cuda": {
        **{
            f"{model} gsm8k": ScoringWorkload(
                model, functools.partial(gsm8k_job, 8), torch.bfloat16, _GPU_FLOORS, _GPU_SIZES
            )
            for model in ("Qwen3-1.7B", "Qwen2.5-3B", "Llama-3.2-3B")
        },
        "Qwen3-1.7B long": ScoringWorkload(
            "Qwen3-1.7B", functools.partial(long_job, 4), torch.bfloat16, {}, _GPU_SIZES
        ),
        **sweep(
            "Qwen3-1.7B",
            torch.bfloat16,
            {"group": 8, "prompt": 110, "completion": 300, "spans": 8},
            {"spans": (1, 4, 16), "completion": (128, 512, 2048), "group": (1, 8, 32)},
        ),
    },
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen_peers(metafunc.config, [*PEERS, *BEST_PADDED])  # refuses unknown names before anything is made
    if "workload" in metafunc.fixturenames:
        metafunc.parametrize("workload", list(WORKLOADS[workload_set(metafunc.config)]), scope="module")


def scoring_contenders(model: PreTrainedModel, job: Job, peers: dict[str, Peer]) -> list[Contender]:
    """The peers as contenders, each checked against the definition; the first run of each counts what it feeds."""
    reference = Reference.of(model, job)
    PEERS["ours"].run(model, job.part([0]))  # checks once per model that it can be scored; not to be counted
    dtype = next(model.parameters()).dtype

    def contender(name: str, peer: Peer) -> Contender:
        work: dict[str, float] = {}

        def run() -> Observed:
            if work:
                return peer.run(model, job)
            with counted(model, job if peer.packed else None) as counts:
                observed = peer.run(model, job)
            work.update(counts.facts())
            return observed

        def check(observed: Observed) -> dict[str, Any]:
            return {**reference.check(peer, job, observed, dtype), "drop_over_budget": reference.sharpness(), **work}

        return Contender(name, run, check)

    return [contender(name, peer) for name, peer in peers.items()]


@pytest.fixture(scope="module")
def scoring_laps(
    request: pytest.FixtureRequest, workload: str, device: torch.device, budget: Budget, figures: Figures
) -> Iterator[dict[str, Lap]]:
    chosen = WORKLOADS[workload_set(request.config)][workload]
    model = random_model(chosen.model, device=device, dtype=chosen.dtype)
    job = chosen.job().to(device)
    names = chosen_peers(request.config, [*PEERS, *BEST_PADDED])
    names = [name for name in names if not chosen.axis or name in SWEPT]
    peers = {name: PEERS[name] for name in names if name in PEERS}
    searched: dict[str, dict[str, Any]] = {}
    for name in [name for name in names if name in BEST_PADDED]:
        run = BEST_PADDED[name]
        size, tried = best_batch_size(run, model, job, chosen.padded_sizes)
        peers[name] = Peer(functools.partial(run, size), as_is)
        searched[name] = {"batch_size": size, "seconds_by_batch_size": tried}
    laps = race(scoring_contenders(model, job, peers), device=device, budget=budget)
    for name, facts in searched.items():
        laps[name].facts |= facts
    figures.workloads[workload] = {
        **job.describe(),
        "model": chosen.model,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(chosen.dtype).removeprefix("torch."),
        "seed": SEED,
    }
    yield laps
    del model, job, peers
    release_memory(device)


@pytest.mark.benchmark(timer=replay_clock)
@pytest.mark.parametrize("name", [*PEERS, *BEST_PADDED])
def test_scoring_time(
    pytestconfig: pytest.Config, scoring_laps: dict[str, Lap], workload: str, name: str, report: Callable[..., None]
) -> None:
    if name not in scoring_laps:
        pytest.skip("not among --peers, or not swept")
    chosen = WORKLOADS[workload_set(pytestconfig)][workload]
    point = {"axis": chosen.axis, "value": chosen.value} if chosen.axis else {}
    report(scoring_laps[name], group=f"sweep {chosen.axis}" if chosen.axis else f"scoring {workload}", **point)


def test_ours_beats_its_peers_by_the_promised_factors(
    pytestconfig: pytest.Config, scoring_laps: dict[str, Lap], workload: str, hold: Callable[..., None]
) -> None:
    floors = WORKLOADS[workload_set(pytestconfig)][workload].floors
    hold(f"scoring {workload}", times_ours(scoring_laps), floors)
