"""Rewards in runs: all abstain, they log, and figures that are not finite."""

import json
import math

import pytest
from transformers import TrainerState

from tests.support.embedded import metrics_of, run, samples_of
from trainer.rewards.calls import RewardError


def talkative(completions, trainer_state, log_metric, log_extra, **_):
    log_metric("mine/step", trainer_state.global_step)
    log_extra("place", range(len(completions)))
    return [None if b % 2 else float(b % 4 == 0) for b in range(len(completions))]


async def later(completions, **_):
    return talkative(completions, TrainerState(global_step=7), *[lambda *_: None] * 2)


@pytest.mark.slow
def test_a_run_goes_on_where_all_rewards_abstain_and_holds_what_they_log(tmp_path) -> None:
    folder = run(tmp_path / "run", "--reward_funcs", f"{__name__}:talkative", f"{__name__}:later")
    steps = [entry for entry in metrics_of(folder) if "reward" in entry]
    assert [entry["mine/step"] for entry in steps] == [0, 1]
    assert all(entry["reward"] == 1 and entry["grad_norm"] > 0 for entry in steps)
    for entry in samples_of(folder):
        place = entry["logged"]["place"]
        assert (entry["reward"] is None) == (place % 2 == 1)
        assert entry["advantage"] or place % 2
    assert "no reward function gave it a reward" in (folder / "report.html").read_text("utf-8")


def renumbering(completions, log_metric, **_):
    log_metric("step", 100.0)
    return [0.0, 1.0] * (len(completions) // 2)


@pytest.mark.slow
def test_a_reward_cannot_log_under_a_name_of_the_run(tmp_path) -> None:
    with pytest.raises(RewardError, match=r"\['step'\]"):
        run(tmp_path / "run", f"--reward_funcs={__name__}:renumbering", "--max_steps=1")


def silent(completions, log_metric, log_extra, **_):
    log_metric("mine/ratio", math.inf)
    log_extra("ratio", [math.nan] * len(completions))
    return [None] * len(completions)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:std")
def test_figures_that_are_not_finite_are_null_in_the_files_of_a_run(tmp_path) -> None:
    folder = run(tmp_path / "run", f"--reward_funcs={__name__}:silent", "--max_steps=1")
    lines = [line for name in ("metrics", "completions") for line in (folder / f"{name}.jsonl").open()]
    entries = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    (step,) = [entry for entry in entries if "reward_std" in entry]
    assert entries[-1]["logged"] == {"ratio": None}
    assert (step["reward"], step["reward_std"], step["mine/ratio"]) == (None, None, None)
