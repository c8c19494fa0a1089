"""Race the scoring of masked spans against everything a user could pick instead, on the same completions and model."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.harness.counting import counted
from benchmarks.harness.race import Budget, Contender, Figures, Lap, race, release_memory, times_ours
from benchmarks.harness.workloads import SEED, Job, gsm8k_job, random_model
from benchmarks.speed.command import chosen_peers, workload_set
from benchmarks.speed.peers import BEST_PADDED, PEERS, REFERENCE, Observed, Peer, best_batch_size
from benchmarks.speed.reference import Reference


@dataclass(frozen=True)
class ScoringWorkload:
    """A model, a job, and by what factor ours is to beat a peer there."""

    model: str
    job: Callable[[], Job]
    dtype: torch.dtype
    floors: dict[str, float]
    padded_sizes: tuple[int, ...]


WORKLOADS: dict[str, dict[str, ScoringWorkload]] = {
    "smoke": {
        "qwen3-tiny gsm8k": ScoringWorkload("qwen3-tiny", functools.partial(gsm8k_job, 1), torch.float32, {}, (4,))
    },
    "cpu": {
        "qwen3-40m gsm8k": ScoringWorkload(
            "qwen3-40m",
            functools.partial(gsm8k_job, 4),
            torch.float32,
            {REFERENCE: 4.0, "aligntune batched": 4.0},
            (2, 4, 8, 16),
        )
    },
    "cuda": {
        f"{model} gsm8k": ScoringWorkload(
            model, functools.partial(gsm8k_job, 8), torch.bfloat16, {}, (1, 2, 4, 8, 16, 32)
        )
        for model in ("Qwen3-1.7B", "Qwen2.5-3B", "Llama-3.2-3B")
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
    peers = {name: PEERS[name] for name in names if name in PEERS}
    searched: dict[str, dict[str, Any]] = {}
    for name, run in ((name, BEST_PADDED[name]) for name in names if name in BEST_PADDED):
        size, tried = best_batch_size(run, model, job, chosen.padded_sizes)
        peers[name] = Peer(functools.partial(run, size))
        searched[name] = {"batch_size": size, "seconds_by_batch_size": tried}
    laps = race(scoring_contenders(model, job, peers), device=device, budget=budget)
    for name, facts in searched.items():
        laps[name].facts |= facts
    sizes = {"model": chosen.model, "parameters": sum(p.numel() for p in model.parameters())}
    dtype = str(chosen.dtype).removeprefix("torch.")
    figures.workloads[workload] = {**job.describe(), **sizes, "dtype": dtype, "seed": SEED}
    yield laps
    del model, job, peers
    release_memory(device)


@pytest.mark.parametrize("name", [*PEERS, *BEST_PADDED])
def test_scoring_time(scoring_laps: dict[str, Lap], workload: str, name: str, report: Callable[..., None]) -> None:
    if name not in scoring_laps:
        pytest.skip("not among --peers")
    report(scoring_laps[name], group=f"scoring {workload}")


def test_ours_beats_its_peers_by_the_promised_factors(
    pytestconfig: pytest.Config, scoring_laps: dict[str, Lap], workload: str, hold: Callable[..., None]
) -> None:
    floors = WORKLOADS[workload_set(pytestconfig)][workload].floors
    hold(f"scoring {workload}", times_ours(scoring_laps), floors)
