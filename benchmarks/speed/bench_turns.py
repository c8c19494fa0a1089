"""Race a step on trees of turns against TRL's tree and rows that share nothing; ask gold answers after every turn.

Rollouts of one prompt branch off turn by turn, as forks, searches and rewritten histories do. A contender that does not
leave the gradient of rows apart is refused. Credit for turns comes on top. No optimizer steps, no sampling.
"""

import contextlib
import copy
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.harness.race import Budget, Contender, Lap, Race, WrongAnswer, race
from benchmarks.harness.workloads import policy
from benchmarks.speed.bench_step import pinned_cpu_seconds, rows_fed
from benchmarks.speed.step_peers import VARLEN
from benchmarks.speed.step_reference import SLACK, Gradients, relative_error, taken_gradients
from benchmarks.speed.turns_peers import ASKED, EACH_TURN, OURS, STEPS, Work, gains_of, make_work, packed_loss
from cfa_kernels.model.check.verify import check_trainable
from cfa_kernels.model.parts import causal_lm

SHAPES = {
    "4 turns, 64 leaves": (1, 4, 16, 64), "12 turns, 16 leaves": (1, 1, 1, 2, 2, 2, 4, 4, 4, 8, 8, 16),
    "12 turns, 4 rollouts": (4,) * 12, "3 turns, 4 leaves": (1, 2, 4), "3 turns, 2 rollouts": (2,) * 3,
}  # fmt: skip
"""How many different beginnings rollouts have up to each turn; of the last kind gold answers are asked."""
WORKLOADS = {
    "smoke": dict.fromkeys(list(SHAPES)[3:], ("qwen3-tiny", 7, 4)),
    "cpu": dict.fromkeys(list(SHAPES)[:3], ("qwen3-40m", 48, 8)),
    "cuda": dict.fromkeys(list(SHAPES)[:3], ("Qwen3-1.7B", 1024, 64)),
}
"""By shape: model, tokens of the prompt and, in the mean, of a turn and of its observation."""
NAMES = [*STEPS, *ASKED]
FLOORS = {"12 turns, 16 leaves": {VARLEN: 2.0}, "12 turns, 4 rollouts": {EACH_TURN: 4.0}}
"""Promises: least times of contenders, in units of ours. Rows that share nothing also feed three times the tokens."""

# What is right


def gradients_of_rows(model: nn.Module, work: Work) -> Gradients:
    """The gradient by its definition: a forward for each row, all logits, autograd."""
    for b, (prompt, completion) in enumerate(zip(work.rows.prompts, work.rows.completions, strict=True)):
        ids = torch.cat([prompt, completion]).to(work.device)
        lines = causal_lm(model)(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        terms = lines.gather(-1, ids[len(prompt) :, None])[:, 0] * (work.masks[b] * work.advantages[b]).to(lines)
        (-terms.sum() / work.options["num_items_in_batch"]).backward()
    return taken_gradients(model)


def contenders_of(work: Work) -> list[Contender]:
    """The contenders for a step, or for gold answers, held to rows apart in higher precision."""
    asked = len(work.rows) == work.different[0]
    check_trainable(work.causal)  # once per model, neither counted nor timed
    exact = copy.deepcopy(work.policy).to(torch.float64 if work.dtype == torch.float32 else torch.float32)

    def right(model: nn.Module) -> Gradients:
        if not asked:
            return gradients_of_rows(model, work)
        gains = [gains_of(work, causal_lm(model), [b]) for b in range(len(work.rows))]
        return {"gains": torch.cat(gains)}

    plain, low = right(exact), right(work.policy)
    allowed = SLACK * max(relative_error(low[name], value) for name, value in plain.items())

    def check(result: Gradients) -> dict[str, Any]:
        expected, weights = plain, work.weights
        if weights is not None:  # ours with the same weights, which tests hold to rows apart
            packed_loss(work, weights).backward()
            expected = taken_gradients(work.policy)
        errors = [relative_error(result[name], value) for name, value in expected.items()]
        error = max(errors, key=lambda one: one if one == one else torch.inf)
        if not error <= allowed:
            raise WrongAnswer(f"off by {error:.2g} of the norm, allowed are {allowed:.2g}")
        facts, work.facts, work.weights = work.facts, {}, None
        return facts | {"error": error, "error_allowed": allowed}

    def runner(run: Callable[[Work], Tensor | None]) -> Callable[[], Gradients]:
        ran = False

        def once() -> Gradients:
            nonlocal ran
            work.counts, ran = not ran, True
            with rows_fed(work.causal) if work.counts else contextlib.nullcontext({}) as fed:
                gains = run(work)
            work.facts |= fed
            return taken_gradients(work.policy) if gains is None else {"gains": gains}

        return once

    return [Contender(name, runner(run), check) for name, run in (ASKED if asked else STEPS).items()]


def run_race(work: Work, budget: Budget) -> dict[str, Lap]:
    """Check and time contenders; on a CPU in turns by its seconds on one pinned thread."""
    contenders, on_cpu = contenders_of(work), work.device.type == "cpu"
    laps = race(contenders, device=work.device, budget=Budget(0.0, 1, 1) if on_cpu else budget)
    timed = [contender for contender in contenders if laps[contender.name].seconds]
    for name, seconds in pinned_cpu_seconds(timed, budget.min_rounds).items() if on_cpu else ():
        laps[name].facts["cpu_seconds"] = statistics.median(seconds)
    return laps


# Tests


@pytest.fixture(scope="module")
def turns_race(workload: str, chosen: tuple[str, int, int], device: torch.device, budget: Budget) -> Race:
    name, *lengths = chosen
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    work = make_work(policy(name, lora=True, device=device, dtype=dtype), SHAPES[workload], *lengths)
    tokens = sum(len(work.rows.whole(b)) for b in range(len(work.rows)))
    laps = run_race(work, budget)
    if VARLEN in FLOORS.get(workload, {}):
        fed = {name: lap.facts["rows_with_gradient"] for name, lap in laps.items() if lap.seconds}
        assert fed[VARLEN] >= 3 * fed[OURS], f"{VARLEN} feeds {fed[VARLEN]} tokens, ours {fed[OURS]}"
    facts = {"rollouts": len(work.rows), "tokens": tokens}
    return Race(workload, laps, facts, next(iter(laps)), FLOORS.get(workload, {}))


def test_turns(turns_race: Race, name: str, report: Callable[..., None]) -> None:
    report(turns_race, name)
