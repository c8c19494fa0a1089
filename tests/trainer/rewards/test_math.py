"""The reward by math-verify: what it finds equal, and that its process may hang, die or be absent."""

import importlib.util
import os
import signal
import sys

import pytest

from trainer.__main__ import main
from trainer.rewards.math import MathReward

DEADLINE = 120.0  # only a hang reaches it
# Stands in for math-verify: a completion says what happens.
OBEDIENT = """
import os, time
def parse(text, parsing_timeout):
    if text == "die":
        os._exit(1)
    if text == "hang":
        time.sleep(10**6)
    if text == "hold on":
        9 ** 9 ** 9
    return None if "five" in text else text.strip("\\\\boxed{}")
def verify(gold, answer, timeout_seconds):
    return gold == answer
"""


@pytest.fixture
def obedient(monkeypatch, tmp_path):
    """Reward functions whose math-verify does as a completion says."""
    (tmp_path / "math_verify.py").write_text(OBEDIENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    return MathReward


@pytest.mark.slow
def test_a_child_that_dies_hangs_or_was_killed_is_started_anew_and_an_unreadable_answer_is_named_once(obedient) -> None:
    # A child that hangs is given up after a second; one that dies has all the time that it needs.
    assert obedient(1.0)(completions=["hang", "hold on"], answer=["5"] * 2) == [0.0, 0.0]
    reward = obedient(DEADLINE)
    assert reward(completions=["5", "die", "5"], answer=["5", "5", "x\n#### 5"]) == [1.0, 0.0, 1.0]
    os.kill(reward._child.pid, signal.SIGKILL)
    reward._child.wait()
    assert reward(completions=["5", "6"], answer=["5", " 5 "]) == [1.0, 0.0]
    with pytest.warns(UserWarning, match="cannot read the answer 'five'"):
        assert reward(completions=["5"], answer=["five"]) == [0.0]


def test_a_run_without_math_verify_ends_with_one_line(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert main(["--credit=none", "--reward_funcs", "math_verify", f"--output_dir={tmp_path / 'run'}"]) == 1
    expected = "error: reward math_verify: math-verify is not installed: pip install '.[math]'\n"
    assert capsys.readouterr().err.endswith(expected)


CASES = [
    ("72", "The answer is $72$.", 1.0),
    ("9*8=72\n#### 72", "#### 72", 1.0),
    ("72", r"\boxed{\frac{144}{2}}", 1.0),
    ("72", r"\boxed{73}", 0.0),
    ("72", "", 0.0),
    (r"\frac{\sqrt{3}}{2}", r"Thus $\sin(\pi/3) = \frac{\sqrt3}{2}$", 1.0),
    (r"$\frac{1}{2}$", r"\boxed{0.5}", 1.0),
    ("72", r"\boxed{36+36}", 1.0),  # a fault: nothing was computed
    ("72", "<answer>72</answer>", 0.0),  # a fault: it finds nothing
    ("72", "(" * 50_000, 0.0),
]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory are those of Linux")
def test_what_math_verify_finds_equal_earns_a_reward() -> None:
    golds, completions, expected = zip(*CASES, strict=True)
    rewards = MathReward(DEADLINE)(completions=completions, answer=golds)
    assert dict(zip(completions, rewards, strict=True)) == dict(zip(completions, expected, strict=True))
    assert MathReward(1.0)(completions=[r"\boxed{9^{9^{9^{9}}}}"], answer=["72"]) == [0.0]
