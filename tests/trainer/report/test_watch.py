"""Warnings about steps that nothing can be learnt from: one each, with the cause that explains the others."""

from types import SimpleNamespace

import pytest

from trainer.config import TrainConfig
from trainer.report.watch import Watch


def step(texts=("#### 7", "#### 8"), truncated: float = 0.0, without_advantage: float = 0.0):
    metrics = {
        "reward": 0.25, "completions/clipped_ratio": truncated, "frac_reward_zero_std": without_advantage,
    }  # fmt: skip
    return SimpleNamespace(metrics=metrics, rollouts=SimpleNamespace(texts=list(texts)))


def said(steps, **settings) -> list[tuple[int, str]]:
    watch = Watch(TrainConfig(**settings))
    warnings = [(i, watch.warning(one)) for i, one in enumerate(steps, 1)]
    return [(i, warning) for i, warning in warnings if warning]


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    monkeypatch.setattr("trainer.report.watch.PATIENCE", 3)


GOOD, MUTE = step(), step(["well", "maybe 7"])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (
            step(truncated=1.0),
            "every completion was cut off at max_completion_length 512 for 3 steps in a row; raise it",
        ),
        (MUTE, "no completion gave an answer that can be read for 3 steps in a row"),
        (step(without_advantage=1.0), "no group had an advantage for 3 steps in a row (mean reward 0.25)"),
        (step(["well", "hm"], 1.0, 1.0), "every completion was cut off"),
        (step(["well", "hm"], 0.5, 1.0), "no completion gave an answer"),
    ],
)
def test_the_third_bad_step_in_a_row_brings_the_one_warning_that_explains_it(bad, words) -> None:
    ((when, warning),) = said([bad, bad, GOOD, bad, bad, bad, bad, bad, GOOD, bad, bad, bad])
    assert when == 6
    assert warning.startswith(words)


def test_steps_that_are_bad_in_part_are_no_reason_to_warn() -> None:
    assert said([step(["#### 7", "well"], 0.9, 0.9)] * 9) == []


def test_what_can_be_tried_is_named() -> None:
    ((_, warning),) = said([MUTE] * 3, instruction="Be brief.", answer_format="<a>(.*)</a>")
    for word in ("'Be brief.'", "--instruction", "<a>(.*)</a>", "--answer_format", "--answer_fallback"):
        assert word in warning


def test_answers_are_read_as_the_run_reads_them() -> None:
    assert said([MUTE] * 3, answer_fallback="last_number") == []
    assert said([MUTE] * 3, reward_funcs=["math:gcd"]) == []  # it reads answers of its own


def test_held_out_completions_without_any_answer_are_told_at_once() -> None:
    watch = Watch(TrainConfig())
    assert watch.warning_of_held_out(["well", "#### 7"]) is None
    assert watch.warning_of_held_out(["well", "hm"]).startswith("none of 2 held-out completions gives an answer")
