"""The step benchmark times only right gradients: its contenders agree with padded autograd, a wrong one is refused."""

import contextlib
import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness.race import Absent, Budget, WrongAnswer
from benchmarks.harness.workloads import gsm8k_rollouts, policy, shaped_rollouts
from benchmarks.speed import bench_step as benchmark
from benchmarks.speed.bench_step import step_contenders
from benchmarks.speed.replay import Replay, Stopwatch
from benchmarks.speed.step_peers import CREDITED, EXACT, NEAREST, NO_ENTROPY, PLAIN, STEP_PEERS, TRL
from benchmarks.speed.step_reference import StepResult, Truth

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def tiny_policy(lora):
    return policy("qwen3-tiny", lora=lora, device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module", params=[True, False], ids=["LoRA", "full"])
def replay(request):
    """Two groups of random ids, one of them without advantage."""
    rollouts = shaped_rollouts(2, group=2, prompt=9, completion=30, spans=5, span_tokens=4)
    unmixed = replace(rollouts, advantages=rollouts.advantages * torch.tensor([1.0, 1.0, 0.0, 0.0]))
    return Replay(tiny_policy(request.param), unmixed)


@pytest.fixture(scope="module")
def contenders(replay):
    made, _ = step_contenders(replay, lambda: replay.policy, list(STEP_PEERS))
    return {contender.name: contender for contender in made}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STEP_PEERS)
def test_each_contender_leaves_the_gradient_of_padded_autograd(name, contenders):
    if contenders[name].absent is not None:
        pytest.skip(contenders[name].absent)
    try:
        result = contenders[name].run()
    except Absent as error:
        pytest.skip(str(error))
    facts = contenders[name].check(result)
    assert facts["gradient_error"] <= facts["gradient_error_allowed"] < 1e-3


@pytest.fixture(scope="module", params=[CREDITED, NO_ENTROPY])
def credited(request):
    """A contender that finds its spans by itself, on completions that have some."""
    replay = Replay(tiny_policy(True), gsm8k_rollouts(1, mixed=True))
    (made,), measured = step_contenders(replay, lambda: tiny_policy(True), [request.param])
    return made, measured[request.param]


@pytest.mark.filterwarnings("ignore")
def test_the_trl_trainer_credits_what_it_finds_and_is_held_to_it(credited):
    contender, measured = credited
    try:
        result = contender.run()
    except Absent as error:
        pytest.skip(str(error))
    facts = contender.check(result)
    assert facts["gradient_error"] <= facts["gradient_error_allowed"] < 1e-3
    assert facts["rows_without_gradient"] > 0
    assert max(float((row - 1).abs().max()) for row in result.weights) > 0.1
    with pytest.raises(WrongAnswer, match="weight is off"):
        contender.check(replace(result, weights=[torch.ones_like(row) for row in result.weights]))
    contender.run()
    assert min(measured.seconds["credit"][0], measured.seconds["update"][0]) > 0


def test_a_part_within_a_part_counts_to_itself_only(monkeypatch):
    now = [0.0]
    clocks = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: 2 * now[0])
    monkeypatch.setattr("benchmarks.speed.replay.time", clocks)
    stopwatch = Stopwatch(CPU)
    with stopwatch.part("update"):
        now[0] += 1
        with stopwatch.part("credit"):
            now[0] += 10
        now[0] += 2
    now[0] += 100
    with stopwatch.part("credit"):
        now[0] += 5
    assert stopwatch.seconds() == {"credit": 15, "update": 3}
    assert stopwatch.cpu_seconds() == {"credit": 30, "update": 6}


@pytest.fixture(scope="module")
def right(contenders) -> StepResult:
    return contenders[EXACT].run()


def _first(gradients, change):
    name = next(iter(gradients))
    return {**gradients, name: change(gradients[name])}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: replace(r, gradients=_first(r.gradients, lambda g: g * 1.001)), "of its norm"),
        (lambda r: replace(r, gradients=_first(r.gradients, lambda g: g * torch.nan)), "of its norm"),
        (lambda r: replace(r, gradients=dict(list(r.gradients.items())[1:])), "differ"),
        (lambda r: replace(r, loss=r.loss + 1e-3), "loss is"),
        (lambda r: replace(r, weights=[w * 1.001 for w in r.weights]), "weight is off"),
        (lambda r: replace(r, weights=None), "weight is off"),
    ],
    ids=["scaled", "nan", "one missing", "loss", "weights", "no weights"],
)
def test_a_wrong_result_is_refused(spoil, message, right, contenders):
    contenders[EXACT].check(right)
    with pytest.raises(WrongAnswer, match=message):
        contenders[EXACT].check(spoil(right))


@pytest.mark.parametrize("more", [0.0, 1e-3])
def test_loss_and_gradients_may_be_off_as_far_as_weights_are_within_their_budgets(more) -> None:
    weights, budgets, gradients = torch.tensor([0.5, 4.0]), torch.tensor([1e-3, 1e-3]), torch.tensor([1.0, -2.0])
    truth = Truth(1.0, [weights], {"w": gradients}, 1e-7, [budgets], 1e-7, [0])
    off = 1 + 1e-4
    result = StepResult(off, [weights * off], {"w": gradients * (off + more)})
    with pytest.raises(WrongAnswer, match="gradient of w") if more else contextlib.nullcontext():
        truth.check(result, 1e-7)


@pytest.mark.filterwarnings("ignore")
def test_references_are_not_made_of_a_policy_that_trl_has_changed(replay, contenders):
    with contextlib.suppress(Absent):
        replay.trl()
        with pytest.raises(ValueError, match="fresh policy"):
            step_contenders(replay, lambda: replay.policy, [PLAIN])


def test_what_is_fed_is_counted_and_each_saving_feeds_less(contenders):
    fed = {}
    for name in (TRL, PLAIN, EXACT, NEAREST):
        facts = contenders[name].check(contenders[name].run())
        fed[name] = facts["rows_with_gradient"], facts["rows_without_gradient"]
    assert fed[TRL] == (4 * (9 + 30), 0)  # TRL feeds the last token, too
    assert fed[PLAIN] == (fed[EXACT][0], 0) == (9 + 2 * 29, 0)
    # Branches begin at their spans, and only where there is an advantage.
    assert 0 < fed[NEAREST][1] < fed[EXACT][1] / 2 < 5 * 29


def test_a_smoke_run_times_all_that_is_here():
    workload = benchmark.WORKLOADS["smoke"]["qwen3-tiny LoRA, 1 x 4"]
    rollouts = shaped_rollouts(1, group=2, prompt=5, completion=20, spans=2, span_tokens=4)
    fresh = functools.partial(policy, workload.model, lora=workload.lora, device=CPU, dtype=workload.dtype)
    names = [PLAIN, EXACT]
    laps = benchmark.run_race(Replay(fresh(), rollouts), fresh, names, Budget(0.0, 2, 2))
    for name in names:
        facts = laps[name].facts
        assert len(laps[name].seconds) == 2
        assert min(facts["cpu_seconds"], facts["update_seconds"]) > 0
        assert (facts["credit_seconds"] > 0) == (name != PLAIN) == (facts["credit_cpu_seconds"] > 0)


# Rollouts


def test_recorded_rollouts_have_groups_with_and_without_advantage():
    mixed, as_they_come = gsm8k_rollouts(4, mixed=True), gsm8k_rollouts(8, mixed=False)
    assert mixed.describe()["mixed_groups"] == 4
    assert len(mixed.active) == 16
    assert 0 < as_they_come.describe()["mixed_groups"] < 8
    for rollouts in (mixed, as_they_come):
        groups = rollouts.rewards.view(-1, 4)
        differ = groups.amax(1) > groups.amin(1)
        assert torch.equal((rollouts.advantages.view(-1, 4) != 0).all(1), differ)
