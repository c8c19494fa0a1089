"""Race the scoring of masked spans against everything a user could pick instead, on the same completions and model."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.harness.counting import counted
from benchmarks.harness.race import Budget, Contender, Race, race, release_memory
from benchmarks.harness.workloads import Job, gsm8k_job, random_model
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
        "qwen3-tiny, 1 x 4": ScoringWorkload("qwen3-tiny", functools.partial(gsm8k_job, 1), torch.float32, {}, (4,))
    },
    "cpu": {
        "qwen3-40m, 4 x 4": ScoringWorkload(
            "qwen3-40m",
            functools.partial(gsm8k_job, 4),
            torch.float32,
            {REFERENCE: 4.0, "aligntune batched": 4.0},
            (2, 4, 8, 16),
        )
    },
    "cuda": {
        f"{model}, 8 x 4": ScoringWorkload(
            model, functools.partial(gsm8k_job, 8), torch.bfloat16, {}, (1, 2, 4, 8, 16, 32)
        )
        for model in ("Qwen3-1.7B", "Qwen2.5-3B", "Llama-3.2-3B")
    },
}


NAMES = [*PEERS, *BEST_PADDED]
CHOOSES_PEERS = True


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
def scoring_race(
    workload: str, chosen: ScoringWorkload, names: list[str], device: torch.device, budget: Budget
) -> Iterator[Race]:
    model = random_model(chosen.model, device=device, dtype=chosen.dtype)
    job = chosen.job().to(device)
    peers = {name: PEERS[name] for name in names if name in PEERS}
    searched: dict[str, dict[str, Any]] = {}
    for name, run in ((name, BEST_PADDED[name]) for name in names if name in BEST_PADDED):
        size, tried = best_batch_size(run, model, job, chosen.padded_sizes)
        peers[name] = Peer(functools.partial(run, size))
        searched[name] = {"batch_size": size} | {f"seconds_by_{rows}_rows": took for rows, took in tried.items()}
    laps = race(scoring_contenders(model, job, peers), device=device, budget=budget)
    for name, facts in searched.items():
        laps[name].facts |= facts
    facts = {**job.describe(), "parameters": sum(p.numel() for p in model.parameters())}
    yield Race(f"scoring {workload}", laps, facts, floors=chosen.floors)
    del model, job, peers
    release_memory(device)


def test_scoring(scoring_race: Race, name: str, report: Callable[..., None]) -> None:
    report(scoring_race, name)
