"""The race on trees of turns times only right gradients and gains, and counts what each contender feeds and keeps."""

import functools

import pytest
import torch

from benchmarks.harness.race import Budget, WrongAnswer
from benchmarks.harness.workloads import policy
from benchmarks.speed import bench_turns as benchmark
from benchmarks.speed.bench_turns import SHAPES
from benchmarks.speed.step_peers import VARLEN
from benchmarks.speed.turns_peers import EACH_TURN, GAIN, HALF, ONE_FORWARD, OURS, TRL, Work, edges, make_work

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@functools.cache
def tiny() -> torch.nn.Module:
    return policy("qwen3-tiny", lora=True, device=CPU, dtype=torch.float32)


def work(shape: str) -> Work:
    return make_work(tiny(), SHAPES[shape], prompt=7, turn=4)


@pytest.mark.parametrize("shape", SHAPES)
def test_rollouts_branch_off_turn_by_turn(shape):
    made = work(shape)
    assert len(made.rows) == SHAPES[shape][-1]
    starts = [edges(mask) for mask in made.masks]
    for k, width in enumerate(SHAPES[shape]):
        beginnings = {tuple(row[: own[k + 1]].tolist()) for row, own in zip(made.rows.completions, starts, strict=True)}
        assert len(beginnings) == width


@pytest.mark.filterwarnings("ignore")
def test_a_smoke_run_checks_and_counts_every_contender():
    deep = work("3 turns, 4 leaves")
    laps = benchmark.run_race(deep, Budget(0.0, 2, 2))
    assert all(lap.facts["cpu_seconds"] > 0 for lap in laps.values() if lap.absent is None)
    assert not [lap.refused for lap in laps.values() if lap.refused]
    fed = {name: lap.facts["rows_with_gradient"] for name, lap in laps.items() if lap.absent is None}
    whole = [tuple(deep.rows.whole(b).tolist()) for b in range(4)]
    once = {row[:n] for row in whole for n in range(1, len(row))}  # the last token is not fed
    assert fed[OURS] == len(once)
    assert fed[VARLEN] == sum(len(row) - 1 for row in whole)
    assert fed[OURS] < fed.get(TRL, fed[OURS] + 1) < fed[VARLEN]
    assert laps[OURS].facts["kept_bytes"] < laps[VARLEN].facts["kept_bytes"]
    for name in (HALF, GAIN):
        assert laps[name].facts["rows_without_gradient"] + fed[name] > fed[OURS]


def test_gold_answers_after_every_turn_are_those_of_rows_apart():
    asked = work("3 turns, 2 rollouts")
    laps = benchmark.run_race(asked, Budget(0.0, 1, 1))
    assert laps.keys() == {ONE_FORWARD, EACH_TURN}
    assert all(lap.facts["error"] <= lap.facts["error_allowed"] < 1e-3 for lap in laps.values())
    assert laps[ONE_FORWARD].facts["rows_without_gradient"] < laps[EACH_TURN].facts["rows_without_gradient"] / 2


@pytest.mark.parametrize("shape", ["3 turns, 4 leaves", "3 turns, 2 rollouts"])
def test_a_wrong_result_is_refused(shape):
    first, *_ = benchmark.contenders_of(work(shape))
    result = first.run()
    first.check(result)
    name = [*result][-1]
    for spoilt in (result[name] * 1.001, result[name] * torch.nan):
        with pytest.raises(WrongAnswer, match="of the norm"):
            first.check({**result, name: spoilt})
